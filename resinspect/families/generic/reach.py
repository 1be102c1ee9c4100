"""Whether all that is written comes from the readers that were found, or also from a read that nobody saw.

A sublayer that gets ``norm(h)`` from a plain function, or ``h`` with something done to it, reads without a module that
reads the residual. Its write would then stand beside another sublayer's reader. So the model runs twice more: every
reader is given what it read before, every layer another residual and other tokens. What is written must then stay the
same.
"""

import torch
from torch import Tensor, nn

from resinspect.families.generic.probe import Call, Probe
from resinspect.families.generic.rerun import rerun, vectors
from resinspect.families.generic.residual import Step

SMALLEST = 1e-5
"""A smaller relative change is rounding; in half precision, a few units of its rounding."""
ROUNDINGS = 8.0


def unseen_read(model: nn.Module, probe: Probe, steps: list[Step]) -> str:
    """One clause that names a write which depends on more than what the readers read; empty if there is none."""
    one, other = (_writes(model, probe, steps, seed) for seed in (1, 2))
    for write, values in one.items():
        if any(_differ(value, changed) for value, changed in zip(values, other[write], strict=True)):
            again = _writes(model, probe, steps, 1)[write]
            if any(_differ(value, changed) for value, changed in zip(values, again, strict=True)):
                return f"what {write.path!r} gives differs between two runs on the same input"
            return (
                f"what {write.path!r} gives comes not only from modules that read the residual: a norm without a "
                "module, something done to the residual before it is read, or tokens that come in beside it"
            )
    return ""


def _differ(value: Tensor, changed: Tensor) -> bool:
    limit = max(SMALLEST, ROUNDINGS * torch.finfo(value.dtype).eps)
    change = (value.double() - changed.double()).norm(dim=-1)
    return bool((change > limit * value.double().norm(dim=-1)).any())


def _writes(model: nn.Module, probe: Probe, steps: list[Step], seed: int) -> dict[Call, list[Tensor]]:
    """Output and input of every write when its readers read what they did, and layers get vectors of a seed.

    The tokens of the second seed come in another order. The input counts too, for modules whose weights are still zero.
    """
    ids = probe.ids if seed == 1 else probe.ids.flip(-1)
    inputs = vectors(probe.layers, seed) | {reader: reader.read for step in steps for reader in step.readers}
    return rerun(model, ids, inputs, [write.call for step in steps for write in step.writes])

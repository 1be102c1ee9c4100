"""Whether a module that reads the residual hands it on within what it gives, by a weight that no number describes.

``explain`` finds a copy with one weight for all tokens and channels. A weight per token or channel, such as the share
of an identity expert, hides in the write, and every weight of earlier sources is then too small. So such modules run
with the outputs of all modules inside them held at what they were, on other inputs: what still changes by a fixed
multiple of each element of the input is a copy.
"""

import torch
from torch import Tensor, nn

from resinspect.families.generic.probe import Probe
from resinspect.families.generic.rerun import outputs_of, rerun, vectors
from resinspect.families.generic.residual import Step

CLOSE, ROUNDINGS = 1e-3, 8.0
"""Relative agreement of the multiples that two inputs give, which are ratios of differences; and in half precision."""
SMALLEST = 1e-5
"""Smaller multiples are rounding."""


def copied(model: nn.Module, probe: Probe, steps: list[Step]) -> str:
    """One clause that names a write which holds the residual; empty if there is none."""
    suspects = [w.call for step in steps for w in step.writes if w.call in step.readers and not w.call.leaf]
    if not suspects:
        return ""
    inside = {module for suspect in suspects for module in suspect.module.modules() if not [*module.children()]}
    held = outputs_of(model, probe.ids, inside)
    runs = [rerun(model, probe.ids, vectors(suspects, seed), suspects, held) for seed in (0, 1, 2)]
    for suspect in suspects:
        if all(len(run[suspect]) == 2 for run in runs) and _holds_input(*(run[suspect] for run in runs)):
            return (
                f"what {suspect.path!r} gives holds the residual itself, times a weight that differs between tokens or "
                "channels"
            )
    return ""


def _holds_input(first: list[Tensor], *others: list[Tensor]) -> bool:
    """Whether output and input change in the same proportion in two more runs, at any token or channel.

    Each run is what was given and what was got.
    """
    eps = torch.finfo(first[0].dtype).eps
    given, got = (value.double() for value in first)
    one, two = ((run[0].double() - given) / (run[1].double() - got) for run in others)
    fits = ((one - two).abs() <= max(CLOSE, ROUNDINGS * eps) * one.abs()) & (one.abs() > max(SMALLEST, eps))
    share = fits.flatten(0, -2).double()
    return bool(share.mean(-1).max() > 0.5 or share.mean(0).max() > 0.5)

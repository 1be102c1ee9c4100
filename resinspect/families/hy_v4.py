"""HY-V4, also with vision: hyper-connections without a mixing matrix.

``h = sum_n pre_n X_n`` and ``X'_n = X_n + post_n v``, so ``W[r, s] = <pre_r, post_s>``: linear attention over depth, of
rank n. Nothing decays, and the embedding's weight is ``sum_n pre_n``.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from resinspect.families.layout import Layout, Seen
from resinspect.families.streams import find_trunk, streams_layout


def recognise(model: nn.Module) -> Layout | None:
    """The layout of streams that do not mix, under a head with parameters of its own."""
    trunk = find_trunk(model)
    if trunk is None or trunk.mixes or not trunk.weighed:
        return None
    layout = streams_layout("hy_v4", "ihc", trunk, logits=_logits, written={"post": lambda seen: seen.output[0]})
    return replace(layout, rounds_to=torch.float32)


def _logits(seen: Seen, matrix: Tensor) -> Tensor:
    """From ``input_norm``, which gives only the scale ``(batch, token, 1)`` of all streams together."""
    return nn.functional.linear(seen.args[0], matrix) * seen.output

"""DeepSeek-V4: manifold-constrained hyper-connections (mHC), read out by a weighted sum of the streams.

``h = sum_n pre_n X_n`` and ``X'_n = post_n v + sum_m K[m, n] X_m``: the matrix of the Sinkhorn-Knopp steps is used
transposed. Its last step is by columns, so every new stream is a convex mix of the old ones, up to an epsilon.
"""

from torch import Tensor, nn

from resinspect.families.layout import Layout, Seen
from resinspect.families.streams import Trunk, find_trunk, streams_layout


def recognise(model: nn.Module) -> Layout | None:
    """The layout of streams that mix, under a head with parameters of its own."""
    trunk = find_trunk(model)
    return mhc_layout("deepseek_v4", trunk) if trunk and trunk.mixes and trunk.weighed else None


def mhc_layout(family: str, trunk: Trunk) -> Layout:
    """The layout of streams that mix."""
    return streams_layout(family, "mhc", trunk, logits=_logits, written={"post": _post, "mix": _mix})


def _logits(seen: Seen, matrix: Tensor) -> Tensor:
    """From ``input_norm``, whose output is normed over all streams together."""
    return nn.functional.linear(seen.output, matrix)


def _post(seen: Seen) -> Tensor:
    """Rounded to the streams' own dtype, as the layer does before it uses them."""
    return seen.output[0].to(seen.args[0].dtype)


def _mix(seen: Seen) -> Tensor:
    return seen.output[1].to(seen.args[0].dtype).mT

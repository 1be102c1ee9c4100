"""GLM-5 next: hyper-connections as in DeepSeek-V4, read out by the plain mean of the streams."""

from torch import nn

from resinspect.families.deepseek_v4 import mhc_layout
from resinspect.families.layout import Layout
from resinspect.families.streams import find_trunk


def recognise(model: nn.Module) -> Layout | None:
    """The layout of streams that mix, under a head without parameters."""
    trunk = find_trunk(model)
    return mhc_layout("glm5_next", trunk) if trunk and trunk.mixes and not trunk.weighed else None

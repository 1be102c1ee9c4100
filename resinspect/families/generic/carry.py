"""The linear program of a residual that is carried on with fixed weights, and perhaps normed."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from resinspect.anatomy import Site
from resinspect.families.generic.norms import Norm
from resinspect.program import TERM, Carrier, Connection, Native


class Carry(Connection):
    """``h' = norm(keep h + sum of the writes) + bias``; the writes have their own weights in them.

    Where a norm is on the carry, W is exact given its statistics ("conditional"), and its bias is a source of its own.

    Args:
        keep: Per site index, the weight on the carry; a site not listed keeps all of it.
        norms: Per site index, the norm of the sum; most sites have none.
    """

    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"rstd": ()}

    def __init__(self, keep: Mapping[int, float], norms: Mapping[int, Norm]) -> None:
        super().__init__()
        self.keep, self.norms = dict(keep), dict(norms)
        if norms:
            self.carrier = TERM

    def write(self, carrier: Carrier, state: Tensor, site: Site, native: Native, *values: Tensor) -> Tensor:
        """Weigh the carry, add the writes, norm the sum, add the norm's bias."""
        if site.index in self.keep:
            state = carrier.scale(state.new_tensor(self.keep[site.index]), state)
        norm = self.norms.get(site.index)
        if norm is None:
            return sum(values, state)
        values, bias = (values, ()) if norm.bias is None else (values[:-1], values[-1:])
        gain = state.new_ones(()) if norm.gain is None else norm.gain.to(state.device, state.dtype)
        return sum(bias, carrier.normalise(sum(values, state), native["rstd"], gain, centre=norm.centre))

"""Connections with static weights on the carry and on the write, as many families have them."""

from collections.abc import Mapping

from torch import Tensor

from resinspect.anatomy import Site
from resinspect.program import COEFFICIENT, TERM, Carrier, Connection, Native


class Weighted(Connection):
    """``h' = keep h + add w``, with weights that belong to the site: one number, or one per channel.

    Further sources of a site enter with weight 1.

    Args:
        keep: Per site index, the weight on the carry, ``()`` or ``(d)``; a site not listed keeps all of it.
        add: Per site index, the weight on its write; a site not listed adds all of it.
    """

    def __init__(self, keep: Mapping[int, Tensor] | None = None, add: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        # Plain dictionaries: the tensors stay the model's own, also where it is moved.
        self.keep = {site: weight.detach() for site, weight in (keep or {}).items()}
        self.add = {site: weight.detach() for site, weight in (add or {}).items()}
        scalar = all(weight.ndim == 0 for weight in (*self.keep.values(), *self.add.values()))
        self.carrier = COEFFICIENT if scalar else TERM

    def write(self, carrier: Carrier, state: Tensor, site: Site, native: Native, *values: Tensor) -> Tensor:
        """Weigh the carry and the write, and add what comes with it."""
        value, *extras = values
        state = weigh(carrier, self.keep.get(site.index), state)
        return sum(extras, state + weigh(carrier, self.add.get(site.index), value))


def weigh(carrier: Carrier, weight: Tensor | None, slot: Tensor) -> Tensor:
    """A slot times a weight ``()`` or ``(d)``, in the slot's own precision; None is 1."""
    if weight is None:
        return slot
    weight = weight.to(slot.device, slot.dtype)
    return carrier.scale(weight, slot) if weight.ndim == 0 else carrier.channels(weight, slot)

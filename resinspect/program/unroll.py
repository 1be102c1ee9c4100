"""Running a connection's linear program on sources instead of hidden vectors, one site at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from resinspect.anatomy import Anatomy, Site
from resinspect.program.carriers import Carrier
from resinspect.program.connection import Connection, Native

SourceSlot = Callable[[int], Tensor]


def one_hot(num_sources: int, **options: object) -> SourceSlot:
    """Coefficient slots: source ``s`` is the unit vector ``e_s``, shape ``(S,)``; every row is then a row of W."""
    unit = torch.eye(num_sources, **options)
    return unit.__getitem__


def terms(writes: Tensor) -> SourceSlot:
    """Term slots of captured writes ``(..., S, d)``: source ``s`` is its own vector in place ``s``, zero elsewhere."""

    def slot(source: int) -> Tensor:
        term = torch.zeros_like(writes)
        term[..., source, :] = writes[..., source, :]
        return term

    return slot


class Unroll:
    """A connection's program over sources, advanced online as natives become known.

    Example:
        >>> unroll = Unroll(connection, anatomy, COEFFICIENT, one_hot(len(anatomy.sources)))
        >>> for site, native in zip(anatomy.sites, natives):
        ...     rows = unroll.read(native)  # one (..., S) slot per view of the site

    Args:
        connection: The scheme; only its linear verbs are called.
        anatomy: Its sites and sources.
        carrier: What the slots hold.
        source: Gives the slot of source ``s``.
    """

    def __init__(self, connection: Connection, anatomy: Anatomy, carrier: Carrier, source: SourceSlot) -> None:
        self.connection, self.anatomy, self.carrier, self.source = connection, anatomy, carrier, source
        self.state = connection.start(carrier, source(0))
        self._next, self._writing = 0, False
        self._native: Native = {}
        self._before = self.state

    def read_at(self, site: Site, native_of: Callable[[Site], Native]) -> tuple[Tensor, ...]:
        """Run on to a site, through all writes before it, and form its inputs."""
        while self._next < site.index:
            if self._writing:
                self.write(native_of(self.anatomy.sites[self._next]))
            else:
                self.read(native_of(self.anatomy.sites[self._next]))
        return self.read(native_of(site))

    def read(self, native: Native) -> tuple[Tensor, ...]:
        """Form the next site's inputs; natives of its write may follow with ``write``."""
        self._before = self.state
        return self.read_again(native)

    def read_again(self, native: Native) -> tuple[Tensor, ...]:
        """Form the inputs of the site that was read last once more: more of its natives are known."""
        site = self.anatomy.sites[self._next]
        rows, self.state = self.connection.read(self.carrier, self._before, site, native)
        self._native, self._writing = native, True
        return rows

    def write(self, native: Native | None = None) -> None:
        """Write that site's sources into the state and move on to the next site."""
        site = self.anatomy.sites[self._next]
        values = map(self.source, self.anatomy.sources_of(site))
        native = self._native | (native or {})
        self.state = self.connection.write(self.carrier, self.state, site, native, *values)
        self._next, self._writing = self._next + 1, False

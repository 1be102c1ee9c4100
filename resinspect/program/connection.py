"""The connection: how a residual scheme forms each reader's input from what was written before.

``route_read`` and ``route_write`` are the only places where parameters and non-linear functions act; they see hidden
vectors and return **natives** (softmax weights, gates, mixing matrices, ...). ``start``, ``read`` and ``write`` are
linear in the slots given the natives and run on any carrier. The forward pass and the unrolling to W are therefore the
same code.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from resinspect.anatomy import Site
from resinspect.program.carriers import Carrier

Native = dict[str, Tensor]
State = Any


class Connection(nn.Module):
    """The plain residual, and the base of every other connection.

    Attributes:
        views: Per site kind, names of separate reader inputs; a kind not listed has one.
        natives: Per site kind, the names of the natives that its two ``route_*`` calls return. Every native has
            leading dimensions ``(batch, token)``, also where it does not depend on the token.
        native_dims: Per native, the names of its further dimensions.
    """

    views: ClassVar[dict[str, tuple[str, ...]]] = {}
    natives: ClassVar[dict[str, tuple[str, ...]]] = {}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {}

    def route_read(self, state: State, site: Site) -> Native:
        """Natives needed to read at ``site``, from hidden vectors ``(batch, token, ..., d)``."""
        return {}

    def route_write(self, state: State, site: Site, value: Tensor) -> Native:
        """Natives needed to write ``value`` ``(batch, token, d)`` at ``site``."""
        return {}

    def start(self, carrier: Carrier, embedding: Tensor) -> State:
        """The state before the first site."""
        return embedding

    def read(self, carrier: Carrier, state: State, site: Site, native: Native) -> tuple[tuple[Tensor, ...], State]:
        """The site's inputs, one slot per view, and the state."""
        return (state,) * len(site.views), state

    def write(self, carrier: Carrier, state: State, site: Site, native: Native, value: Tensor) -> State:
        """The state after the site wrote ``value``."""
        return state + value

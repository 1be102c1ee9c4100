"""The connection: how a residual scheme forms each reader's input from what was written before.

``route_read`` and ``route_write`` are the only places where parameters and non-linear functions act; they see hidden
vectors and return **natives** (softmax weights, gates, mixing matrices, ...). ``start``, ``read`` and ``write`` are
linear in the slots given the natives and run on any carrier. The forward pass and the unrolling to W are therefore the
same code.
"""

from typing import Any, ClassVar

from torch import Tensor, nn

from resinspect.anatomy import Site
from resinspect.program.carriers import COEFFICIENT, Carrier

Native = dict[str, Tensor]
State = Any


class Connection(nn.Module):
    """The plain residual, and the base of every other connection.

    Attributes:
        carrier: What the unroll needs: ``COEFFICIENT`` if one scalar per source and token says it all, else ``TERM``.
        kinds: Sublayers of a layer, in execution order.
        pre_norm: Whether sublayers and readout norm what they read.
        post_norm: Whether sublayers norm what they write; the write is then the normed output.
        extra_sources: Names of sources that come with every write; ``extras`` gives their vectors.
        views: Per site kind, names of separate reader inputs; a kind not listed has one.
        natives: Per site kind, the names of the natives that its two ``route_*`` calls return. Every native has
            leading dimensions ``(batch, token)``, also where it does not depend on the token.
        native_dims: Per native, the names of its further dimensions.
    """

    carrier: Carrier = COEFFICIENT
    kinds: ClassVar[tuple[str, ...]] = ("attn", "mlp")
    pre_norm: ClassVar[bool] = True
    post_norm: ClassVar[bool] = False
    extra_sources: ClassVar[tuple[str, ...]] = ()
    views: ClassVar[dict[str, tuple[str, ...]]] = {}
    natives: ClassVar[dict[str, tuple[str, ...]]] = {}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {}

    def route_read(self, state: State, site: Site) -> Native:
        """Natives needed to read at ``site``, from hidden vectors ``(batch, token, ..., d)``."""
        return {}

    def route_write(self, state: State, site: Site, value: Tensor) -> Native:
        """Natives needed to write ``value`` ``(batch, token, d)`` at ``site``."""
        return {}

    def extras(self, state: State, site: Site) -> tuple[Tensor, ...]:
        """Vectors ``(batch, token, d)`` of the sources that come with the site's write, as in ``extra_sources``."""
        return ()

    def start(self, carrier: Carrier, embedding: Tensor) -> State:
        """The state before the first site."""
        return embedding

    def read(self, carrier: Carrier, state: State, site: Site, native: Native) -> tuple[tuple[Tensor, ...], State]:
        """The site's inputs, one slot per view, and the state."""
        return (state,) * len(site.views), state

    def write(self, carrier: Carrier, state: State, site: Site, native: Native, *values: Tensor) -> State:
        """The state after the site wrote ``values``: its write first, then the extras that come with it."""
        return sum(values, state)

"""The connections of the reference model: one file each, and one line here."""

from resinspect.errors import OptionError
from resinspect.models.connections.attnres import AttnRes
from resinspect.models.connections.block_attnres import BlockAttnRes
from resinspect.models.connections.dca import DCA
from resinspect.models.connections.ddl import DDL
from resinspect.models.connections.denseformer import DenseFormer
from resinspect.models.connections.hyper_connections import HyperConnections
from resinspect.models.connections.mhc import MHC
from resinspect.models.connections.post_ln import PostLN
from resinspect.models.connections.pre_ln import PreLN
from resinspect.models.connections.sandwich import Sandwich
from resinspect.models.connections.short_swa import ShortSWA
from resinspect.program import Connection

CONNECTIONS: dict[str, type[Connection]] = {
    "pre_ln": PreLN,
    "post_ln": PostLN,
    "sandwich": Sandwich,
    "denseformer": DenseFormer,
    "attnres": AttnRes,
    "block_attnres": BlockAttnRes,
    "dca": DCA,
    "hyper_connections": HyperConnections,
    "mhc": MHC,
    "ddl": DDL,
    "short_swa": ShortSWA,
}


def build_connection(name: str, *, num_layers: int, hidden_size: int, **options: object) -> Connection:
    """The connection called ``name``, for a decoder of ``num_layers`` layers.

    Raises:
        OptionError: If there is no such connection, or it does not take one of the options.
    """
    if name not in CONNECTIONS:
        raise OptionError(f"connection {name!r} is unknown; choose one of {', '.join(CONNECTIONS)}.")
    sublayers = num_layers * len(CONNECTIONS[name].kinds)
    try:
        return CONNECTIONS[name](num_sites=sublayers + 1, hidden_size=hidden_size, **options)
    except TypeError as error:
        raise OptionError(f"connection {name!r} cannot be built with options {options}: {error}.") from error

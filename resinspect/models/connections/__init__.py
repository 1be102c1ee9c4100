"""The connections of the reference model: one file each, and one line here."""

from resinspect.errors import OptionError
from resinspect.models.connections.attnres import AttnRes
from resinspect.models.connections.hyper_connections import HyperConnections
from resinspect.models.connections.pre_ln import PreLN
from resinspect.program import Connection

CONNECTIONS: dict[str, type[Connection]] = {
    "pre_ln": PreLN,
    "attnres": AttnRes,
    "hyper_connections": HyperConnections,
}


def build_connection(name: str, *, num_sites: int, hidden_size: int, **options: object) -> Connection:
    """The connection called ``name``, for ``num_sites`` sites (the final readout included).

    Raises:
        OptionError: If there is no such connection, or it does not take one of the options.
    """
    if name not in CONNECTIONS:
        raise OptionError(f"connection {name!r} is unknown; choose one of {', '.join(CONNECTIONS)}.")
    try:
        return CONNECTIONS[name](num_sites=num_sites, hidden_size=hidden_size, **options)
    except TypeError as error:
        raise OptionError(f"connection {name!r} cannot be built with options {options}: {error}.") from error

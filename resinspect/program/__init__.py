"""The linear core: carriers, connections, their unrolling, and the least-squares solve."""

from resinspect.program.carriers import (
    COEFFICIENT,
    COEFFICIENT_PATHS,
    TERM,
    VECTOR,
    VECTOR_PATHS,
    Carrier,
    CarrierError,
)
from resinspect.program.connection import Connection, Native, State
from resinspect.program.solve import Solution, solve
from resinspect.program.unroll import Unroll, one_hot, terms

__all__ = [
    "COEFFICIENT",
    "COEFFICIENT_PATHS",
    "TERM",
    "VECTOR",
    "VECTOR_PATHS",
    "Carrier",
    "CarrierError",
    "Connection",
    "Native",
    "Solution",
    "State",
    "Unroll",
    "one_hot",
    "solve",
    "terms",
]

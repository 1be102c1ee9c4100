"""The trace convention as data: one table of variables, one of coordinates, one of attributes."""

from dataclasses import dataclass

CONVENTION = "resinspect-trace/1"
NATIVE_PREFIX = "native_"
METHODS = ("replay", "solve")
# Spacing of the numbers next to 1 in each compute dtype (torch and numpy call this eps).
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass(frozen=True)
class Variable:
    """One row of the variable table.

    Attributes:
        dims: dimensions, in order.
        long_name: what it is, for axes and colour bars.
        units: unit, "1" where it has none.
        required: whether every trace has it.
        nonnegative: whether a value below zero is an error.
    """

    dims: tuple[str, ...]
    long_name: str
    units: str = "1"
    required: bool = False
    nonnegative: bool = False


@dataclass(frozen=True)
class Coordinate:
    """One row of the coordinate table.

    Attributes:
        dim: the dimension it labels.
        kind: "str" or "int".
        long_name: what it is.
        required: whether every trace has it.
    """

    dim: str
    kind: str
    long_name: str
    required: bool = True


_READ = ("token", "reader", "source")
_BY_READER = ("token", "reader")
_BY_SOURCE = ("token", "source")

VARIABLES: dict[str, Variable] = {
    "weight": Variable(_READ, "routing weight", required=True),
    "weight_error": Variable(_READ, "uncertainty of the solved routing weight", nonnegative=True),
    "contribution": Variable(_READ, "inner product of contribution and reader input", "activation²"),
    "contribution_norm": Variable(_READ, "norm of the contribution", "activation", nonnegative=True),
    "discarded": Variable(_READ, "fraction a scalar weight discards", nonnegative=True),
    "cross": Variable(_READ, "inner product of write and reader input", "activation²"),
    "gram": Variable(("token", "source", "source2"), "inner product of two writes", "activation²"),
    "source_norm": Variable(_BY_SOURCE, "norm of the write", "activation", required=True, nonnegative=True),
    "reader_norm": Variable(_BY_READER, "norm of the reader input", "activation", required=True, nonnegative=True),
    "fidelity": Variable(_BY_READER, "relative reconstruction error", required=True, nonnegative=True),
    "kappa": Variable(_BY_READER, "conditioning of the reconstruction", required=True, nonnegative=True),
    "reader_max": Variable(_BY_READER, "largest channel of the reader input, absolute", "activation", nonnegative=True),
    "reader_mean": Variable(_BY_READER, "channel mean of the reader input", "activation"),
    "source_max": Variable(_BY_SOURCE, "largest channel of the write, absolute", "activation", nonnegative=True),
    "reader_gram": Variable(("token", "reader", "reader2"), "inner product of two reader inputs", "activation²"),
    "write_cross": Variable(
        ("token", "source", "reader"), "inner product of any write and reader input", "activation²"
    ),
    "stream_weight": Variable(("token", "reader", "stream", "source"), "routing weight in each stream"),
    "loss": Variable(("token",), "loss of predicting the next token", "nats"),
    "lens_kl": Variable(_BY_READER, "KL(final || lens) of the next token", "nats", nonnegative=True),
    "lens_entropy": Variable(_BY_READER, "entropy of the lens", "nats", nonnegative=True),
    "lens_overlap": Variable(_BY_READER, "share of the 5 likeliest tokens that lens and final have in common"),
    "lens_loss": Variable(_BY_READER, "loss of the lens in predicting the next token", "nats", nonnegative=True),
    "attribution": Variable(_BY_SOURCE, "part of the next token's logit above the mean logit", "nats"),
    "attribution_bias": Variable(("token",), "part of that logit from biases of norm and head", "nats"),
    "reader_gradient": Variable(
        _BY_READER, "gradient of the loss by the reader input", "nats/activation", nonnegative=True
    ),
    "source_gradient": Variable(_BY_SOURCE, "gradient of the loss by the write", "nats/activation", nonnegative=True),
    "logits": Variable(("token", "vocab"), "logit of the next token", "nats"),
    "reader_hidden": Variable(("token", "reader", "hidden"), "reader input", "activation"),
    "source_hidden": Variable(("token", "source", "hidden"), "write", "activation"),
}

COORDINATES: dict[str, Coordinate] = {
    "reader": Coordinate("reader", "str", "reader"),
    "reader_kind": Coordinate("reader", "str", "kind of reader"),
    "reader_layer": Coordinate("reader", "int", "layer of the reader, -1 if none"),
    "reader_prefix": Coordinate("reader", "int", "leading sources that exist when the reader reads"),
    # Only after select(sources=...): the verdict needs how many sources the reconstruction summed over.
    "reader_terms": Coordinate("reader", "int", "sources the reconstruction summed over", required=False),
    "source": Coordinate("source", "str", "source"),
    "source_kind": Coordinate("source", "str", "kind of source"),
    "source_layer": Coordinate("source", "int", "layer of the source, -1 if none"),
    "sample": Coordinate("token", "int", "prompt"),
    "position": Coordinate("token", "int", "position in the prompt"),
    "token_id": Coordinate("token", "int", "token id"),
    "text": Coordinate("token", "str", "token"),
}

ATTRIBUTES: dict[str, type] = {
    "convention": str,
    "model": str,
    "scheme": str,
    "method": str,
    "dtype": str,
    "write_definition": str,
    "source_definition": str,
    "versions": str,
    "hash": str,
    "tolerance": float,
}

# Attributes with a closed set of values.
ALLOWED: dict[str, tuple[str, ...]] = {"convention": (CONVENTION,), "method": METHODS, "dtype": tuple(EPS)}

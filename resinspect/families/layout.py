"""What a family says about a model: its anatomy, its linear program, and where each thing can be seen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from resinspect.anatomy import Anatomy
from resinspect.program import Connection

What = Literal["source", "reader", "native"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing seen during a forward pass.

    Attributes:
        what: A source's write, a reader's input, or a native.
        index: Of the source, of the reader, or of the native's site.
        name: Of the native.
    """

    what: What
    index: int
    name: str = ""


class Seen(NamedTuple):
    """One call of a module, as a hook sees it; ``output`` is None on the input side."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True, slots=True)
class Tap:
    """Where an event is seen: a call of a module, before or after it ran.

    Attributes:
        path: Name of the module, for messages.
        module: The module.
        side: Before (``"input"``) or after (``"output"``).
        event: What is seen there; None for a call that is known and of no interest.
        pick: Takes or computes the tensor ``(batch, token, ...)``; by default the first input or the output, or the
            first item of an output tuple.
        call: Which call of the module in one forward pass, where it runs more than once.
        put: The counterpart of ``pick``: the same call with another tensor in its place. Not needed where ``pick`` is
            not given, but for a source that is seen at an input.
        carried: Of a reader: whether the model also carries on from this very tensor, so that no edit of it would be an
            edit of what is read alone.
    """

    path: str
    module: nn.Module
    side: Literal["input", "output"]
    event: Event | None
    pick: Callable[[Seen], Tensor] | None = None
    call: int = 0
    put: Callable[[Seen, Tensor], Seen] | None = None
    carried: bool = False


def put_argument(seen: Seen, value: Tensor) -> Seen:
    """A call with another first argument."""
    return seen._replace(args=(value, *seen.args[1:]))


def put_item(index: int) -> Callable[[Seen, Tensor], Seen]:
    """Replaces one item of what a module returns, a tuple or a stack of tensors."""

    def put(seen: Seen, value: Tensor) -> Seen:
        output = seen.output
        if isinstance(output, Tensor):
            output = output.clone()
            output[index] = value
            return seen._replace(output=output)
        items = list(output)
        items[index] = value
        return seen._replace(output=tuple(items))

    return put


@dataclass(frozen=True)
class Layout:
    """One model as resinspect sees it.

    Attributes:
        family: Name of the family that recognised the model.
        scheme: Name of the residual scheme.
        anatomy: Its sources and readers.
        taps: Where they are seen, in the order in which taps of one module must fire.
        connection: The linear program that replays it; None where only ``method="solve"`` is possible.
        write_definition: What counts as a write.
        source_definition: What source 0 is.
        routing: Names of the parameters that decide the routing.
        rounds_to: The dtype that the model rounds its residual or weights to inside, whatever its own; None for none.
    """

    family: str
    scheme: str
    anatomy: Anatomy
    taps: tuple[Tap, ...]
    connection: Connection | None
    write_definition: str
    source_definition: str
    routing: tuple[str, ...] = ()
    rounds_to: torch.dtype | None = None


Recognise = Callable[[nn.Module], Layout | None]
"""The layout of a model, or None if the model is not of the family."""

Weight = Literal["static scalar", "scalar per token", "per channel", "conditional", "solved"]
"""Class of W: the same for all tokens; one number per token; one per channel; given the statistics of norms."""


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table of families.

    Attributes:
        recognise: Looks at a model's structure, never at its class name alone.
        scheme: What its residual does, in a few words.
        weight: Class of its W.
        readers: Its readers within a layer.
        error: Largest relative error that tests reached in float32, rounded up.
    """

    recognise: Recognise
    scheme: str
    weight: Weight
    readers: str
    error: float

    @property
    def method(self) -> str:
        """How its W is found, then what tests check it by: the rows of W can be solved where they are scalars."""
        if self.weight == "solved":
            return "solve"
        return "replay, solve" if self.weight in ("static scalar", "scalar per token") else "replay"

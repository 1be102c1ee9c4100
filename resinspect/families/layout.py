"""What a family says about a model: its anatomy, its linear program, and where each thing can be seen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
class Tap:
    """Where an event is seen: the input or output of a module.

    Attributes:
        path: Name of the module, for messages.
        module: The module.
        side: Which side of it.
        event: What is seen there.
        pick: Takes the tensor ``(batch, token, ...)`` from the first input or from the output; by default the
            value itself, or the first item of a tuple.
    """

    path: str
    module: nn.Module
    side: Literal["input", "output"]
    event: Event
    pick: Callable[[Any], Tensor] | None = None


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
    """

    family: str
    scheme: str
    anatomy: Anatomy
    taps: tuple[Tap, ...]
    connection: Connection | None
    write_definition: str
    source_definition: str


Recognise = Callable[[nn.Module], Layout | None]
"""A family: the layout of a model, or None if the model is not one of its own."""

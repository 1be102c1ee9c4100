"""Any module whose sublayers the user names: W is solved from reader inputs and writes alone."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from torch import nn

from resinspect.anatomy import EMBED, FINAL, Anatomy, Reader, Source
from resinspect.errors import CaptureError
from resinspect.families.layout import Event, Layout, Tap

Sublayers = Sequence[tuple[str, str]]


class Call(NamedTuple):
    """One call of a module in a forward pass; as text ``"h.0.attn"``, or ``"h.0.attn@1"`` for its second call."""

    path: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.path}@{self.number}" if self.number else self.path


class Sublayer(NamedTuple):
    """A write and the reader whose input it was computed from."""

    layer: int
    write: Call
    read: Call


def name_layout(model: nn.Module, sublayers: Sublayers, final: str) -> Layout:
    """The layout of a model from module paths.

    Args:
        model: Any module.
        sublayers: ``(write module, reader module)`` of each sublayer, in execution order; ``*`` stands for a layer
            number, as in ``("h.*.attn", "h.*.ln_1")``. A write is the output of the first, a reader's input is the
            input of the second. A module that runs several times gets one name for each call: ``"attn@1"`` is its
            second, ``"attn@2"`` its third, ``"attn"`` its first. Neighbours with the same reader are parallel.
        final: Path of the module whose input is the final readout, usually the last norm; it takes ``@`` too.

    Raises:
        CaptureError: If a path or pattern names no module, the two patterns of a pair do not match up, or a write is
            named twice or not for every call up to its last.
    """
    found = list(_expand(model, sublayers))
    last = _call(final, "final")
    _module(model, last.path, "final")
    _check_calls([sublayer.write for sublayer in found])
    sources = (Source(EMBED, EMBED), *(Source(str(s.write), _kind(s.write), s.layer) for s in found))
    prefixes = _prefixes(found)
    readers = [Reader(str(s.write), _kind(s.write), p, s.layer) for s, p in zip(found, prefixes, strict=True)]
    return Layout(
        family="named",
        scheme="unknown",
        anatomy=Anatomy(sources, (*readers, Reader(FINAL, FINAL, len(sources)))),
        taps=tuple(_taps(model, found, last)),
        connection=None,
        write_definition="output of the modules named in sublayers",
        source_definition=f"source 0 is what {found[0].read} reads",
    )


def _taps(model: nn.Module, found: list[Sublayer], final: Call) -> Iterator[Tap]:
    numbers = {
        "input": _numbers(model, [*(sublayer.read for sublayer in found), final]),
        "output": _numbers(model, [sublayer.write for sublayer in found]),
    }

    def tap(call: Call, side: Literal["input", "output"], event: Event) -> Tap:
        return Tap(str(call), model.get_submodule(call.path), side, event, call=numbers[side][call])

    yield tap(found[0].read, "input", Event("source", 0))
    for i, sublayer in enumerate(found):
        yield tap(sublayer.read, "input", Event("reader", i))
        yield tap(sublayer.write, "output", Event("source", i + 1))
    yield tap(final, "input", Event("reader", len(found)))


def _numbers(model: nn.Module, calls: list[Call]) -> dict[Call, int]:
    """Which call of its module each name means. A module with several paths runs in the order in which they stand."""
    of_module: dict[nn.Module, list[Call]] = {}
    for call in dict.fromkeys(calls):
        of_module.setdefault(model.get_submodule(call.path), []).append(call)
    numbers = {}
    for same in of_module.values():
        one_path = len({call.path for call in same}) == 1
        numbers |= {call: call.number if one_path else place for place, call in enumerate(same)}
    return numbers


def _prefixes(found: list[Sublayer]) -> Iterator[int]:
    """Sources that exist when each sublayer reads: neighbours with the same reader all read before the first writes."""
    done = 0
    for _, parallel in groupby(found, key=lambda sublayer: sublayer.read):
        count = len(list(parallel))
        yield from [done + 1] * count
        done += count


def _expand(model: nn.Module, sublayers: Sublayers) -> Iterator[Sublayer]:
    """Every sublayer in execution order.

    Consecutive patterns with the same text before their first ``*`` and the same call are the sublayers of one stack
    of layers: its layers come first, then the sublayers as listed.
    """
    for _, stack in groupby(_pairs(sublayers), key=_stack):
        found = []
        for order, (write, read) in enumerate(stack):
            writes, reads = _matches(model, write), _matches(model, read)
            if writes.keys() != reads.keys():
                raise CaptureError(
                    f"{str(write)!r} matches layers {_layers(writes)} but {str(read)!r} matches {_layers(reads)}; "
                    "the two patterns of a pair must match the same layers."
                )
            found += [(numbers, order, writes[numbers], reads[numbers]) for numbers in writes]
        for numbers, _, write, read in sorted(found):
            yield Sublayer(numbers[0] if numbers else -1, write, read)


def _stack(pair: tuple[Call, Call]) -> object:
    write, _ = pair
    return (write.path.partition("*")[0], write.number) if "*" in write.path else pair


def _pairs(sublayers: Sublayers) -> list[tuple[Call, Call]]:
    form = 'name pairs of module paths such as [("h.*.attn", "h.*.ln_1"), ("h.*.mlp", "h.*.ln_2")].'
    pairs = list(sublayers) if isinstance(sublayers, Sequence) and not isinstance(sublayers, str) else [sublayers]
    if not pairs:
        raise CaptureError(f"sublayers is empty; {form}")
    for pair in pairs:
        if (
            isinstance(pair, str)
            or not isinstance(pair, Sequence)
            or len(pair) != 2
            or not all(isinstance(path, str) for path in pair)
        ):
            raise CaptureError(f"sublayers holds {pair!r}; {form}")
    return [(_call(write, "sublayers"), _call(read, "sublayers")) for write, read in pairs]


def _call(name: str, argument: str) -> Call:
    path, at, number = name.partition("@")
    if at and not (number.isascii() and number.isdecimal()):
        raise CaptureError(
            f"{argument} names {name!r}, but after @ comes the number of a call, such as {path + '@1'!r} for the "
            "second time that module runs."
        )
    return Call(path, int(number or 0))


def _check_calls(writes: list[Call]) -> None:
    """A call of a writing module that no one named would be a source left out in silence."""
    if doubles := [call for i, call in enumerate(writes) if call in writes[:i]]:
        raise CaptureError(
            f"sublayers names the write {str(doubles[0])!r} twice; if that module runs several times, name its calls: "
            f"{doubles[0].path!r}, {str(Call(doubles[0].path, 1))!r}, ..."
        )
    for call in writes:
        missing = next((n for n in range(call.number) if Call(call.path, n) not in writes), None)
        if missing is not None:
            raise CaptureError(
                f"sublayers names the write {str(call)!r} but not {str(Call(call.path, missing))!r}; every call of a "
                "module that writes is a source of its own, counted from 0."
            )


def _layers(found: dict[tuple[int, ...], Call]) -> str:
    return ", ".join(".".join(map(str, numbers)) or "(no *)" for numbers in sorted(found))


def _matches(model: nn.Module, pattern: Call) -> dict[tuple[int, ...], Call]:
    if "*" not in pattern.path:
        _module(model, pattern.path, "sublayers")
        return {(): pattern}
    regex = re.compile(re.escape(pattern.path).replace(r"\*", r"(\d+)"))
    matches = ((regex.fullmatch(name), name) for name, _ in model.named_modules(remove_duplicate=False))
    found = {tuple(map(int, match.groups())): Call(name, pattern.number) for match, name in matches if match}
    if not found:
        raise CaptureError(
            f"sublayers pattern {pattern.path!r} matches no module of {type(model).__name__}; {_has(model)}"
        )
    return found


def _module(model: nn.Module, path: str, argument: str) -> nn.Module:
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules or not path:
        raise CaptureError(f"{argument} names {path!r}, which {type(model).__name__} does not have; {_has(model)}")
    return modules[path]


def _has(model: nn.Module) -> str:
    names = [re.sub(r"\b\d+\b", "*", name) for name, _ in model.named_modules() if name]
    return "it has " + ", ".join(list(dict.fromkeys(names))[:20]) + "."


def _kind(call: Call) -> str:
    return call.path.rpartition(".")[2]

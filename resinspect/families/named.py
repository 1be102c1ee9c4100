"""Any module whose sublayers the user names: W is solved from reader inputs and writes alone."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import nn

from resinspect.anatomy import EMBED, FINAL, Anatomy, Reader, Source
from resinspect.errors import CaptureError
from resinspect.families.layout import Event, Layout, Tap

Sublayers = Sequence[tuple[str, str]]


def name_layout(model: nn.Module, sublayers: Sublayers, final: str) -> Layout:
    """The layout of a model from module paths.

    Args:
        model: Any module.
        sublayers: ``(write module, reader module)`` of each sublayer of a layer, in execution order; ``*`` stands
            for a layer number, as in ``("h.*.attn", "h.*.ln_1")``. A write is the output of the first, a reader's
            input is the input of the second.
        final: Path of the module whose input is the final readout, usually the last norm.

    Raises:
        CaptureError: If a path or pattern names no module, or the two patterns of a pair do not match up.
    """
    pairs = list(_expand(model, sublayers))
    last = _module(model, final, "final")
    sources = (Source(EMBED, EMBED), *(Source(write, _kind(write), layer) for layer, write, _ in pairs))
    readers = tuple(Reader(write, _kind(write), i + 1, layer) for i, (layer, write, _) in enumerate(pairs))
    taps = []
    for i, (_, write, read) in enumerate(pairs):
        module = model.get_submodule(read)
        if i == 0:
            taps.append(Tap(read, module, "input", Event("source", 0)))
        taps.append(Tap(read, module, "input", Event("reader", i)))
        taps.append(Tap(write, model.get_submodule(write), "output", Event("source", i + 1)))
    taps.append(Tap(final, last, "input", Event("reader", len(pairs))))
    return Layout(
        family="named",
        scheme="unknown",
        anatomy=Anatomy(sources, (*readers, Reader(FINAL, FINAL, len(sources)))),
        taps=tuple(taps),
        connection=None,
        write_definition="output of the modules named in sublayers",
        source_definition=f"source 0 is what {pairs[0][2]} reads",
    )


def _expand(model: nn.Module, sublayers: Sublayers) -> Iterator[tuple[int, str, str]]:
    """``(layer, write path, read path)`` in execution order.

    Consecutive patterns with the same text before their first ``*`` are the sublayers of one stack of layers: its
    layers come first, then the sublayers as listed.
    """
    for _, stack in groupby(_pairs(sublayers), key=lambda pair: pair[0].partition("*")[0] if "*" in pair[0] else pair):
        found = []
        for order, (write, read) in enumerate(stack):
            writes, reads = _matches(model, write), _matches(model, read)
            if writes.keys() != reads.keys():
                raise CaptureError(
                    f"{write!r} matches layers {_layers(writes)} but {read!r} matches {_layers(reads)}; "
                    "the two patterns of a pair must match the same layers."
                )
            found += [(numbers, order, writes[numbers], reads[numbers]) for numbers in writes]
        for numbers, _, write, read in sorted(found):
            yield (numbers[0] if numbers else -1), write, read


def _pairs(sublayers: Sublayers) -> list[tuple[str, str]]:
    form = 'name pairs of module paths such as [("h.*.attn", "h.*.ln_1"), ("h.*.mlp", "h.*.ln_2")].'
    pairs = [sublayers] if isinstance(sublayers, str) else list(sublayers)
    if not pairs:
        raise CaptureError(f"sublayers is empty; {form}")
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(path, str) for path in pair):
            raise CaptureError(f"sublayers holds {pair!r}; {form}")
    return [(write, read) for write, read in pairs]


def _layers(found: dict[tuple[int, ...], str]) -> str:
    return ", ".join(".".join(map(str, numbers)) or "(no *)" for numbers in sorted(found))


def _matches(model: nn.Module, pattern: str) -> dict[tuple[int, ...], str]:
    if "*" not in pattern:
        _module(model, pattern, "sublayers")
        return {(): pattern}
    regex = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    matches = ((regex.fullmatch(name), name) for name, _ in model.named_modules())
    found = {tuple(int(n) for n in match.groups()): name for match, name in matches if match}
    if not found:
        raise CaptureError(f"sublayers pattern {pattern!r} matches no module of {type(model).__name__}; {_has(model)}")
    return found


def _module(model: nn.Module, path: str, argument: str) -> nn.Module:
    modules = dict(model.named_modules())
    if path not in modules or not path:
        raise CaptureError(f"{argument} names {path!r}, which {type(model).__name__} does not have; {_has(model)}")
    return modules[path]


def _has(model: nn.Module) -> str:
    names = [re.sub(r"\b\d+\b", "*", name) for name, _ in model.named_modules() if name]
    return "it has " + ", ".join(list(dict.fromkeys(names))[:20]) + "."


def _kind(path: str) -> str:
    return path.rpartition(".")[2]

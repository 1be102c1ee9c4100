"""Names of sites and writes that tell what a sublayer does, from the names and parts of its modules."""

import re
from collections.abc import Iterable, Sequence

from torch import nn

from resinspect.families.generic.probe import Call
from resinspect.families.generic.residual import Step

KINDS = (
    ("attn", re.compile(r"att(entio)?n", re.IGNORECASE)),
    ("mlp", re.compile(r"mlp|ffn?\b|feed_?forward|moe|fc_?\d|dense|intermediate|output|lin\d", re.IGNORECASE)),
)


def write_names(step: Step, calls: Sequence[Call], layer: Call) -> tuple[list[str], str]:
    """One name for each write of a step, its kind or that of its module where two are of one kind; and all kinds."""
    modules = [_sublayer(write.call, calls, layer) for write in step.writes]
    kinds = [_kind(module, layer) for module in modules]
    names = [_first(m, layer) if kinds.count(k) > 1 else k for m, k in zip(modules, kinds, strict=True)]
    return names, joined(kinds)


def reader_name(reader: Call, calls: Sequence[Call], layer: Call) -> str:
    """What works on what a reader gives: ``"attn"``, ``"mlp"``, or ``"attn+mlp"`` where both do."""
    if _works(reader.module):
        return _kind(reader, layer)
    after = [c for c in calls if c.start > reader.stop and layer in c.inside and _works(c.module)]
    fed = [c for c in after if c.read is not None and c.read.equal(reader.written)]
    outer = [c for c in fed if not set(c.inside) & set(fed)]
    return joined(_kind(c, layer) for c in outer or after[:1]) or _first(reader, layer)


def joined(names: Iterable[str]) -> str:
    """Different names, in order, as one."""
    return "+".join(dict.fromkeys(names))


def unique(name: str, taken: set[str]) -> str:
    """A name with a number behind it if it is taken; it is taken from then on."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}{number}", number + 1
    taken.add(found)
    return found


def _sublayer(write: Call, calls: Sequence[Call], layer: Call) -> Call:
    """The module that did the work: the write's own, or the last before a norm of what is written."""
    if _works(write.module):
        return write
    before = [c for c in calls if c.stop < write.start and c.inside[-1:] == write.inside[-1:] and _works(c.module)]
    return before[-1] if before and layer in write.inside else write


def _kind(call: Call, layer: Call) -> str:
    path = call.path.removeprefix(f"{layer.path}.")
    return next((kind for kind, words in KINDS if words.search(path)), _first(call, layer))


def _first(call: Call, layer: Call) -> str:
    return call.path.removeprefix(f"{layer.path}.").partition(".")[0]


def _works(module: nn.Module) -> bool:
    """Whether it holds a matrix, which norms do not."""
    return any(p.ndim > 1 for p in module.parameters())

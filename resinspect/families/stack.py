"""A stack of decoder layers inside someone else's model: finding it by its parts, and tapping its modules."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.layout import Event, Seen, Tap


class Sublayer(NamedTuple):
    """One sublayer of a layer: the module whose input is what it reads, and the module whose output it writes."""

    kind: str
    read: str
    write: str


def parts_of(sublayers: Sequence[Sublayer]) -> tuple[str, ...]:
    """Names of all modules of sublayers."""
    return tuple(name for part in sublayers for name in part[1:])


PRE_NORM = (
    Sublayer("attn", "input_layernorm", "self_attn"),
    Sublayer("mlp", "post_attention_layernorm", "mlp"),
)
SANDWICH = (
    Sublayer("attn", "input_layernorm", "post_attention_layernorm"),
    Sublayer("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


@dataclass(frozen=True)
class Stack:
    """A list of layers and the module that holds it.

    Attributes:
        model: The whole model.
        trunk: Path of the module that holds the list, ``""`` for the model itself.
        path: Path of the list.
        layers: Its layers.
    """

    model: nn.Module
    trunk: str
    path: str
    layers: tuple[nn.Module, ...]

    def under(self, name: str) -> str:
        """The path of something beside the list."""
        return f"{self.trunk}.{name}".lstrip(".")

    def inside(self, layer: int, name: str) -> str:
        """The path of something of one layer."""
        return f"{self.path}.{layer}.{name}".rstrip(".")

    def tap(
        self,
        path: str,
        side: Literal["input", "output"],
        event: Event,
        pick: Callable[[Seen], Tensor] | None = None,
        *,
        call: int = 0,
    ) -> Tap:
        """A tap on the module at a path."""
        return Tap(path, self.model.get_submodule(path), side, event, pick, call)


def find_stacks(model: nn.Module, layer_has: Sequence[str], trunk_has: Sequence[str] = ("norm",)) -> list[Stack]:
    """All lists of layers that all have parts of these names, beside which there are those of ``trunk_has``."""
    found = []
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            continue
        trunk = path.rpartition(".")[0]
        if _has(model.get_submodule(trunk), trunk_has) and all(_has(layer, layer_has) for layer in layers):
            found.append(Stack(model, trunk, path, tuple(layers)))
    return found


def find_stack(model: nn.Module, layer_has: Sequence[str], trunk_has: Sequence[str] = ("norm",)) -> Stack | None:
    """The only such list; None if there are several, of which some would be overlooked."""
    found = find_stacks(model, layer_has, trunk_has)
    return found[0] if len(found) == 1 else None


def _has(module: nn.Module, names: Sequence[str]) -> bool:
    return all(getattr(module, name, None) is not None for name in names)


def sequence_of(stack: Stack, sublayers: Sequence[Sublayer]) -> Anatomy:
    """The anatomy of layers whose sublayers run one after the other, each with one write."""
    layers = range(len(stack.layers))
    sites = [Site(0, layer, part.kind, writes=(part.kind,)) for layer in layers for part in sublayers]
    return anatomy_of([*sites, Site(0, -1, FINAL)])


def sequence_taps(
    stack: Stack,
    anatomy: Anatomy,
    sublayers: Sequence[Sublayer],
    *,
    embedding: str | None = None,
    final: str = "norm",
    final_call: int = 0,
) -> Iterator[Tap]:
    """The taps of ``sequence_of``.

    Args:
        stack: The layers.
        anatomy: Their anatomy.
        sublayers: Their parts.
        embedding: Name of the module beside the layers whose output is source 0; by default source 0 is what the
            first layer reads.
        final: Name of the module beside the layers whose input is the final readout.
        final_call: Which call of it that is.
    """
    parts = {part.kind: part for part in sublayers}
    if embedding:
        yield stack.tap(stack.under(embedding), "output", Event("source", 0))
    for site in anatomy.sites:
        (reader,) = anatomy.readers_of(site)
        last = site.kind == FINAL
        read = stack.under(final) if last else stack.inside(site.layer, parts[site.kind].read)
        if site.index == 0 and not embedding:
            yield stack.tap(read, "input", Event("source", 0))
        yield stack.tap(read, "input", Event("reader", reader), call=final_call if last else 0)
        if not last:
            write = stack.inside(site.layer, parts[site.kind].write)
            yield stack.tap(write, "output", Event("source", *anatomy.sources_of(site)))

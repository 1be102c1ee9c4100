"""LongCat-Flash: two attentions and two MLPs a layer, and experts whose write comes two sublayers late."""

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.layout import Event, Layout, Tap
from resinspect.families.stack import Stack, find_stack
from resinspect.program import Carrier, Connection, Native

PAIRS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlps")
KINDS = ("attn_0", "mlp_0", "attn_1", "mlp_1")
READS = dict(zip(KINDS, (f"{name}.{i}" for i in (0, 1) for name in (PAIRS[0], PAIRS[2])), strict=True))
WRITES: dict[str, tuple[tuple[str, str], ...]] = {
    "attn_0": (("attn_0", "self_attn.0"),),
    # The experts run first, on the normed input of the first MLP.
    "mlp_0": (("moe", "mlp"), ("mlp_0", "mlps.0")),
    "attn_1": (("attn_1", "self_attn.1"),),
    "mlp_1": (("mlp_1", "mlps.1"),),
}
State = tuple[Tensor, Tensor | None]


class Shortcut(Connection):
    """Plain additions, but for the experts: they read with the first MLP, and their write enters after the second."""

    kinds: ClassVar[tuple[str, ...]] = KINDS

    def start(self, carrier: Carrier, embedding: Tensor) -> State:
        """The carry, and what is still on its way."""
        return embedding, None

    def read(self, carrier: Carrier, state: State, site: Site, native: Native) -> tuple[tuple[Tensor, ...], State]:
        """The carry."""
        return (state[0],), state

    def write(self, carrier: Carrier, state: State, site: Site, native: Native, *values: Tensor) -> State:
        """Add the last write; keep the experts' until the layer ends."""
        carry, pending = state
        if site.kind == "mlp_0":
            pending, value = values
            return carry + value, pending
        (value,) = values
        return (carry + value + pending, None) if site.kind == "mlp_1" else (carry + value, pending)


def recognise(model: nn.Module) -> Layout | None:
    """The layout of layers with pairs of norms, attentions and MLPs beside one module of experts."""
    stack = find_stack(model, (*PAIRS, "mlp"))
    if stack is None or not all(_is_pair(getattr(layer, name)) for layer in stack.layers for name in PAIRS):
        return None
    anatomy = _anatomy(len(stack.layers))
    return Layout(
        family="longcat_flash",
        scheme="shortcut_experts",
        anatomy=anatomy,
        taps=tuple(_taps(stack, anatomy)),
        connection=Shortcut(),
        write_definition="output of the attention and MLP modules; moe is that of the experts, the normed input that "
        "experts of zero computation return included",
        source_definition="source 0 is what enters the first layer",
    )


def _is_pair(value: object) -> bool:
    return isinstance(value, nn.ModuleList) and len(value) == 2


def _anatomy(layers: int) -> Anatomy:
    sites = [
        Site(0, layer, kind, writes=tuple(name for name, _ in writes))
        for layer in range(layers)
        for kind, writes in WRITES.items()
    ]
    return anatomy_of([*sites, Site(0, -1, FINAL)])


def _taps(stack: Stack, anatomy: Anatomy) -> Iterator[Tap]:
    for site in anatomy.sites:
        (reader,) = anatomy.readers_of(site)
        last = site.kind == FINAL
        read = stack.under("norm") if last else stack.inside(site.layer, READS[site.kind])
        if site.index == 0:
            yield stack.tap(read, "input", Event("source", 0))
        yield stack.tap(read, "input", Event("reader", reader))
        writes = () if last else WRITES[site.kind]
        for (_, path), source in zip(writes, anatomy.sources_of(site), strict=True):
            yield stack.tap(stack.inside(site.layer, path), "output", Event("source", source))

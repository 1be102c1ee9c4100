"""Looped Inkling 2: its middle layers run several times, and each pass gets messages from the one before.

Later passes restart from the state before the loop. A message is a read over the blocks that the previous pass wrote;
gates per channel mix it into the inputs, so that W of later passes is given per channel.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from resinspect.anatomy import Anatomy, Site, anatomy_of
from resinspect.families.inkling2 import (
    QKV,
    SOURCE_DEFINITION,
    WRITE_DEFINITION,
    Blocks,
    NormedBlocks,
    Pick,
    Trunk,
    average,
    depth_softmax,
    final_site,
    find_trunk,
    layer_sites,
    routing_names,
    scale_of,
    taps_of,
    weight_taps,
    write_taps,
)
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.program import COEFFICIENT, TERM, Carrier, Native

MESSAGES = (*QKV, "mlp")


class Passes(NamedTuple):
    """The state: blocks now, on entering the loop, and what the previous pass added."""

    now: Blocks
    entry: Blocks | None = None
    previous: Blocks | None = None


class LoopedBlocks(NormedBlocks):
    """Normed block sums, and in later passes of a loop messages from the pass before.

    Args:
        boundary: Per layer, whether it opens a block.
        start_layer: First layer of the loop.
        passes: How often the loop runs.
    """

    def __init__(self, boundary: Iterable[bool], start_layer: int, passes: int) -> None:
        super().__init__(boundary)
        self.start_layer = start_layer
        self.carrier = TERM if passes > 1 else COEFFICIENT
        own = {"message_alpha": ("message", "message_slot"), "message_scale": ("message_slot",)}
        gates = {name: ("hidden",) for message in MESSAGES for name in gate_names(message)}
        self.native_dims = NormedBlocks.native_dims | (own | gates if passes > 1 else {})

    def start(self, carrier: Carrier, embedding: Tensor) -> Passes:
        """No pass yet."""
        return Passes(super().start(carrier, embedding))

    def read(self, carrier: Carrier, state: Passes, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Passes]:
        """As without a loop; in later passes each input is gated with its message."""
        if site.kind == "attn" and site.layer == self.start_layer:
            state = self._enter(state, site.call)
        inputs, _ = super().read(carrier, state.now, site, native)
        if not site.call:
            return inputs, state
        messages = average(carrier, state.previous, native["message_alpha"], native["message_scale"])
        inputs = inputs * (len(messages) // len(inputs))
        gates = ([native[name] for name in gate_names(message)] for message in messages_of(site))
        return tuple(
            carrier.channels(keep, own) + carrier.channels(take, message)
            for own, message, (keep, take) in zip(inputs, messages, gates, strict=True)
        ), state

    def write(self, carrier: Carrier, state: Passes, site: Site, native: Native, *values: Tensor) -> Passes:
        """Into the blocks of this pass."""
        return state._replace(now=super().write(carrier, state.now, site, native, *values))

    @staticmethod
    def _enter(state: Passes, call: int) -> Passes:
        """The first pass starts where it is; later ones start there again and see what the last one added.

        The first block that a pass finishes is the sum from before the loop, which is no part of the message.
        """
        if call == 0:
            return state._replace(entry=state.now)
        blocks, partial = state.now
        return Passes(state.entry, state.entry, (blocks[len(state.entry[0]) + 1 :], partial))


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a decoder with block attention residuals, a loop and messages."""
    trunk = find_trunk(model)
    if trunk is None or not hasattr(trunk.module, "message_input"):
        return None
    layers = trunk.module.layers
    looped = [i for i, layer in enumerate(layers) if hasattr(layer, "mlp_message_gate")]
    passes = getattr(getattr(trunk.module, "config", None), "loop_num_passes", None)
    if not looped or looped != list(range(looped[0], looped[-1] + 1)) or passes is None:
        return None
    anatomy = anatomy_of(_sites(layers, looped, passes))
    return Layout(
        family="inkling2_loop",
        scheme="looped_block_attention_residuals",
        anatomy=anatomy,
        taps=tuple(_taps(trunk, anatomy, looped)),
        connection=LoopedBlocks((layer.is_block_boundary for layer in layers), looped[0], passes),
        write_definition=f"{WRITE_DEFINITION}, one for each pass through a looped layer",
        source_definition=SOURCE_DEFINITION,
        routing=routing_names(trunk) + _gates(trunk),
    )


def gate_names(message: str) -> tuple[str, str]:
    """Natives of one gate: what it keeps of its input, and what it takes of the message."""
    return f"keep_{message}", f"take_{message}"


def messages_of(site: Site) -> tuple[str, ...]:
    """Which messages go into a site's inputs."""
    return QKV if site.kind == "attn" else ("mlp",)


def _sites(layers: nn.ModuleList, looped: list[int], passes: int) -> Iterator[Site]:
    def visit(numbers: Iterable[int], call: int = 0) -> Iterator[Site]:
        for number in numbers:
            for site in layer_sites(number, layers[number]):
                views = QKV if call and site.kind == "attn" else site.views
                yield Site(0, site.layer, site.kind, views, site.writes, call)

    yield from visit(range(looped[-1] + 1))
    for call in range(1, passes):
        yield from visit(looped, call)
    yield from visit(range(looped[-1] + 1, len(layers)))
    yield final_site()


def _taps(trunk: Trunk, anatomy: Anatomy, looped: list[int]) -> Iterator[Tap]:
    later = [site for site in anatomy.sites if site.call]
    yield from taps_of(trunk, anatomy, [site for site in anatomy.sites if not site.call])
    for site in later:
        call = (site.call - 1) * len(looped) + site.layer - looped[0]
        yield from _message_taps(trunk, site, call, site.layer - looped[0])
        yield from weight_taps(trunk, site)
        yield from _gate_taps(trunk, anatomy, site)
        yield from write_taps(trunk, anatomy, site)


def _message_taps(trunk: Trunk, site: Site, call: int, number: int) -> Iterator[Tap]:
    module = trunk.module.message_input
    mine = slice(0, 3) if site.kind == "attn" else slice(3, 4)

    def alpha(seen: Seen) -> Tensor:
        return depth_softmax(module, module.query[number], *seen.args[:2])[..., mine, :]

    for name, pick in (("message_alpha", alpha), ("message_scale", scale_of(module))):
        yield Tap(f"{trunk.prefix}message_input", module, "input", Event("native", site.index, name), pick, call)


def _gate_taps(trunk: Trunk, anatomy: Anatomy, site: Site) -> Iterator[Tap]:
    for message, reader in zip(messages_of(site), anatomy.readers_of(site), strict=True):
        name = f"layers.{site.layer}.{message}_message_gate"
        module = trunk.module.get_submodule(name)
        keep, take = gate_names(message)
        for native, pick in ((keep, _kept(module)), (take, _taken(module))):
            event = Event("native", site.index, native)
            yield Tap(trunk.prefix + name, module, "input", event, pick, site.call - 1)
        yield Tap(trunk.prefix + name, module, "output", Event("reader", reader), call=site.call - 1)


def _kept(gate: nn.Module) -> Pick:
    return lambda seen: 1 - torch.tanh(gate.forget_gate_proj(_gate_state(gate, *seen.args)))


def _taken(gate: nn.Module) -> Pick:
    return lambda seen: torch.tanh(gate.message_gate_proj(_gate_state(gate, *seen.args)))


def _gate_state(gate: nn.Module, hidden: Tensor, message: Tensor) -> Tensor:
    """What both gates see: input and message, each normed, brought down to a few channels."""
    normed = torch.cat([gate.norm(hidden.float()), gate.norm(message.float())], dim=-1)
    return gate.down_proj(normed.to(gate.down_proj.weight.dtype)).float()


def _gates(trunk: Trunk) -> tuple[str, ...]:
    return tuple(trunk.prefix + name for name, _ in trunk.module.named_parameters() if "_message_gate." in name)

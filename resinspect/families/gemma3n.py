"""Gemma 3n: alternating updates (AltUp) over K streams, LAuReL, and per-layer embeddings.

A layer predicts all streams from all streams, runs its sublayers on one of them (the active stream), and corrects
every stream by what the sublayers changed in the active one. The per-layer embedding then writes to all streams but the
first. The readout averages the streams after a projection of each but the first, rescaled to the size of the first.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.families.stack import SANDWICH, Stack, find_stack, parts_of
from resinspect.families.weighted import weigh
from resinspect.program import TERM, Carrier, Connection, Native

State = tuple[Tensor, Tensor | None]
LAYER = ("altup", "laurel", "per_layer_input_gate", "post_per_layer_input_norm", *parts_of(SANDWICH))
TRUNK = ("norm", "altup_projections", "altup_unembed_projections")
READS = {"attn": "input_layernorm", "mlp": "pre_feedforward_layernorm", "ple": "per_layer_input_gate"}
WRITES = {
    "attn": ("laurel", "post_attention_layernorm"),
    "mlp": ("post_feedforward_layernorm",),
    "ple": ("post_per_layer_input_norm",),
}
ROUTING = ("router_norm", "modality_router", "prediction_coefs", "correction_coefs")


class AltUp(Connection):
    """K streams, of which the sublayers see one.

    The state is the streams ``(..., K, *slot)`` and, inside a layer, the active stream as the sublayers move it on:

        attn   P = H + predict H         reads P_a      y = (P_a + attn + laurel) / sqrt 2
        mlp                              reads y        H_j = P_j + correct_j (y + mlp - P_a)
        ple                              reads scale H_a    H_j += ple for all j > 0
        final                            reads mean_j unembed_j U_j H_j, with U_0 = 1 and unembed_0 = 1

    Args:
        active: Index a of the active stream.
        scales: Per layer, what the per-layer embedding's input is multiplied with, per channel; or None.
        unembed: The projections ``U_j (d, d)`` of all streams but the first.
    """

    carrier = TERM
    natives: ClassVar[dict[str, tuple[str, ...]]] = {"attn": ("predict",), "mlp": ("correct",), "final": ("unembed",)}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {
        "predict": ("stream", "stream2"),
        "correct": ("stream",),
        "unembed": ("stream",),
    }

    def __init__(self, active: int, scales: Sequence[Tensor | None], unembed: Sequence[Tensor]) -> None:
        super().__init__()
        self.active, self.scales, self.unembed = active, tuple(scales), tuple(unembed)

    def start(self, carrier: Carrier, embedding: Tensor) -> State:
        """The embedding of stream 0; the others are written by the first site."""
        return embedding, None

    def read(self, carrier: Carrier, state: State, site: Site, native: Native) -> tuple[tuple[Tensor, ...], State]:
        """One input per site, none where the further streams are written."""
        streams, moved = state
        if site.kind == "attn":
            streams = streams + carrier.mix(native["predict"], streams)
            return (self._stream(carrier, streams, self.active),), (streams, None)
        if site.kind == "mlp":
            return (moved,), state
        if site.kind == "ple":
            return (weigh(carrier, self.scales[site.layer], self._stream(carrier, streams, self.active)),), state
        return ((self._readout(carrier, streams, native["unembed"]),) if site.kind == FINAL else ()), state

    def write(self, carrier: Carrier, state: State, site: Site, native: Native, *values: Tensor) -> State:
        """Move the active stream on, correct all streams, or add to all but the first."""
        streams, moved = state
        along = -carrier.features - 1
        if site.kind == "attn":
            total = sum(values, self._stream(carrier, streams, self.active))
            return streams, carrier.scale(total.new_tensor(0.5).sqrt(), total)
        if site.kind == "mlp":
            new, old = sum(values, moved), self._stream(carrier, streams, self.active)
            change = carrier.combine(new.new_tensor([1.0, -1.0]), (new, old))
            return streams + carrier.outer(native["correct"], change), None
        if site.kind == "ple":
            first = torch.arange(streams.shape[along], device=streams.device) > 0
            return streams + carrier.outer(first.to(streams.dtype), *values), None
        return torch.stack((streams, *values), dim=along), None

    def _stream(self, carrier: Carrier, streams: Tensor, index: int) -> Tensor:
        return streams.select(-carrier.features - 1, index)

    def _readout(self, carrier: Carrier, streams: Tensor, scale: Tensor) -> Tensor:
        slots = [self._stream(carrier, streams, j) for j in range(len(self.unembed) + 1)]
        projected = [carrier.project(u.to(s.device, s.dtype), s) for u, s in zip(self.unembed, slots[1:], strict=True)]
        return carrier.combine(scale / len(slots), (slots[0], *projected))


def recognise(model: nn.Module) -> Layout | None:
    """The layout of layers with AltUp, LAuReL and a per-layer embedding."""
    stack = find_stack(model, LAYER, TRUNK)
    if stack is None or not all(hasattr(layer.altup, name) for layer in stack.layers for name in ROUTING):
        return None
    trunk = model.get_submodule(stack.trunk)
    config, unembed = stack.layers[0].altup.config, trunk.altup_unembed_projections
    scaled = config.altup_correct_scale
    anatomy = _anatomy(len(stack.layers), streams=len(unembed) + 1)
    return Layout(
        family="gemma3n",
        scheme="altup",
        anatomy=anatomy,
        taps=tuple(_taps(stack, anatomy)),
        connection=AltUp(
            active=config.altup_active_idx,
            scales=[layer.altup.correct_output_scale.detach() if scaled else None for layer in stack.layers],
            unembed=[projection.weight.detach() for projection in unembed],
        ),
        write_definition="output of the norm after attention, after the MLP and after the PLE; all that LAuReL "
        "returns, its identity half included",
        source_definition="source 0 is the scaled token embedding (stream 0); stream<j>.embed is that of stream j",
        routing=(
            *(stack.inside(i, f"altup.{name}.weight") for i in range(len(stack.layers)) for name in ROUTING),
            *(stack.under(f"altup_unembed_projections.{j}.weight") for j in range(len(unembed))),
        ),
    )


def _anatomy(layers: int, streams: int) -> Anatomy:
    start = Site(0, -1, "altup", views=(), writes=tuple(f"stream{j}.embed" for j in range(1, streams)))
    # LAuReL runs before attention, on the same input.
    writes = {"attn": ("laurel", "attn"), "mlp": ("mlp",), "ple": ("ple",)}
    sites = [Site(0, layer, kind, writes=names) for layer in range(layers) for kind, names in writes.items()]
    return anatomy_of([start, *sites, Site(0, -1, FINAL)])


def _taps(stack: Stack, anatomy: Anatomy) -> Iterator[Tap]:
    first, last = stack.inside(0, ""), stack.inside(len(stack.layers) - 1, "")
    streams = len(anatomy.sources_of(anatomy.sites[0])) + 1
    for j in range(streams):
        yield stack.tap(first, "input", Event("source", j), partial(_stream_of_input, j))
    for site in anatomy.sites[1:-1]:
        (reader,) = anatomy.readers_of(site)
        yield stack.tap(stack.inside(site.layer, READS[site.kind]), "input", Event("reader", reader))
        for name, source in zip(WRITES[site.kind], anatomy.sources_of(site), strict=True):
            yield stack.tap(stack.inside(site.layer, name), "output", Event("source", source))
        yield from _coefficients(stack, site, streams)
    final = anatomy.sites[-1]
    scale = _unembed_scale(stack.model.get_submodule(stack.under("altup_unembed_projections")))
    yield stack.tap(last, "output", Event("native", final.index, "unembed"), scale)
    yield stack.tap(stack.under("norm"), "input", Event("reader", *anatomy.readers_of(final)))


def _coefficients(stack: Stack, site: Site, streams: int) -> Iterator[Tap]:
    """The two linear modules whose outputs are the weights; ``predict`` and ``correct`` themselves are methods."""
    if site.kind == "attn":
        path = stack.inside(site.layer, "altup.prediction_coefs")
        event = Event("native", site.index, "predict")
        yield stack.tap(path, "output", event, lambda seen: seen.output.unflatten(-1, (streams, streams)))
    if site.kind == "mlp":
        path = stack.inside(site.layer, "altup.correction_coefs")
        yield stack.tap(path, "output", Event("native", site.index, "correct"), lambda seen: seen.output + 1.0)


def _stream_of_input(index: int, seen: Seen) -> Tensor:
    return (seen.args[0] if seen.args else seen.kwargs["hidden_states"])[index]


def _unembed_scale(projections: nn.ModuleList) -> Callable[[Seen], Tensor]:
    """``(batch, token, K)``: the root mean square of stream 0 over that of each projected stream; 1 for stream 0."""

    def scale(seen: Seen) -> Tensor:
        streams = seen.output
        size = (streams[0] ** 2).mean(-1) ** 0.5
        sizes = [
            (nn.functional.linear(stream, projection.weight) ** 2).mean(-1).clamp_min(1e-5).sqrt()
            for projection, stream in zip(projections, streams[1:], strict=True)
        ]
        ratios = [size.double() / other.double() for other in sizes]
        return torch.stack([torch.ones_like(ratios[0]), *ratios], dim=-1)

    return scale

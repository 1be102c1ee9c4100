"""Qwen4-Exp: parallel streams read per channel, each normed on its own.

``X_n' = X_n + post_n v`` and ``h = mean_n gate_n * norm(X_n)`` with one gate per channel. ``h`` is normed already: the
sublayers and the head have no norm of their own. Some layers first add n-gram embeddings, another vector to each
stream: n sources each.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.program import TERM, Carrier, Connection, Native

Pick = Callable[[Seen], Tensor]

HC_OF = {"attn": "attn_hyper_connection", "mlp": "mlp_hyper_connection"}
MIXER = "hyper_connection_mixer"
READ_PARTS = ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")
INJECT = "block_inject_weight"
NGRAMS = "ple"


class GatedStreams(Connection):
    """Streams that never mix, read through a norm and a gate per channel.

    Args:
        gains: Per site, the gain of each stream's norm ``(n, d)``; empty for sites that only write.
    """

    carrier = TERM
    natives: ClassVar[dict[str, tuple[str, ...]]] = {
        "attn": ("gate", "rstd", "post"),
        "mlp": ("gate", "rstd", "post"),
        "final": ("gate", "rstd"),
    }
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {
        "gate": ("stream", "hidden"),
        "rstd": ("stream",),
        "post": ("stream",),
    }

    def __init__(self, gains: list[Tensor]) -> None:
        super().__init__()
        self.gains = gains

    def start(self, carrier: Carrier, embedding: Tensor) -> Tensor:
        """Every stream starts as the embedding: ``(..., n, *slot)``."""
        return carrier.expand(embedding, len(self.gains[-1]))

    def read(self, carrier: Carrier, state: Tensor, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Tensor]:
        """The mean over gated, normed streams; n-grams read nothing."""
        if not site.views:
            return (), state
        streams = []
        for n, stream in enumerate(state.unbind(-carrier.features - 1)):
            gain = self.gains[site.index][n].to(stream.dtype)
            normed = carrier.normalise(stream, native["rstd"][..., n], gain)
            streams.append(carrier.channels(native["gate"][..., n, :], normed))
        return (carrier.combine(state.new_full((len(streams),), 1 / len(streams)), streams),), state

    def write(self, carrier: Carrier, state: Tensor, site: Site, native: Native, *values: Tensor) -> Tensor:
        """One write goes to all streams, weighed; of n-grams each stream gets its own."""
        if site.kind == NGRAMS:
            return state + torch.stack(values, dim=-carrier.features - 1)
        return state + carrier.outer(native["post"], *values)


def recognise(model: nn.Module) -> Layout | None:
    """The layout of layers with two gated reads each, and one more after the last."""
    for path, trunk in model.named_modules():
        layers, mixer = getattr(trunk, "layers", None), getattr(trunk, MIXER, None)
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0 or not isinstance(mixer, nn.Module):
            continue
        shape = _shape(mixer, READ_PARTS)
        if shape and all(_is_layer(layer, shape) for layer in layers):
            return _layout(path, trunk, *shape)
    return None


def _is_layer(layer: nn.Module, shape: tuple[int, int]) -> bool:
    parts = {name for name, _ in layer.named_children()} - {NGRAMS}
    known = parts - {_attention(layer)} == {"mlp", *HC_OF.values()}
    return known and all(_shape(getattr(layer, hc), (*READ_PARTS, INJECT)) == shape for hc in HC_OF.values())


def _attention(layer: nn.Module) -> str:
    return "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"


def _shape(hc: nn.Module, parts: tuple[str, ...]) -> tuple[int, int] | None:
    """Number and width of streams of a module with exactly these parts."""
    norm = getattr(hc, "hc_norm", None)
    weight, width = getattr(norm, "weight", None), getattr(norm, "group_size", None)
    known = isinstance(weight, Tensor) and isinstance(width, int) and width > 0 and hasattr(norm, "eps")
    if not known or {name for name, _ in hc.named_children()} != set(parts):
        return None
    return weight.numel() // width, width


def _layout(path: str, trunk: nn.Module, streams: int, width: int) -> Layout:
    anatomy = anatomy_of(_sites(trunk.layers, streams))
    hcs = [_hc(site) for site in anatomy.sites]

    def name(inner: str) -> str:
        return f"{path}.{inner}".lstrip(".")

    return Layout(
        family="qwen4_exp",
        scheme="gated_streams",
        anatomy=anatomy,
        taps=tuple(_taps(trunk, anatomy, name, (streams, width))),
        connection=GatedStreams([_gain(trunk, hc, (streams, width)) for hc in hcs]),
        write_definition="output of the attention and MLP modules; what the n-gram module adds to each stream",
        source_definition="source 0 is what enters the first layer, the same in every stream",
        rounds_to=torch.float32,
        routing=tuple(name(f"{hc}.{p}") for hc in hcs if hc for p, _ in trunk.get_submodule(hc).named_parameters()),
    )


def _sites(layers: nn.ModuleList, streams: int) -> Iterator[Site]:
    for i, layer in enumerate(layers):
        if isinstance(getattr(layer, NGRAMS, None), nn.Module):
            yield Site(0, i, NGRAMS, (), tuple(f"stream{n}.{NGRAMS}" for n in range(streams)))
        yield from (Site(0, i, kind, writes=(kind,)) for kind in HC_OF)
    yield Site(0, -1, FINAL)


def _hc(site: Site) -> str:
    """Name of the module that reads at a site, empty if none does."""
    if site.kind == FINAL:
        return MIXER
    return f"layers.{site.layer}.{HC_OF[site.kind]}" if site.views else ""


def _gain(trunk: nn.Module, hc: str, shape: tuple[int, int]) -> Tensor:
    if not hc:
        return torch.empty(0)
    return (1.0 + trunk.get_submodule(hc).hc_norm.weight.detach().float()).view(shape)


def _taps(trunk: nn.Module, anatomy: Anatomy, name: Callable[[str], str], shape: tuple[int, int]) -> Iterator[Tap]:
    def tap(path: str, event: Event, pick: Pick | None = None, side: Literal["input", "output"] = "output") -> Tap:
        return Tap(name(path), trunk.get_submodule(path), side, event, pick)

    def stream(n: int, value: Callable[[Seen], Tensor]) -> Pick:
        return lambda seen: value(seen).unflatten(-1, shape)[:, :, n]

    yield tap("layers.0", Event("source", 0), stream(0, lambda seen: seen.args[0]), "input")
    for site in anatomy.sites:
        if site.kind == NGRAMS:
            for n, source in enumerate(anatomy.sources_of(site)):
                yield tap(f"layers.{site.layer}.{NGRAMS}", Event("source", source), stream(n, lambda s: s.output))
            continue
        hc, native = _hc(site), ("native", site.index)
        yield tap(f"{hc}.hc_norm", Event(*native, "rstd"), _rstd(trunk.get_submodule(hc).hc_norm, shape))
        yield tap(f"{hc}.{READ_PARTS[-1]}", Event(*native, "gate"), lambda s: s.output.sigmoid().unflatten(-1, shape))
        if site.kind != FINAL:
            yield tap(hc, Event(*native, "post"), lambda seen: seen.output[-1])
        yield tap(hc, Event("reader", *anatomy.readers_of(site)))
        if site.kind != FINAL:
            write = _attention(trunk.layers[site.layer]) if site.kind == "attn" else site.kind
            yield tap(f"layers.{site.layer}.{write}", Event("source", *anatomy.sources_of(site)))


def _rstd(norm: nn.Module, shape: tuple[int, int]) -> Pick:
    """One over the root mean square of each stream, as the norm forms it."""
    return lambda seen: torch.rsqrt(seen.args[0].float().unflatten(-1, shape).pow(2).mean(-1) + norm.eps)

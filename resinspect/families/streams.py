"""Decoders whose layers keep n parallel streams with two ``*_hc`` modules each: what three families have in common.

``attn_hc`` and ``ffn_hc`` get the streams ``(batch, token, n, d)`` and return the weights of the write, and last the
read. The weights ``pre`` of the read are a local there; they are computed once more from a call of ``input_norm``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isqrt
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from resinspect.anatomy import Anatomy, Site, decoder_anatomy
from resinspect.families.layout import Event, Layout, Seen, Tap, put_argument, put_item
from resinspect.models.connections.hyper_connections import Streams
from resinspect.program import Carrier, Native

Pick = Callable[[Seen], Tensor]
Logits = Callable[[Seen, Tensor], Tensor]

HC_OF = {"attn": "attn_hc", "mlp": "ffn_hc"}
WRITE_OF = {"attn": "self_attn", "mlp": "mlp"}
NORMS = ("input_layernorm", "post_attention_layernorm")
HC_PARAMETERS = ("fn", "base", "scale")
HEAD_PARAMETERS = ("hc_fn", "hc_base", "hc_scale")


class WeighedStreams(Streams):
    """As ``Streams``, but the final readout is a weighted sum as well."""

    natives: ClassVar[dict[str, tuple[str, ...]]] = Streams.natives | {"final": ("pre",)}

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def read(self, carrier: Carrier, state: Tensor, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Tensor]:
        """``sum_n pre_n X_n``, at the final readout too."""
        return (carrier.mix(native["pre"].unsqueeze(-2), state).squeeze(-carrier.features - 1),), state


class UnmixedStreams(WeighedStreams):
    """Streams that never mix: ``X' = X + post v``, so ``W[r, s] = <pre_r, post_s>``."""

    natives: ClassVar[dict[str, tuple[str, ...]]] = {"attn": ("pre", "post"), "mlp": ("pre", "post"), "final": ("pre",)}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"pre": ("stream",), "post": ("stream",)}

    def write(self, carrier: Carrier, state: Tensor, site: Site, native: Native, value: Tensor) -> Tensor:
        """Add the write to each stream."""
        return state + carrier.outer(native["post"], value)


@dataclass(frozen=True)
class Trunk:
    """The part of a model that holds the streams.

    Attributes:
        path: Its name, empty for the model itself.
        module: Has ``layers`` and ``hc_head``.
        streams: Number of streams n.
        mixes: Whether the ``*_hc`` modules give a mixing matrix as well.
        weighed: Whether the head weighs the streams by parameters of its own.
    """

    path: str
    module: nn.Module
    streams: int
    mixes: bool
    weighed: bool

    def name(self, path: str) -> str:
        """The full name of something in the trunk."""
        return f"{self.path}.{path}".lstrip(".")

    def routing(self) -> tuple[str, ...]:
        """Names of the parameters that decide the routing."""
        layers = range(len(self.module.layers))
        names = [f"layers.{i}.{hc}.{p}" for i in layers for hc in HC_OF.values() for p in HC_PARAMETERS]
        names += [f"hc_head.{p}" for p in HEAD_PARAMETERS if self.weighed]
        return tuple(map(self.name, names))


def find_trunk(model: nn.Module) -> Trunk | None:
    """The first module with layers of two ``*_hc`` modules each and a head for as many streams.

    That a head without parameters takes the plain mean is not guessed: the capture's fidelity decides.
    """
    for path, module in model.named_modules():
        layers, head = getattr(module, "layers", None), getattr(module, "hc_head", None)
        if not isinstance(layers, nn.ModuleList) or not isinstance(head, nn.Module):
            continue
        found = {shape for layer in layers for shape in _layer_shapes(layer)}
        shape = found.pop() if len(found) == 1 else None
        if shape is None or shape.groups == 1:
            continue
        weighed = any(True for _ in head.parameters())
        if not weighed or _shape(head, HEAD_PARAMETERS, "eps") == shape._replace(groups=1):
            return Trunk(path, module, shape.streams, shape.groups == 3, weighed)
    return None


class _Shape(NamedTuple):
    """What a module computes from all streams: ``pre``, or ``pre`` and ``post``, or these and a mixing matrix."""

    groups: int
    streams: int
    inputs: int


def _layer_shapes(layer: nn.Module) -> Iterator[_Shape | None]:
    parts = {name for name, _ in layer.named_children()}
    known = parts == {*HC_OF.values(), *WRITE_OF.values(), *NORMS}
    for hc in HC_OF.values():
        yield _shape(getattr(layer, hc), HC_PARAMETERS, "hc_eps") if known else None


def _shape(module: nn.Module, names: tuple[str, ...], eps: str) -> _Shape | None:
    """The shape of a module with exactly these parameters and a norm of all streams, None of any other."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    if set(shapes) != set(names) or not hasattr(module, eps) or not hasattr(module, "input_norm"):
        return None
    matrix, base, scale = (shapes[name] for name in names)
    if len(matrix) != 2 or base != matrix[:1] or scale not in ((1,), (2,), (3,)):
        return None
    (groups,), (rows, inputs) = scale, matrix
    streams = {1: rows, 2: rows // 2, 3: isqrt(rows + 1) - 1}[groups]
    fits = streams > 0 and rows == streams * (groups if groups < 3 else streams + 2) and inputs % streams == 0
    return _Shape(groups, streams, inputs) if fits else None


def streams_layout(family: str, scheme: str, trunk: Trunk, *, logits: Logits, written: dict[str, Pick]) -> Layout:
    """The layout of streams.

    Args:
        family: Name of the family.
        scheme: Name of the scheme.
        trunk: What holds the streams.
        logits: How all weights, before scale and base, follow from a call of ``input_norm`` and a matrix.
        written: How the natives of the write follow from a call of an ``*_hc`` module.
    """
    anatomy = decoder_anatomy(len(trunk.module.layers))
    return Layout(
        family=family,
        scheme=scheme,
        anatomy=anatomy,
        taps=tuple(_taps(trunk, anatomy, logits, written)),
        connection=WeighedStreams(trunk.streams) if trunk.mixes else UnmixedStreams(trunk.streams),
        write_definition="output of the attention and MLP modules",
        source_definition="source 0 is what enters the first layer, the same in every stream",
        routing=trunk.routing(),
    )


def _taps(trunk: Trunk, anatomy: Anatomy, logits: Logits, written: dict[str, Pick]) -> Iterator[Tap]:
    def tap(path: str, event: Event, pick: Pick | None = None, side: Literal["input", "output"] = "output") -> Tap:
        return Tap(trunk.name(path), trunk.module.get_submodule(path), side, event, pick)

    yield replace(tap("layers.0", Event("source", 0), _first_stream, "input"), put=_put_streams)
    for site in anatomy.sites:
        (reader,) = anatomy.readers_of(site)
        if site.kind == "final":
            pre = _head_pre(trunk.module.hc_head, logits) if trunk.weighed else _mean
            yield tap("hc_head.input_norm" if trunk.weighed else "hc_head", Event("native", site.index, "pre"), pre)
            yield tap("hc_head", Event("reader", reader))
            return
        hc = f"layers.{site.layer}.{HC_OF[site.kind]}"
        pre = _pre(trunk.module.get_submodule(hc), logits, trunk.streams)
        yield tap(f"{hc}.input_norm", Event("native", site.index, "pre"), pre)
        for name, pick in written.items():
            yield tap(hc, Event("native", site.index, name), pick)
        yield replace(tap(hc, Event("reader", reader), _read), put=put_item(-1))
        yield tap(f"layers.{site.layer}.{WRITE_OF[site.kind]}", Event("source", *anatomy.sources_of(site)))


def _pre(hc: nn.Module, logits: Logits, streams: int) -> Pick:
    # All rows of the matrix, as the module does it: fewer would be rounded differently.
    return lambda seen: (
        (logits(seen, hc.fn.float())[..., :streams] * hc.scale[0] + hc.base[:streams]).sigmoid() + hc.hc_eps
    )


def _head_pre(head: nn.Module, logits: Logits) -> Pick:
    return lambda seen: (
        (logits(seen, head.hc_fn.float()) * head.hc_scale.float() + head.hc_base.float()).sigmoid() + head.eps
    )


def _mean(seen: Seen) -> Tensor:
    """The weights of a plain mean over streams ``(batch, token, n, d)``."""
    streams = seen.args[0].shape[:3]
    return (seen.args[0].new_ones(()) / streams[-1]).expand(streams)


def _first_stream(seen: Seen) -> Tensor:
    return seen.args[0][:, :, 0]


def _put_streams(seen: Seen, value: Tensor) -> Seen:
    return put_argument(seen, value.unsqueeze(2).expand_as(seen.args[0]).contiguous())


def _read(seen: Seen) -> Tensor:
    return seen.output[-1]

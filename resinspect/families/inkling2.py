"""Inkling 2: block attention residuals over normed block sums, with separate inputs for q, k and v on full layers.

Within a block writes add up; every read is a softmax over the sums of finished blocks and the current one, each divided
by its own root mean square first. A write's weight is therefore ``alpha * scale`` of the block it is in.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.layout import Event, Layout, Seen, Tap, put_item
from resinspect.program import Carrier, Connection, Native

Blocks = tuple[tuple[Tensor, ...], Tensor]
Pick = Callable[[Seen], Tensor]

QKV = ("q", "k", "v")
WRITE_DEFINITION = "output of the short convolution after attention or MLP"
SOURCE_DEFINITION = "source 0 is what enters the first layer: the normed token embedding"
_READS = ("attention_input", "mlp_input")
_WRITES = ("post_attention_convolution", "post_mlp_convolution")


class NormedBlocks(Connection):
    """Depth attention whose values are block sums divided by their root mean square.

    The state is the finished blocks and the current sum. A layer that opens a block first reads, then finishes the sum
    so far and starts a new one with its attention write.

    Args:
        boundary: Per layer, whether it opens a block.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("alpha", "scale") for kind in ("attn", "mlp", "final")}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"alpha": ("view", "slot"), "scale": ("slot",)}

    def __init__(self, boundary: Iterable[bool]) -> None:
        super().__init__()
        self.boundary = tuple(boundary)

    def start(self, carrier: Carrier, embedding: Tensor) -> Any:
        """The embedding is the first sum; no block is finished."""
        return (), embedding

    def read(self, carrier: Carrier, state: Any, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Any]:
        """Normed block sums, averaged with ``alpha``; the first site of all reads the embedding itself."""
        if not native:
            return (state[1],) * len(site.views), state
        return average(carrier, state, native["alpha"], native["scale"]), state

    def write(self, carrier: Carrier, state: Any, site: Site, native: Native, *values: Tensor) -> Any:
        """Add to the current sum, or finish it."""
        blocks, partial = state
        (value,) = values
        if site.kind == "attn" and self.boundary[site.layer]:
            return (*blocks, partial), value
        return blocks, partial + value


class Trunk(NamedTuple):
    """The decoder inside a model, and its name in front of a dot."""

    prefix: str
    module: nn.Module


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a decoder with block attention residuals and no loop."""
    trunk = find_trunk(model)
    if trunk is None or hasattr(trunk.module, "message_input"):
        return None
    layers = trunk.module.layers
    anatomy = anatomy_of([*(site for i, layer in enumerate(layers) for site in layer_sites(i, layer)), final_site()])
    return Layout(
        family="inkling2",
        scheme="block_attention_residuals",
        anatomy=anatomy,
        taps=tuple(taps_of(trunk, anatomy, anatomy.sites)),
        connection=NormedBlocks(layer.is_block_boundary for layer in layers),
        write_definition=WRITE_DEFINITION,
        source_definition=SOURCE_DEFINITION,
        routing=routing_names(trunk),
    )


def find_trunk(model: nn.Module) -> Trunk | None:
    """The module whose layers and readout read through queries over blocks."""
    for path, module in model.named_modules():
        layers = getattr(module, "layers", None)
        if not isinstance(layers, nn.ModuleList) or not len(layers) or not _has_query(module, "final_input"):
            continue
        if all(_is_layer(layer) for layer in layers):
            return Trunk(f"{path}." if path else "", module)
    return None


def layer_sites(number: int, layer: nn.Module) -> list[Site]:
    """Attention, with three inputs where the layer norms them separately, and MLP."""
    views = QKV if hasattr(layer, "q_input_layernorm") else ("",)
    return [Site(0, number, "attn", views, ("attn",)), Site(0, number, "mlp", ("",), ("mlp",))]


def final_site() -> Site:
    """The readout."""
    return Site(0, -1, FINAL)


def routing_names(trunk: Trunk) -> tuple[str, ...]:
    """All queries, by name in the model."""
    return tuple(trunk.prefix + name for name, _ in trunk.module.named_parameters() if name.endswith("_input.query"))


def taps_of(trunk: Trunk, anatomy: Anatomy, sites: Iterable[Site]) -> Iterator[Tap]:
    """Where each read, its weights and each write are seen."""
    first = trunk.module.layers[0]
    yield Tap(f"{trunk.prefix}layers.0", first, "input", Event("source", 0))
    for site in sites:
        name = read_name(site)
        if site.index == 0 and first.attention_input is None:
            for reader in anatomy.readers_of(site):
                yield Tap(f"{trunk.prefix}layers.0", first, "input", Event("reader", reader), carried=True)
        else:
            yield from weight_taps(trunk, site)
            module = trunk.module.get_submodule(name)
            for i, reader in enumerate(anatomy.readers_of(site)):
                event, put = Event("reader", reader), put_item(i)
                yield Tap(trunk.prefix + name, module, "output", event, item(i), site.call, put)
        yield from write_taps(trunk, anatomy, site)


def weight_taps(trunk: Trunk, site: Site) -> Iterator[Tap]:
    """``alpha`` and ``scale`` of one read: the module throws them away, so they come from its inputs."""
    name = read_name(site)
    module = trunk.module.get_submodule(name)
    for native, pick in (("alpha", alpha_of(module)), ("scale", scale_of(module))):
        yield Tap(trunk.prefix + name, module, "output", Event("native", site.index, native), pick, site.call)


def write_taps(trunk: Trunk, anatomy: Anatomy, site: Site) -> Iterator[Tap]:
    """The write of one site."""
    for source in anatomy.sources_of(site):
        name = f"layers.{site.layer}.{_WRITES[site.kind == 'mlp']}"
        module = trunk.module.get_submodule(name)
        yield Tap(trunk.prefix + name, module, "output", Event("source", source), call=site.call)


def read_name(site: Site) -> str:
    """The module that forms a site's input, below the trunk."""
    return "final_input" if site.kind == FINAL else f"layers.{site.layer}.{_READS[site.kind == 'mlp']}"


def item(index: int) -> Pick:
    """One of the tensors that a module returns."""
    return lambda seen: seen.output[index]


def alpha_of(module: nn.Module) -> Pick:
    """``alpha (batch, token, view, slot)``: the softmax over depth."""
    return lambda seen: depth_softmax(module, module.query, *seen.args[:2])


def scale_of(module: nn.Module) -> Pick:
    """``scale (batch, token, slot)``: one over each block sum's root mean square."""
    return lambda seen: _rstd(module, _stacked(*seen.args[:2])).squeeze(-1)


def depth_softmax(module: nn.Module, query: Tensor, blocks: Tensor, partial: Tensor) -> Tensor:
    """The weights that a read gives to block sums, rounded as the model rounds them."""
    values = _stacked(blocks, partial)
    keys = values * _rstd(module, values)
    width = keys.shape[-1]
    queries = query.float().view(-1, width).expand(*keys.shape[:-2], -1, -1)
    return (queries @ keys.mT * width**-0.5).softmax(-1, dtype=torch.float32).to(keys.dtype)


def average(carrier: Carrier, state: Blocks, alpha: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """One average of normed blocks per view, ``alpha (..., view, slot)``, ``scale (..., slot)``."""
    blocks, partial = state
    slots = (*blocks, partial)
    return tuple(carrier.combine(alpha[..., view, :] * scale, slots) for view in range(alpha.shape[-2]))


def _stacked(blocks: Tensor, partial: Tensor) -> Tensor:
    return torch.cat([blocks, partial.unsqueeze(-2)], dim=-2).float()


def _rstd(module: nn.Module, values: Tensor) -> Tensor:
    return torch.rsqrt(values.square().mean(-1, keepdim=True) + module.norm.eps)


def _is_layer(layer: nn.Module) -> bool:
    boundary = isinstance(getattr(layer, "is_block_boundary", None), bool)
    return boundary and _has_query(layer, "mlp_input") and all(hasattr(layer, name) for name in _WRITES)


def _has_query(module: nn.Module, child: str) -> bool:
    return isinstance(getattr(getattr(module, child, None), "query", None), Tensor)

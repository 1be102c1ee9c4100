"""ZAYA: a scale and a bias per channel on the carry and on the write of every sublayer, and on the embedding."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.layout import Event, Layout, Seen, Tap, put_argument
from resinspect.families.stack import PRE_NORM, Stack, find_stack, parts_of
from resinspect.families.weighted import Weighted

SCALES = {"attn": "post_attention_residual_scale", "mlp": "post_mlp_residual_scale"}
WEIGHTS = ("residual_scale", "residual_bias", "hidden_states_scale", "hidden_states_bias")
INPUT = ("input_hidden_states_scale", "input_hidden_states_bias")


def recognise(model: nn.Module) -> Layout | None:
    """The layout of layers that add ``(h + b_r) s_r + (w + b_w) s_w``; the biases are constant sources."""
    stack = find_stack(model, (*parts_of(PRE_NORM), *SCALES.values()), ("norm", "embed_tokens", *INPUT))
    scales = [getattr(layer, name) for layer in stack.layers for name in SCALES.values()] if stack else []
    if stack is None or not all(hasattr(scale, name) for scale in scales for name in WEIGHTS):
        return None
    anatomy = _anatomy(len(stack.layers))
    sites = [site for site in anatomy.sites if site.kind in SCALES]
    modules = {site.index: getattr(stack.layers[site.layer], SCALES[site.kind]) for site in sites}
    start = model.get_submodule(stack.trunk).input_hidden_states_scale
    return Layout(
        family="zaya",
        scheme="residual_scaling",
        anatomy=anatomy,
        taps=tuple(_taps(stack, anatomy)),
        connection=Weighted(
            keep={0: start} | {i: module.residual_scale for i, module in modules.items()},
            add={i: module.hidden_states_scale for i, module in modules.items()},
        ),
        write_definition="output of the attention and MLP modules; .bias is the constant that its scaling adds",
        source_definition="source 0 is the token embedding; input.bias is the constant that the input scaling adds",
        rounds_to=torch.float32,
        routing=(
            *map(stack.under, INPUT),
            *(stack.inside(site.layer, f"{SCALES[site.kind]}.{name}") for site in sites for name in WEIGHTS),
        ),
    )


def _anatomy(layers: int) -> Anatomy:
    start = Site(0, -1, "input", views=(), writes=("input.bias",))
    sites = [Site(0, layer, kind, writes=(kind, f"{kind}.bias")) for layer in range(layers) for kind in SCALES]
    return anatomy_of([start, *sites, Site(0, -1, FINAL)])


def _taps(stack: Stack, anatomy: Anatomy) -> Iterator[Tap]:
    reads = {part.kind: part.read for part in PRE_NORM}
    embed, trunk = stack.under("embed_tokens"), stack.model.get_submodule(stack.trunk)
    yield stack.tap(embed, "output", Event("source", 0))
    yield stack.tap(embed, "output", Event("source", 1), lambda seen: _input_constant(trunk).expand_as(seen.output))
    for site in anatomy.sites[1:]:
        (reader,) = anatomy.readers_of(site)
        last = site.kind == FINAL
        read = stack.under("norm") if last else stack.inside(site.layer, reads[site.kind])
        yield stack.tap(read, "input", Event("reader", reader))
        if not last:
            write, constant = anatomy.sources_of(site)
            scale = stack.inside(site.layer, SCALES[site.kind])
            module = stack.model.get_submodule(scale)
            yield replace(stack.tap(scale, "input", Event("source", write)), put=put_argument)
            yield stack.tap(scale, "input", Event("source", constant), _constant_of(module))


def _input_constant(trunk: nn.Module) -> Tensor:
    return trunk.input_hidden_states_bias * trunk.input_hidden_states_scale


def _constant_of(module: nn.Module) -> Callable[[Seen], Tensor]:
    def constant(seen: Seen) -> Tensor:
        value = module.hidden_states_bias * module.hidden_states_scale + module.residual_bias * module.residual_scale
        return value.expand_as(seen.args[0])

    return constant

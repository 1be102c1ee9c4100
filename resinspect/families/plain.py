"""Plain pre-norm Hugging Face decoders (Llama, Qwen, Mistral, GPT-2, ...): every weight is 1.

A layer qualifies by its parts: exactly two norms and two sublayers under one of the names below, and nothing else that
holds parameters. Whether the layer adds them up plainly is not guessed: the capture's fidelity decides.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from resinspect.anatomy import Anatomy, decoder_anatomy
from resinspect.families.layout import Event, Layout, Tap
from resinspect.program import Connection


class Parts(NamedTuple):
    """Names of a layer's modules in execution order, and of the norm after the last layer."""

    attn_norm: str
    attn: str
    mlp_norm: str
    mlp: str
    final_norm: str


KNOWN_PARTS = (
    Parts("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "norm"),
    Parts("ln_1", "attn", "ln_2", "mlp", "ln_f"),
)


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a decoder made of plain pre-norm layers."""
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            continue
        trunk_path = path.rpartition(".")[0]
        trunk = model.get_submodule(trunk_path)
        for parts in KNOWN_PARTS:
            if hasattr(trunk, parts.final_norm) and all(_is_plain_layer(layer, parts) for layer in layers):
                final = f"{trunk_path}.{parts.final_norm}".lstrip(".")
                anatomy = decoder_anatomy(len(layers))
                return Layout(
                    family="plain",
                    scheme="pre_ln",
                    anatomy=anatomy,
                    taps=tuple(_taps(model, path, parts, final, anatomy)),
                    connection=Connection(),
                    write_definition="output of the attention and MLP modules",
                    source_definition="source 0 is what enters the first layer",
                )
    return None


def _is_plain_layer(layer: nn.Module, parts: Parts) -> bool:
    with_parameters = {name for name, child in layer.named_children() if any(True for _ in child.parameters())}
    own_parameters = any(True for _ in layer.parameters(recurse=False))
    return with_parameters == set(parts[:4]) and not own_parameters


def _taps(model: nn.Module, layers: str, parts: Parts, final: str, anatomy: Anatomy) -> Iterator[Tap]:
    for site in anatomy.sites:
        (reader,) = anatomy.readers_of(site)
        norm = parts.attn_norm if site.kind == "attn" else parts.mlp_norm
        read = final if site.kind == "final" else f"{layers}.{site.layer}.{norm}"
        if site.index == 0:
            yield Tap(read, model.get_submodule(read), "input", Event("source", 0))
        yield Tap(read, model.get_submodule(read), "input", Event("reader", reader))
        if site.kind != "final":
            write = f"{layers}.{site.layer}.{parts.attn if site.kind == 'attn' else parts.mlp}"
            yield Tap(write, model.get_submodule(write), "output", Event("source", *anatomy.sources_of(site)))

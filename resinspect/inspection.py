"""What a checkpoint is, from its configuration and the headers of its files: no weights are loaded."""

import os
import re
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from resinspect.anatomy import Anatomy
from resinspect.checkpoint.classes import model_classes
from resinspect.checkpoint.loading import load_config
from resinspect.checkpoint.nanogpt import read_nanogpt
from resinspect.checkpoint.refusals import explained, quiet
from resinspect.checkpoint.sources import Source, find
from resinspect.checkpoint.stored import Stored, stored_files, stored_in
from resinspect.errors import CaptureError, CheckpointError
from resinspect.families import FAMILIES, Layout, find_layout
from resinspect.program import TERM

TRIED = 50_000_000
"""Most parameters of a model that is built with memory, to try out what its structure does not say."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Inspection:
    """One checkpoint.

    Attributes:
        name: Of its folder, or of its file.
        config: Its configuration.
        model: An empty model of its class, on the meta device; None where there can be none without weights.
        layout: What its family says; None if none can be named without its weights.
        unknown: Why no family is named, and what its layers are.
        stored: Its weights on disk.
        tokenizer: Whether it has one.
        notes: What else is to be known, a clause each.
    """

    name: str
    config: PreTrainedConfig
    model: nn.Module | None
    layout: Layout | None
    unknown: str
    stored: Stored
    tokenizer: bool
    notes: tuple[str, ...] = ()


def inspect(path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Inspection:
    """Look at a checkpoint on this machine without loading its weights, which need not all be there.

    Args:
        path: A folder, a bundled name, or a ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Raises:
        CheckpointError: If there is no configuration that can be used.
    """
    source = find(path, trust_remote_code=trust_remote_code, whole=False)
    contents = source.contents
    if contents is None:
        raise CheckpointError(f"there is no folder {path}; inspect looks at folders and files on this machine.")
    with quiet():
        if contents.config is None:
            config, _, notes = read_nanogpt(contents.files[0], "meta")
        else:
            config, notes = load_config(source), ()
        stored = stored_files(contents.files) if contents.files else stored_in(Path(source.where), contents.config)
        model, layout, unknown = _described(config, source)
    return Inspection(source.name, config, model, layout, unknown, stored, contents.has_tokenizer, tuple(notes))


def rows(found: Inspection) -> list[tuple[str, str]]:
    """What there is to say, one line each: name and value."""
    kind = type(found.model).__name__ if found.model is not None else ", ".join(found.config.architectures or ["?"])
    lines = [("checkpoint", f"{found.name} ({kind}, model_type {found.config.model_type})")]
    lines += _residual(found.layout) if found.layout is not None else [("family", found.unknown)]
    lines += [("sizes", _sizes(found))]
    if found.model is not None:
        lines.append(("parameters", f"{sum(p.numel() for p in found.model.parameters()):,}"))
    lines += [("weights", _weights(found.stored))]
    lines += [("routing", name) for name in _routing(found.layout)]
    lines += [("tokenizer", "yes" if found.tokenizer else "none: token ids become labels")]
    return lines + [("note", note + ".") for note in (*found.notes, *found.stored.notes)]


def _described(config: PreTrainedConfig, source: Source) -> tuple[nn.Module | None, Layout | None, str]:
    """An empty model and its layout as far as there can be any, and why not."""
    try:
        model = _built(config, source, "meta")
    except CheckpointError as error:
        return None, None, str(error).removesuffix(".")
    small = sum(parameter.numel() for parameter in model.parameters()) <= TRIED
    # What no family knows by its structure is tried out in a forward pass, for which weights at random will do.
    layout = _known(model) or (_known(_at_random(config, source)) if small else None)
    if layout is not None:
        return model, layout, ""
    why = "none knows its residual" if small else "too large to try out here; capture tries out and checks its residual"
    return model, None, f"{why}; {_structure(model)}"


def _built(config: PreTrainedConfig, source: Source, device: str) -> nn.Module:
    """A model as it is before training, or without memory for its weights on the meta device."""
    kind = model_classes(config, source.where, trust_remote_code=source.arguments["trust_remote_code"])[0]
    what = f"{kind.__name__} cannot be built from its configuration"
    with explained(what, "check config.json"), torch.device(device):
        if issubclass(kind, PreTrainedModel):
            return kind(deepcopy(config)).eval()
        return kind.from_config(deepcopy(config), trust_remote_code=True).eval()


def _at_random(config: PreTrainedConfig, source: Source) -> nn.Module:
    """A model in which no two modules are alike: two norms that are still the identity would be taken for one read."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = _built(config, source, "cpu")
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def _known(model: nn.Module) -> Layout | None:
    try:
        return find_layout(model)
    except (CaptureError, NotImplementedError, RuntimeError):
        return None


def _residual(layout: Layout) -> list[tuple[str, str]]:
    family, anatomy = FAMILIES[layout.family], layout.anatomy
    weight, method = family.weight, family.method
    if layout.connection is not None and layout.connection.carrier is TERM and "scalar" in weight:
        # The row speaks for most of the family, and not for this one.
        weight, method = "no scalars: per channel, conditional or operators", "replay"
    return [
        ("family", f"{layout.family}: {family.scheme}"),
        ("scheme", layout.scheme),
        ("class of W", f"{weight}; method {method}"),
        ("readers", f"{len(anatomy.readers)}, of {len(anatomy.sources)} sources; in a layer {_readers(anatomy)}"),
    ]


def _readers(anatomy: Anatomy) -> str:
    """Kinds of readers within a layer, each with its separate inputs."""
    views: dict[str, tuple[str, ...]] = {}
    for site in anatomy.sites:
        if site.layer >= 0 and len(site.views) > len(views.get(site.kind, ())):
            views[site.kind] = site.views
    return ", ".join(f"{kind} ({', '.join(names)})" if len(names) > 1 else kind for kind, names in views.items())


def _sizes(found: Inspection) -> str:
    text = found.config.get_text_config()
    streams = getattr(found.layout.connection, "streams", None) if found.layout else None
    sizes = {
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden size": getattr(text, "hidden_size", None),
        "streams": streams,
        "vocabulary": getattr(text, "vocab_size", None),
        "context": getattr(text, "max_position_embeddings", None),
    }
    return ", ".join(f"{name} {value:,}" for name, value in sizes.items() if isinstance(value, int))


def _weights(stored: Stored) -> str:
    if not stored.files:
        return f"none here; the index names {stored.tensors:,} tensors" if stored.tensors else "none"
    numbers = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(stored.numbers.items(), key=lambda i: -i[1]))
    files = f"{len(stored.files)} file{'s' if len(stored.files) > 1 else ''}"
    return f"{files}, {stored.bytes:,} bytes, {stored.tensors:,} tensors" + (f": {numbers}" if numbers else "")


def _routing(layout: Layout | None) -> list[str]:
    """Names of routing parameters, one for all layers, with how many it stands for."""
    if layout is None:
        return []
    names = Counter(_NUMBER.sub("*", name) for name in layout.routing)
    return [f"{name} ({count})" if count > 1 else name for name, count in names.items()]


def _structure(model: nn.Module) -> str:
    """The longest list of modules, which are its layers."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return "it has no list of layers"
    name, layers = max(lists, key=lambda item: len(item[1]))
    kinds = Counter(type(layer).__name__ for layer in layers)
    parts = ", ".join(child for child, _ in layers[0].named_children()) if len(layers) else "nothing"
    return f"its list {name} holds {', '.join(f'{n} {kind}' for kind, n in kinds.items())} with {parts}"

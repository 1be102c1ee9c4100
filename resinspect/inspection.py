"""What a checkpoint is, from its configuration and the headers of its files: no weights are loaded."""

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig

from resinspect.anatomy import Anatomy
from resinspect.checkpoint.blank import at_random, blank, smaller
from resinspect.checkpoint.loading import load_config
from resinspect.checkpoint.nanogpt import read_nanogpt
from resinspect.checkpoint.refusals import quiet
from resinspect.checkpoint.sources import Source, find
from resinspect.checkpoint.stored import Stored, stored_files, stored_in
from resinspect.errors import CaptureError, CheckpointError, UnknownFamilyError
from resinspect.families import FAMILIES, Layout, find_layout, layers_of
from resinspect.program import TERM

TRIED = 50_000_000
"""Most parameters of a model that is built with memory, to try out what its structure does not say."""
COPY, NARROWER = 500_000_000, 8
"""Most parameters of the smaller copy that a larger model is tried out with, and what divides its width above that."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Inspection:
    """One checkpoint.

    Attributes:
        name: Of its folder, or of its file.
        config: Its configuration.
        stored: Its weights on disk.
        tokenizer: Whether it has one.
        notes: What else is to be known, a clause each.
        model: An empty model of its class, on the meta device; None where there can be none without weights.
        layout: What its family says; None if none can be named without its weights.
        unknown: Why no family is named, and what its layers are.
        copied: Layers of a smaller copy whose layout this is; 0 if it is that of the model itself.
    """

    name: str
    config: PreTrainedConfig
    stored: Stored
    tokenizer: bool
    notes: tuple[str, ...] = ()
    model: nn.Module | None = None
    layout: Layout | None = None
    unknown: str = ""
    copied: int = 0


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
        model, layout, unknown, layers = _described(config, source)
    known = {"model": model, "layout": layout, "unknown": unknown, "copied": layers if layout else 0}
    return Inspection(source.name, config, stored, contents.has_tokenizer, tuple(notes), **known)


def rows(found: Inspection) -> list[tuple[str, str]]:
    """What there is to say, one line each: name and value."""
    kind = type(found.model).__name__ if found.model is not None else ", ".join(found.config.architectures or ["?"])
    lines = [("checkpoint", f"{found.name} ({kind}, model_type {found.config.model_type})")]
    lines += _residual(found.layout, found.copied) if found.layout is not None else [("family", found.unknown)]
    lines += [("sizes", _sizes(found))]
    if found.model is not None:
        lines.append(("parameters", f"{_parameters(found.model):,}"))
    lines += [("weights", _weights(found.stored))]
    lines += [("routing", name) for name in _routing(found.layout)]
    lines += [("tokenizer", "yes" if found.tokenizer else "none: token ids become labels")]
    return lines + [("note", note + ".") for note in (*found.notes, *found.stored.notes)]


def _described(config: PreTrainedConfig, source: Source) -> tuple[nn.Module | None, Layout | None, str, int]:
    """An empty model, its layout as far as there can be any, why not, and layers of the copy that was tried out."""
    try:
        model = blank(config, source, "meta")
    except CheckpointError as error:
        return None, None, str(error).removesuffix("."), 0
    if layout := _known(model):
        return model, layout, "", 0
    # What no family knows by its structure is tried out in a forward pass, for which weights at random will do.
    layers = 0
    try:
        if _parameters(model) > TRIED:
            config, layers = _copy(config, source)
        return model, find_layout(at_random(config, source)), "", layers
    except UnknownFamilyError as error:
        why = f"none knows its residual: {error.reason}"
    except (CaptureError, CheckpointError) as error:
        why = str(error).removesuffix(".")
    return model, None, f"{why}; {layers_of(model)}", layers


def _copy(config: PreTrainedConfig, source: Source) -> tuple[PreTrainedConfig, int]:
    """A smaller configuration that can be tried out, and how many layers it has."""
    for narrow in (1, NARROWER):
        small, layers = smaller(config, narrow)
        if _parameters(blank(small, source, "meta")) <= COPY:
            return small, layers
    raise CheckpointError("too large to try out here; capture tries out and checks its residual.")


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _known(model: nn.Module) -> Layout | None:
    """The layout of an empty model; None where only a forward pass can tell."""
    try:
        return find_layout(model)
    except CaptureError:
        return None


def _residual(layout: Layout, copied: int) -> list[tuple[str, str]]:
    family, anatomy = FAMILIES[layout.family], layout.anatomy
    weight, method = family.weight, family.method
    if layout.connection is not None and layout.connection.carrier is TERM and "scalar" in weight:
        # The row speaks for most of the family, and not for this one.
        weight, method = "no scalars: per channel, conditional or operators", "replay"
    count = (
        f"as in a copy with {copied} layers that was tried out"
        if copied
        else (f"{len(anatomy.readers)}, of {len(anatomy.sources)} sources")
    )
    return [
        ("family", f"{layout.family}: {family.scheme}"),
        ("scheme", layout.scheme),
        ("class of W", f"{weight}; method {method}"),
        ("readers", f"{count}; in a layer {_readers(anatomy)}"),
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

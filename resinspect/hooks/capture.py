"""From a model and prompts to a trace."""

import hashlib
import inspect
import platform
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from resinspect.errors import CaptureError, OptionError
from resinspect.families import Layout, Sublayers, find_layout, name_layout
from resinspect.hooks.geometry import next_token_loss
from resinspect.hooks.prompts import Batch, Prompts, batches, encode_prompts, token_texts
from resinspect.hooks.recorder import Recorder
from resinspect.hooks.taps import attached, evaluating
from resinspect.trace import build_trace, concat, fidelity_summary

KEEP = ("gram", "cross", "natives", "hidden", "logits")
METHODS = ("auto", "replay", "solve")
TOLERANCE = {"replay": 4.0, "solve": 16.0}
"""A reader is exact while its error stays below this many units of rounding (see ``resinspect.trace.verdict``).

The solve adds the rounding of its own normal equations, which shows where the model itself runs in float64.
"""
WILD = 0.05
"""A map that misses this share of the median reader input by more than rounding is refused, not marked."""


def capture(
    model: nn.Module,
    prompts: Prompts,
    *,
    method: str = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    keep: Iterable[str] = ("gram", "cross", "natives"),
    sublayers: Sublayers | None = None,
    final: str | None = None,
    truncate: bool = False,
) -> xr.Dataset:
    """Capture the routing map of a model on prompts.

    The model's own forward runs once per batch; every token of every prompt gets its own row of W.

    Args:
        model: A model of a known family, or any module with ``sublayers`` and ``final``.
        prompts: A text, texts, lists of token ids, or a batch ``{"input_ids", "attention_mask"}``.
        method: ``"replay"`` recomputes W from the scheme, ``"solve"`` from reader inputs and writes alone;
            ``"auto"`` replays what is known and solves the rest.
        tokenizer: Encodes texts and labels tokens.
        batch_size: Prompts per forward pass.
        keep: Optional parts of the trace, of ``gram``, ``cross``, ``natives``, ``hidden``, ``logits``.
        sublayers: ``(write module, reader module)`` paths of a module of no known family; ``*`` is a layer number.
        final: Path of the module that reads the final residual; goes with ``sublayers``.
        truncate: Cut prompts that are longer than the model's context, with a warning, instead of refusing them.

    Returns:
        A trace; ``ri.verdict`` says for each reader whether it is exact.

    Raises:
        PromptError: If the prompts cannot be run as given.
        CaptureError: If the model is of no known family, does not run as its layout says, or the map is wrong.
        OptionError: If an option has a value that is not allowed.
    """
    parts = capture_batches(
        model,
        prompts,
        method=method,
        tokenizer=tokenizer,
        batch_size=batch_size,
        keep=keep,
        sublayers=sublayers,
        final=final,
        truncate=truncate,
    )
    return concat(list(parts))


def capture_batches(
    model: nn.Module,
    prompts: Prompts,
    *,
    method: str = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch_size: int = 8,
    keep: Iterable[str] = ("gram", "cross", "natives"),
    sublayers: Sublayers | None = None,
    final: str | None = None,
    truncate: bool = False,
) -> Iterator[xr.Dataset]:
    """As ``capture``, one trace per batch as it is ready: for prompts whose trace does not fit in memory."""
    kept = frozenset(keep)
    if unknown := kept - set(KEEP):
        raise OptionError(f"keep has {', '.join(sorted(unknown))}; allowed are {', '.join(KEEP)}.")
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}; it must be at least 1.")
    layout = name_layout(model, sublayers, _final(final)) if sublayers is not None else find_layout(model)
    run = _Run(model, layout, _method(method, layout), tokenizer, kept)
    encoded = encode_prompts(prompts, tokenizer, max_length=run.context, vocab_size=run.vocab_size, truncate=truncate)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return (
        run.trace(batch) for batch in batches(encoded, batch_size, pad="attention_mask" in run.accepts, device=device)
    )


@dataclass
class _Run:
    """One capture: what stays the same over its batches."""

    model: nn.Module
    layout: Layout
    method: str
    tokenizer: PreTrainedTokenizerBase | None
    keep: frozenset[str]

    def __post_init__(self) -> None:
        self.accepts = inspect.signature(self.model.forward).parameters.keys()
        self.config = getattr(self.model, "config", None)
        self.context = getattr(self.config, "max_position_embeddings", None)
        self.vocab_size = getattr(self.config, "vocab_size", None)
        self.fingerprint = fingerprint(self.model)

    def trace(self, batch: Batch) -> xr.Dataset:
        """Run the forward pass of one batch and build its trace."""
        recorder = Recorder(self.layout, batch, self.method, self.keep)
        with evaluating(self.model), attached(self.layout.taps, recorder.receive):
            output = self.model(batch.ids, **self._arguments(batch))
        with torch.no_grad():
            variables: dict[str, Any] = recorder.finish()
            variables |= self._predictions(batch, _logits(output))
        arrays = {name: _numpy(value) for name, value in variables.items()}
        anatomy = self.layout.anatomy
        natives = {}
        if "natives" in self.keep and self.method == "replay":
            natives = _stack_natives(self.layout, recorder)
        trace = build_trace(
            arrays | natives,
            readers=anatomy.readers,
            sources=anatomy.sources,
            tokens=self._tokens(batch),
            coords={"site": [s.name for s in anatomy.sites]} if natives else None,
            attrs=self._attributes(recorder),
        )
        return _refuse_wild(trace)

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        arguments = {"use_cache": False, "return_dict": True}
        if batch.padded:
            arguments |= {"attention_mask": batch.mask.long(), "position_ids": batch.positions}
        return {name: value for name, value in arguments.items() if name in self.accepts}

    def _predictions(self, batch: Batch, logits: Tensor | None) -> dict[str, Tensor]:
        if logits is None or logits.shape[:2] != batch.ids.shape:
            return {}
        last = ~torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], dim=1)
        packed = batch.real(logits)
        loss = next_token_loss(packed, batch.real(batch.ids.roll(-1, dims=1)).to(packed.device))
        loss = loss.masked_fill(batch.real(last).to(loss.device), torch.nan)
        return {"loss": loss} | ({"logits": packed} if "logits" in self.keep else {})

    def _tokens(self, batch: Batch) -> dict[str, Any]:
        rows = torch.arange(len(batch.ids), device=batch.ids.device)[:, None].expand_as(batch.ids)
        ids = batch.real(batch.ids).tolist()
        return {
            "sample": _numpy(batch.real(rows)) + batch.first_sample,
            "position": _numpy(batch.real(batch.positions)),
            "token_id": ids,
            "text": token_texts(ids, self.tokenizer),
        }

    def _attributes(self, recorder: Recorder) -> dict[str, Any]:
        packages = ("torch", "transformers", "transformer-lens", "xarray", "numpy", "resinspect")
        return {
            "model": getattr(self.config, "name_or_path", "") or type(self.model).__name__,
            "family": self.layout.family,
            "scheme": self.layout.scheme,
            "method": self.method,
            "dtype": str(recorder.dtype).removeprefix("torch."),
            "write_definition": self.layout.write_definition,
            "source_definition": self.layout.source_definition,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
            "hash": self.fingerprint,
            "tolerance": TOLERANCE[self.method],
        }


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over every parameter's name, shape, dtype and 64 evenly spaced values: cheap for any size."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        if value.numel():
            flat = value.detach().reshape(-1)
            digest.update(flat[:: max(1, flat.numel() // 64)][:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _method(method: str, layout: Layout) -> str:
    if method not in METHODS:
        raise OptionError(f"method is {method!r}; choose one of {', '.join(METHODS)}.")
    if method == "replay" and layout.connection is None:
        raise OptionError("method 'replay' needs a known scheme; with sublayers= only 'solve' is possible.")
    if method == "auto":
        return "solve" if layout.connection is None else "replay"
    return method


def _final(final: str | None) -> str:
    if final is None:
        raise OptionError('sublayers= needs final=, the module that reads the final residual, such as final="ln_f".')
    return final


def _logits(output: Any) -> Tensor | None:
    value = getattr(output, "logits", None)
    if value is None:
        value = output[0] if isinstance(output, tuple) and output else output
    return value if isinstance(value, Tensor) and value.ndim == 3 else None


def _numpy(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()


def _stack_natives(layout: Layout, recorder: Recorder) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Natives of all sites as ``(token, site, ...)``, NaN where a site has fewer entries or none."""
    sites = len(layout.anatomy.sites)
    stacked = {}
    for name, dims in layout.connection.native_dims.items():
        values = {i: _numpy(native[name]) for i, native in recorder.natives.items() if name in native}
        shape = np.max([value.shape for value in values.values()], axis=0)
        full = np.full((shape[0], sites, *shape[1:]), np.nan, dtype=next(iter(values.values())).dtype)
        for i, value in values.items():
            full[(slice(None), i, *map(slice, value.shape[1:]))] = value
        stacked[f"native_{name}"] = (("token", "site", *dims), full)
    return stacked


def _refuse_wild(trace: xr.Dataset) -> xr.Dataset:
    """Mark what is off, refuse what is wild."""
    summary = fidelity_summary(trace)
    if summary["verdict"] != "off":
        return trace
    median = trace["fidelity"].median("token")
    wild = [name for name in summary["off"] if not float(median.sel(reader=name)) <= WILD]
    if wild:
        raise CaptureError(
            f"the map is wrong from reader {wild[0]!r} on: the writes miss {float(median.sel(reader=wild[0])):.0%} of "
            f"what it reads (median over tokens). The model does not add up as {trace.attrs['scheme']!r} says: a "
            "source seems to be missing before that reader, or its residual is scaled, normed or mixed."
        )
    warnings.warn(
        f"the map is off at {len(summary['off'])} readers, first {summary['off'][0]!r}: their reconstruction error "
        f"(worst {summary['worst']:.1e}) is larger than rounding explains.",
        stacklevel=2,
    )
    return trace

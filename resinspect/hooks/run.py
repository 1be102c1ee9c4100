"""One capture: the model, its layout, and how a batch becomes a trace."""

import hashlib
import inspect
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from resinspect.errors import CaptureError, MapError
from resinspect.families import Event, Layout
from resinspect.families.forward import call, context_of, evaluating, vocabulary
from resinspect.hooks.causality import logits_of
from resinspect.hooks.geometry import next_token_loss
from resinspect.hooks.gradients import gradients
from resinspect.hooks.lens import attribute, definitions, look_through
from resinspect.hooks.prompts import Batch, token_texts
from resinspect.hooks.recorder import READOUT, WILD, Recorder, tolerance
from resinspect.hooks.tail import Tail
from resinspect.hooks.taps import attached
from resinspect.program import TERM
from resinspect.trace import build_trace, fidelity_summary

CACHE_NAMES = ("cache", "past_key_values")
"""Of the key-value cache, among a model's arguments and outputs; the second is the older name."""
Step = tuple[Recorder, dict[str, Any], dict[str, Any]]
"""What one forward pass leaves: its recorder, arrays with leading dimension token, and labels of the tokens."""


@dataclass
class Run:
    """What stays the same over the batches of one capture.

    Attributes:
        model: The model.
        layout: Its sources, readers, taps and program.
        method: ``"replay"`` or ``"solve"``.
        tokenizer: Labels tokens; without one their ids do.
        keep: Optional parts of the trace.
        causal: Whether the model is a decoder, so that it has a next-token loss.
        tail: From the final reader's input to logits, for the lens and the attribution.
    """

    model: nn.Module
    layout: Layout
    method: str
    tokenizer: PreTrainedTokenizerBase | None
    keep: frozenset[str]
    causal: bool = True
    tail: Tail | None = None

    def __post_init__(self) -> None:
        self.accepts = inspect.signature(self.model.forward).parameters.keys()
        self.config = getattr(self.model, "config", None)
        self.context = context_of(self.model)
        self.vocab_size = vocabulary(self.model)
        self.fingerprint = fingerprint(self.model)

    def trace(self, batch: Batch, new_tokens: int = 0) -> xr.Dataset:
        """Run one batch, go on greedily by ``new_tokens`` with the model's cache, and build the trace of all of it."""
        steps = list(self._steps(batch, new_tokens))
        recorder, arrays, tokens = steps[0] if len(steps) == 1 else _by_prompt(steps)
        anatomy = self.layout.anatomy
        trace = build_trace(
            arrays,
            readers=anatomy.readers,
            sources=anatomy.sources,
            tokens=tokens,
            coords={"site": [s.name for s in anatomy.sites]} if any(n.startswith("native_") for n in arrays) else None,
            attrs=self._attributes(recorder),
        )
        self._warn_vacuous(recorder)
        return _refuse_wild(trace)

    def _steps(self, batch: Batch, new_tokens: int) -> Iterator[Step]:
        """One forward pass over the prompts, then one for each new token."""
        cache = None
        for left in range(new_tokens, -1, -1):
            recorder, output = self._forward(batch, cache, use_cache=new_tokens > 0)
            logits, following = logits_of(output), None
            if left:
                cache = _cache(output)
                if logits is None or cache is None:
                    raise CaptureError(
                        f"{type(self.model).__name__} gives no logits or no key-value cache to go on from; "
                        "capture it with max_new_tokens=0."
                    )
                following = logits[:, -1].argmax(-1)
            with torch.no_grad(), _full_precision(batch.ids.device):
                variables: dict[str, Any] = recorder.finish()
                variables |= self._predictions(batch, logits, following, recorder)
                recorder.release()
            if "gradient" in self.keep:
                variables |= gradients(self.model, self.layout, batch, self._arguments(batch, None, use_cache=False))
            arrays = {name: _numpy(value) for name, value in variables.items()}
            if "natives" in self.keep and self.method == "replay":
                arrays |= _stack_natives(self.layout, recorder)
            yield recorder, arrays, self._tokens(batch)
            if following is not None:
                batch = batch.followed_by(following)

    def _forward(self, batch: Batch, cache: Any, *, use_cache: bool) -> tuple[Recorder, Any]:
        recorder = Recorder(self.layout, batch, self.method, self.keep)

        def receive(event: Event, value: Tensor) -> None:
            with _full_precision(value.device):
                recorder.receive(event, value)

        with evaluating(self.model), attached(self.layout.taps, receive):
            return recorder, call(self.model, batch.ids, **self._arguments(batch, cache, use_cache))

    def _arguments(self, batch: Batch, cache: Any, use_cache: bool) -> dict[str, Any]:
        arguments = {"use_cache": use_cache, "return_dict": True}
        if cache is not None:
            arguments[next(name for name in CACHE_NAMES if name in self.accepts)] = cache
        if batch.padded:
            # Padding is on the right: a model's own positions are right, and some do not begin at 0 (RoBERTa).
            arguments["attention_mask"] = batch.mask.long()
        return {name: value for name, value in arguments.items() if name in self.accepts}

    def _warn_vacuous(self, recorder: Recorder) -> None:
        vacuous = [r.name for r in self.layout.anatomy.readers if r.prefix >= recorder.width]
        if vacuous and self.method == "solve":
            warnings.warn(
                f"readers from {vacuous[0]!r} on have as many sources as the model has channels ({recorder.width}), or "
                "more, so that weights which fit prove nothing; only a known scheme (replay) can map them.",
                stacklevel=2,
            )

    def _predictions(
        self, batch: Batch, logits: Tensor | None, following: Tensor | None, recorder: Recorder
    ) -> dict[str, Tensor]:
        if logits is None or logits.shape != (*batch.ids.shape, self.vocab_size):
            if asked := sorted(self.keep & {*READOUT, "gradient"}):
                raise CaptureError(
                    f"{type(self.model).__name__} does not give one logit for each of its {self.vocab_size} token ids, "
                    f"so it has no next-token loss; capture it without {' and '.join(asked)} in keep."
                )
            return {}
        packed = batch.real(logits)
        targets = batch.real(batch.next_ids(following)).to(packed.device) if self.causal else None
        found = {"logits": packed} if "logits" in self.keep else {}
        if targets is not None:
            found["loss"] = next_token_loss(packed, targets.clamp(min=0)).masked_fill(targets < 0, torch.nan)
        if "lens" in self.keep:
            prefix = [reader.prefix for reader in self.layout.anatomy.readers]
            found |= look_through(self.tail, recorder.final_contributions, prefix, packed, targets)
        if "attribution" in self.keep:
            found |= attribute(self.tail, recorder.final_contributions, targets)
        return found

    def _tokens(self, batch: Batch) -> dict[str, Any]:
        rows = torch.arange(len(batch.ids), device=batch.ids.device)[:, None].expand_as(batch.ids)
        ids = batch.real(batch.ids).tolist()
        return {
            "sample": _numpy(batch.real(rows)) + batch.first_sample,
            "position": _numpy(batch.real(batch.positions)),
            "token_id": ids,
            "text": token_texts(ids, self.tokenizer),
        }

    def _arithmetic(self, dtype: torch.dtype) -> torch.dtype:
        """The coarsest dtype in which the model forms its residual."""
        inside = self.layout.rounds_to or dtype
        return max(dtype, inside, key=lambda kind: torch.finfo(kind).eps)

    def _attributes(self, recorder: Recorder) -> dict[str, Any]:
        packages = ("torch", "transformers", "transformer-lens", "xarray", "numpy", "resinspect")
        return {
            "model": getattr(self.config, "name_or_path", "") or type(self.model).__name__,
            "family": self.layout.family,
            "scheme": self.layout.scheme,
            "method": self.method,
            "hidden_size": recorder.width,
            "dtype": str(self._arithmetic(recorder.dtype)).removeprefix("torch."),
            "write_definition": self.layout.write_definition,
            "source_definition": self.layout.source_definition,
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
            "hash": self.fingerprint,
            "tolerance": tolerance(self.method, recorder.dtype),
            **definitions(
                self.keep, self.tail, terms=self.method == "replay" and self.layout.connection.carrier == TERM
            ),
        }


def _full_precision(device: torch.device) -> Any:
    """Whatever autocast the model runs under, its record is not rounded by it."""
    return torch.autocast(device.type, enabled=False)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over every parameter's name, shape, dtype and 64 evenly spaced values: cheap for any size."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, Tensor):
            # Quantized modules keep packed weights, of which only the kind can be told.
            digest.update(f"{name} {type(value).__name__}\n".encode())
            continue
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        if value.numel():
            flat = value.detach().reshape(-1)
            digest.update(flat[:: max(1, flat.numel() // 64)][:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _by_prompt(steps: list[Step]) -> Step:
    """Several steps as one, the tokens of each prompt together."""
    recorder = steps[0][0]
    order = np.argsort(np.concatenate([tokens["sample"] for _, _, tokens in steps]), kind="stable")
    arrays = {}
    for name, first in steps[0][1].items():
        dims, parts = (first[0], [a[name][1] for _, a, _ in steps]) if isinstance(first, tuple) else (None, None)
        joined = np.concatenate(parts or [a[name] for _, a, _ in steps])[order]
        arrays[name] = joined if dims is None else (dims, joined)
    tokens = {name: np.concatenate([t[name] for _, _, t in steps])[order].tolist() for name in steps[0][2]}
    return recorder, arrays, tokens


def _cache(output: Any) -> Any:
    return next((value for name in CACHE_NAMES if (value := getattr(output, name, None)) is not None), None)


def _numpy(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()


def _stack_natives(layout: Layout, recorder: Recorder) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """Natives of all sites as ``(token, site, ...)``, NaN where a site has fewer entries or none."""
    sites = len(layout.anatomy.sites)
    stacked = {}
    for name, dims in layout.connection.native_dims.items():
        values = {i: _numpy(native[name]) for i, native in recorder.natives.items() if name in native}
        if not values:
            continue
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
    if wild and not np.isfinite(float(median.sel(reader=wild[0]))):
        # A write that is NaN spoils the reconstruction of readers measured together with it, also of earlier ones.
        lost = trace["reader"].values[(~np.isfinite(trace["reader_norm"])).mean("token").values > 0.5]
        first = str((lost if len(lost) else wild)[0])
        raise MapError(
            f"reader {first!r} gets values that are not finite (NaN or inf) at most tokens, so there is nothing to "
            "map; check the weights, or run the model in a wider dtype.",
            trace,
        )
    first, count = summary["off"][0], len(summary["off"])
    where = _between(trace, first)
    if wild:
        named = dict.fromkeys([first, wild[0]])
        misses = [f"{float(median.sel(reader=name)):.2g} of what {name!r} reads" for name in named]
        says = "" if trace.attrs["method"] == "solve" else f" as {trace.attrs['scheme']!r} says"
        raise MapError(
            f"the map is wrong from reader {first!r} on: the writes miss {' and '.join(misses)} (median over tokens). "
            f"The model does not add up{says}: a source seems to be missing {where}, or its residual is scaled, normed "
            "or mixed.",
            trace,
        )
    warnings.warn(
        f"the map is off at {count} reader{'s' if count > 1 else ''}, first {first!r}: the reconstruction error (worst "
        f"{summary['worst']:.1e}) is larger than rounding explains. A source may be missing {where}.",
        stacklevel=2,
    )
    return trace


def _between(trace: xr.Dataset, reader: str) -> str:
    names = trace["reader"].values.tolist()
    before = names.index(reader) - 1
    return f"before {reader!r} and after {names[before]!r}" if before >= 0 else f"before {reader!r}"

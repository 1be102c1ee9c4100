"""From a model and prompts to a trace."""

from collections.abc import Iterable, Iterator

import torch
import xarray as xr
from torch import nn
from transformers import PreTrainedTokenizerBase

from resinspect.errors import OptionError
from resinspect.families import Layout, Sublayers, find_layout, name_layout
from resinspect.hooks.prompts import Prompts, batches, encode_prompts
from resinspect.hooks.run import Run
from resinspect.hooks.taps import unwrapped
from resinspect.trace import concat

KEEP = ("gram", "cross", "natives", "hidden", "logits")
METHODS = ("auto", "replay", "solve")


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
    max_new_tokens: int = 0,
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
        max_new_tokens: Go on greedily by so many tokens, with the model's key-value cache; they are captured too.

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
        max_new_tokens=max_new_tokens,
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
    max_new_tokens: int = 0,
) -> Iterator[xr.Dataset]:
    """As ``capture``, one trace per batch as it is ready: for prompts whose trace does not fit in memory."""
    kept = frozenset(keep)
    if unknown := kept - set(KEEP):
        raise OptionError(f"keep has {', '.join(sorted(unknown))}; allowed are {', '.join(KEEP)}.")
    if batch_size < 1:
        raise OptionError(f"batch_size is {batch_size}; it must be at least 1.")
    if max_new_tokens < 0:
        raise OptionError(f"max_new_tokens is {max_new_tokens}; it must be at least 0.")
    model = unwrapped(model)
    layout = name_layout(model, sublayers, _final(final)) if sublayers is not None else find_layout(model)
    run = Run(model, layout, _method(method, layout), tokenizer, kept)
    room = run.context and run.context - max_new_tokens
    encoded = encode_prompts(prompts, tokenizer, max_length=room, vocab_size=run.vocab_size, truncate=truncate)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    pad = "attention_mask" in run.accepts and not max_new_tokens
    return (run.trace(batch, max_new_tokens) for batch in batches(encoded, batch_size, pad=pad, device=device))


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

"""From a model and prompts to a trace."""

from collections.abc import Iterable, Iterator

import torch
import xarray as xr
from torch import nn
from transformers import PreTrainedTokenizerBase

from resinspect.errors import CaptureError, OptionError
from resinspect.families import Layout, Sublayers, find_layout, name_layout
from resinspect.families.wrapped import bridged
from resinspect.hooks.causality import is_causal, require_weights
from resinspect.hooks.lens import require_linear
from resinspect.hooks.prompts import Prompts, batches, encode_prompts
from resinspect.hooks.recorder import READOUT
from resinspect.hooks.run import Run
from resinspect.hooks.tail import find_tail
from resinspect.hooks.taps import unwrapped
from resinspect.trace import concat

KEEP = ("gram", "cross", "natives", "hidden", "logits", "lens", "attribution", "gradient")
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

    The model's own forward runs once per batch; every token of every prompt gets its own row of W. Before, it runs on
    at most 16 tokens to see whether it is causal: only then the trace has the loss of the next token.

    Args:
        model: A model of a known family, also as a TransformerBridge of transformer_lens, compiled or data-parallel; or
            any module with ``sublayers`` and ``final``.
        prompts: A text, texts, lists of token ids, or a batch ``{"input_ids", "attention_mask"}``.
        method: ``"replay"`` recomputes W from the scheme, ``"solve"`` from reader inputs and writes alone;
            ``"auto"`` replays what is known and solves the rest.
        tokenizer: Encodes texts and labels tokens.
        batch_size: Prompts per forward pass.
        keep: Optional parts of the trace: ``gram`` (inner products of writes), ``cross`` (of writes and reader inputs),
            ``natives`` (the scheme's own weights), ``hidden`` (writes and reader inputs themselves), ``logits``,
            ``lens`` (what the model would predict from the sources so far, at every reader; no logits are stored),
            ``attribution`` (what each source adds to the logit of the true next token), ``gradient`` (norms of the
            gradients of the loss at readers and sources, by one more forward and one backward pass). What exactly, the
            attributes ``lens_definition``, ``attribution_definition`` and ``gradient_definition`` of the trace say.
        sublayers: ``(write module, reader module)`` paths of a module of no known family, in execution order; ``*`` is
            a layer number. What a module writes is its output, what it reads is its input. A module that runs several
            times in one forward pass, because it is looped or shared, needs one name per call: ``"block.attn"`` is its
            first, ``"block.attn@1"`` its second. For two loops over all layers:
            ``[("h.*.attn", "h.*.ln"), ("h.*.attn@1", "h.*.ln@1")]``. Neighbours with the same reader are parallel.
        final: Path of the module that reads the final residual; goes with ``sublayers`` and takes ``@`` as they do.
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
    kept = _kept(keep)
    for name, value, least in (("batch_size", batch_size, 1), ("max_new_tokens", max_new_tokens, 0)):
        if not isinstance(value, int) or value < least:
            raise OptionError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    if tokenizer is not None and not callable(tokenizer):
        raise OptionError(f"tokenizer is {tokenizer!r}; give the tokenizer itself, the second that ri.load returns.")
    if final is not None and sublayers is None:
        raise OptionError(f"final is {final!r}, but there are no sublayers= that it could go with; give both or none.")
    if max_new_tokens and "gradient" in kept:
        raise OptionError("gradient needs one whole forward pass, but max_new_tokens goes on token by token; keep one.")
    named = unwrapped(model)
    model = bridged(named)
    require_weights(model)
    layout = name_layout(named, sublayers, _final(final)) if sublayers is not None else find_layout(model)
    run = Run(model, layout, _method(method, layout), tokenizer, kept)
    room = run.context and run.context - max_new_tokens
    encoded = encode_prompts(prompts, tokenizer, max_length=room, vocab_size=run.vocab_size, truncate=truncate)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    run.causal = is_causal(model, encoded, device)
    if kept & {"attribution", "gradient"} and not run.causal:
        raise CaptureError(
            f"{type(model).__name__} is no causal decoder, so it has no next-token loss for attribution or gradient; "
            "capture it without them in keep."
        )
    if kept & READOUT:
        run.tail = find_tail(model, layout, encoded, device)
    if "attribution" in kept:
        require_linear(run.tail)
    pad = "attention_mask" in run.accepts and not max_new_tokens
    return (run.trace(batch, max_new_tokens) for batch in batches(encoded, batch_size, pad=pad, device=device))


def _kept(keep: Iterable[str]) -> frozenset[str]:
    """Names of parts; one name alone is one part."""
    names = [keep] if isinstance(keep, str) or not isinstance(keep, Iterable) else list(keep)
    if unknown := [name for name in names if name not in KEEP]:
        raise OptionError(f"keep has {', '.join(map(str, unknown))}; allowed are {', '.join(KEEP)}.")
    return frozenset(names)


def _method(method: str, layout: Layout) -> str:
    if method not in METHODS:
        raise OptionError(f"method is {method!r}; choose one of {', '.join(METHODS)}.")
    if method == "replay" and layout.connection is None:
        raise OptionError("method 'replay' needs a known scheme; with sublayers= only 'solve' is possible.")
    if method == "auto":
        return "solve" if layout.connection is None else "replay"
    return method


def _final(final: str | None) -> str:
    if not isinstance(final, str):
        raise OptionError('sublayers= needs final=, the module that reads the final residual, such as final="ln_f".')
    return final

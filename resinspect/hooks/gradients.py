"""How much the loss depends on what each reader reads and on what each source writes: one backward pass.

The gradient of a **source** is that of everything the write reaches. The gradient of a **reader** is that of what this
reader alone reads: where the tensor also is the residual that goes on, the reader is handed a view of its own, so that
it means the same whether a scheme forms its inputs anew or passes one state along.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError
from resinspect.families import Event, Layout, Seen, Tap
from resinspect.families.forward import call, evaluating
from resinspect.hooks.causality import logits_of
from resinspect.hooks.geometry import lengths
from resinspect.hooks.prompts import Batch
from resinspect.hooks.taps import attached, put_at, value_at

GRADIENT = (
    "norm of the gradient of the mean next-token loss of the token's own prompt; of a reader: through what it reads "
    "alone, of a source: through all that its write reaches; NaN at a prompt's last token, which predicts nothing"
)


def gradients(model: nn.Module, layout: Layout, batch: Batch, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Norms of the gradients at every reader and source; parameters' own ``grad`` stay as they are.

    NaN for what cannot be told apart: a reader whose tensor the model itself carries on from, a tensor that a family
    computes from others and has no place to put back, and what the model detaches from its loss.

    Args:
        model: A causal language model.
        layout: Its readers and sources.
        batch: Prompts.
        arguments: Of its forward, beside the ids.

    Returns:
        ``reader_gradient (token, reader)`` and ``source_gradient (token, source)``.

    Raises:
        CaptureError: If there is no loss to take a gradient of.
    """
    watched: dict[Event, Tensor] = {}
    taps = [tap if tap.event is None else replace(tap, put=partial(_watch, tap, watched)) for tap in layout.taps]
    # Tensors made in inference mode carry no gradient; a user may have called from inside it.
    with torch.inference_mode(False), evaluating(model), torch.enable_grad():
        batch = replace(batch, ids=batch.ids.clone(), mask=batch.mask.clone())
        arguments = {name: v.clone() if isinstance(v, Tensor) else v for name, v in arguments.items()}
        with attached(taps, _view):
            logits = logits_of(call(model, batch.ids, **arguments))
        if logits is None or logits.shape[:2] != batch.ids.shape:
            raise CaptureError(f"{type(model).__name__} gives no logits, so there is no loss to take a gradient of.")
        norms = _norms(_loss(logits, batch), watched, batch)
    unknown = logits.new_full((int(batch.mask.sum()),), torch.nan, dtype=torch.float64)
    last = batch.real(_weights(batch)).to(logits.device) == 0
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    found = {}
    for what, items in (("reader", layout.anatomy.readers), ("source", layout.anatomy.sources)):
        columns = [norms.get(Event(what, i), unknown).to(logits.device) for i in range(len(items))]
        found[f"{what}_gradient"] = torch.stack(columns, dim=1).masked_fill(last[:, None], torch.nan).to(kind)
    return found


def _view(event: Event, value: Tensor) -> Tensor | None:
    """A view, so that what is put in its place can be told from the tensor itself."""
    if event.what == "native":
        return None
    if not value.requires_grad:
        value.requires_grad_()  # of a model whose parameters are frozen
    return value.view_as(value)


def _watch(tap: Tap, watched: dict[Event, Tensor], seen: Seen, view: Tensor) -> Seen:
    """Choose the tensor whose gradient is meant, and put the view in its place where it must be there.

    A source is the tensor itself, with all that goes on from it. What a family computes is not in the model's own way
    until it is put there.
    """
    value = value_at(tap, seen)
    own = any(item is value for item in _items(seen))
    if tap.event.what == "source":
        if own:
            watched[tap.event] = value
        elif tap.put:
            watched[tap.event] = view
            return tap.put(seen, view)
        return seen
    if tap.carried or not (own or tap.put):
        return seen
    watched[tap.event] = view
    return put_at(tap, seen, view) if tap.put or tap.pick is None else _swapped(seen, value, view)


def _items(seen: Seen) -> Iterator[Any]:
    outputs = seen.output if isinstance(seen.output, tuple | list) else (seen.output,)
    yield from (*seen.args, *seen.kwargs.values(), *outputs)


def _swapped(seen: Seen, old: Tensor, new: Tensor) -> Seen:
    args = tuple(new if item is old else item for item in seen.args)
    kwargs = {name: new if item is old else item for name, item in seen.kwargs.items()}
    output = new if seen.output is old else seen.output
    if isinstance(output, tuple | list):
        output = type(output)(new if item is old else item for item in output)
    return Seen(args, kwargs, output)


def _norms(loss: Tensor | None, watched: dict[Event, Tensor], batch: Batch) -> dict[Event, Tensor]:
    """``(token,)`` for each event that a gradient comes to."""
    if loss is None:
        return {}
    if not loss.requires_grad:
        raise CaptureError("no gradient comes through the model's forward; capture it without gradient in keep.")
    try:
        found = torch.autograd.grad(loss, list(watched.values()), allow_unused=True)
    except RuntimeError as error:
        # Such as reentrant checkpointing inside the model, which only takes backward().
        cause = str(error).strip().partition("\n")[0].rstrip(".")
        raise CaptureError(
            f"no gradient can be taken through the model ({shorten(cause, 200)}); capture it without gradient in keep."
        ) from error
    grads = zip(watched, found, strict=True)
    return {event: _packed(lengths(grad), batch) for event, grad in grads if grad is not None}


def _packed(norms: Tensor, batch: Batch) -> Tensor:
    return batch.real(norms.unflatten(0, batch.ids.shape) if norms.ndim == 1 else norms)


def _loss(logits: Tensor, batch: Batch) -> Tensor | None:
    """Sum over prompts of each one's mean next-token loss; None where no prompt has a second token."""
    weights = _weights(batch).to(logits.device)
    if not bool(weights.any()):
        return None
    wide = logits if logits.dtype == torch.float64 else logits.float()
    targets = batch.next_ids().to(logits.device)
    loss = nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    return (loss * weights.flatten()).sum()


def _weights(batch: Batch) -> Tensor:
    """``(batch, token)``: where a token has a next one, one over how many of its prompt do; else 0."""
    follows = (batch.next_ids() >= 0).double()
    return follows / follows.sum(1, keepdim=True).clamp(min=1)

"""Whether a model sees later tokens: a decoder must not, and only a decoder has a next-token loss."""

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError
from resinspect.families.forward import call, evaluating

LONGEST = 16
"""Tokens of the probe."""
SMALLEST = 1e-4
"""A relative change of logits below this is rounding; in half precision, below a few units of its rounding."""
ROUNDINGS = 8.0


def require_weights(model: nn.Module) -> None:
    """Check that a model's parameters and buffers are there to be read.

    Raises:
        CaptureError: If some are on the meta device: offloaded, or never loaded.
    """
    missing = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if tensor.is_meta]
    if missing:
        raise CaptureError(
            f"{len(missing)} tensors of the model, such as {missing[0]!r}, are on the meta device: they are "
            "offloaded or were never loaded; load the whole model without offloading, in a narrower dtype if it does "
            "not fit."
        )


def is_causal(model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device) -> bool:
    """Whether logits of earlier tokens stay the same when only the last token changes.

    One forward over the start of the longest prompt and two copies with another last token; where these differ, one
    more of the start alone, which shows how much of that is rounding. A model that claims to be a decoder and is none
    gets a warning. True if it cannot be told: no logits, or no earlier token.
    """
    found = change_of_earlier(model, prompts, device)
    if found is None:
        return True
    changed, limit, tokens = found
    causal = not changed > limit
    if not causal and claims_to_decode(model):
        warnings.warn(
            f"{type(model).__name__} sees later tokens: changing only the last of {tokens} tokens changed the "
            f"logits of earlier ones by {changed:.1e}. The map shows what it computed, but it is no causal decoder, "
            "so no next-token loss is given; check its attention mask.",
            stacklevel=2,
        )
    return causal


def change_of_earlier(
    model: nn.Module, prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[float, float, int] | None:
    """How much logits of earlier tokens change with the last one, what of it may be rounding, and over how many tokens.

    None if it cannot be told: no logits, or no earlier token.
    """
    start = list(max(prompts, key=len)[:LONGEST])
    if len(start) < 2:
        return None
    others = [*dict.fromkeys(token for token in (*start, 0, 1, 2) if token != start[-1])][:2]
    ids = torch.tensor([start, *([*start[:-1], other] for other in others)], device=device)
    logits = _logits(model, ids)
    if logits is None or logits.shape[:2] != ids.shape:
        return None
    # Both changes must show it: a single one could be an expert chosen differently within rounding.
    changed = float(_changes(logits[1:], logits[0]).amin())
    limit = max(SMALLEST, ROUNDINGS * max(torch.finfo(value.dtype).eps for value in (logits, *_floats(model))))
    if changed > limit:
        # Some models blow up rounding itself: the same tokens in a batch of another size say how much.
        limit = max(limit, ROUNDINGS * float(_changes(_logits(model, ids[:1]), logits[0])))
    return changed, limit, len(start)


def _logits(model: nn.Module, ids: Tensor) -> Tensor | None:
    with evaluating(model):
        return logits_of(call(model, ids, use_cache=False, return_dict=True))


def _changes(rows: Tensor, first: Tensor) -> Tensor:
    """Largest relative change of logits ``(row, token, vocabulary)`` over all tokens but the last, ``(row,)``."""
    earlier = first[:-1].double()
    return ((rows[:, :-1].double() - earlier).norm(dim=-1) / earlier.norm(dim=-1)).amax(-1)


def logits_of(output: Any) -> Tensor | None:
    """The logits ``(batch, token, vocabulary)`` in a model's output, if it has any."""
    value = getattr(output, "logits", None)
    if value is None:
        value = output[0] if isinstance(output, tuple) and output else output
    return value if isinstance(value, Tensor) and value.ndim == 3 else None


def claims_to_decode(model: nn.Module) -> bool:
    """Models of transformers say so; any other with logits is taken to be one."""
    can_generate = getattr(model, "can_generate", None)
    return bool(can_generate()) if callable(can_generate) else True


def _floats(model: nn.Module) -> list[Tensor]:
    return list({p.dtype: p for p in model.parameters() if p.is_floating_point()}.values())

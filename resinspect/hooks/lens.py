"""What a model would predict from less: the logit lens of every reader, and what each source adds to the true token.

Both look at the **final readout restricted to the sources so far**: of the contributions ``c_s`` that make up the final
reader's input, ``sum_s c_s = h_final``, a reader that can read p sources has the first p. In a plain residual that is
what the reader itself reads. With several streams, or attention over depth, a sublayer's own input says what the
sublayer needs, not what the model would answer.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from resinspect.errors import CaptureError
from resinspect.hooks.gradients import GRADIENT
from resinspect.hooks.tail import Tail, is_matrix

TOP = 5
"""Tokens whose overlap is counted."""
NUMBERS_AT_ONCE = 1 << 22
LENS = (
    "the model's own norm and head on the final readout restricted to the sources so far, sum over s < prefix of "
    "W[final, s] v_s{frozen}; lens_kl is KL(final || lens), lens_overlap of the 5 likeliest tokens"
)
ATTRIBUTION = (
    "contribution of a source, through the final norm with its statistics frozen and the head, to the logit of the "
    "true next token above the mean logit{capped}; all of them and attribution_bias add up to that difference"
)
Contributions = Callable[[slice], Tensor]
"""Gives ``c_s (token, source, d)`` of the final reader for a part of the tokens."""


def look_through(
    tail: Tail, contributions: Contributions, prefix: list[int], logits: Tensor, targets: Tensor | None
) -> dict[str, Tensor]:
    """The lens at every reader.

    Args:
        tail: From the final reader's input to logits.
        contributions: Of the final reader.
        prefix: Per reader, how many sources it can read.
        logits: ``(token, vocabulary)`` of the model itself.
        targets: ``(token,)``, the next token, -1 where there is none; None for a model without a next-token loss.

    Returns:
        Per ``(token, reader)``: ``lens_kl``, ``lens_entropy``, ``lens_overlap`` and, with targets, ``lens_loss``.
    """
    depths = sorted(set(prefix))
    per_token = max(logits.shape[-1], contributions(slice(0, 1))[0].numel())
    parts = []
    for part in _parts(len(logits), per_token):
        so_far = contributions(part).cumsum(1)
        final = _wide(logits[part]).log_softmax(-1)
        likeliest, seen = final.topk(min(TOP, final.shape[-1])).indices, []
        for depth in depths:
            lens = _wide(tail(so_far[:, depth - 1])).log_softmax(-1)
            loss = {} if targets is None else {"lens_loss": _loss(lens, targets[part])}
            seen.append(_compare(lens, final, likeliest) | loss)
        parts.append({name: torch.stack([one[name] for one in seen], dim=1) for name in seen[0]})
    order = torch.tensor([depths.index(p) for p in prefix], device=logits.device)
    return {name: torch.cat([part[name] for part in parts])[:, order] for name in parts[0]}


def attribute(tail: Tail, contributions: Contributions, targets: Tensor) -> dict[str, Tensor]:
    """What each source adds to the logit of the true next token above the mean logit, before a soft cap.

    With the final norm's statistics frozen, logits are linear in the final reader's input.

    Args:
        tail: Whose head is a matrix, after a norm or nothing.
        contributions: Of the final reader.
        targets: ``(token,)``, the next token, -1 where there is none.

    Returns:
        ``attribution (token, source)`` and ``attribution_bias (token,)``: from the biases of norm and head. NaN where
        there is no next token.
    """
    matrix = _wide(tail.head.weight.detach()[: tail.vocabulary])
    bias = getattr(tail.head, "bias", None)
    bias = matrix.new_zeros(len(matrix)) if bias is None else bias.detach()[: tail.vocabulary].to(matrix.dtype)
    matrix, bias = matrix - matrix.mean(0), (bias - bias.mean()) * tail.finish.scale
    parts = []
    for part in _parts(len(targets), contributions(slice(0, 1))[0].numel()):
        terms = _wide(contributions(part))
        known = targets[part].clamp(min=0)
        along = matrix[known] * (tail.scale * tail.finish.scale)
        given = bias[known]
        if tail.norm is not None:
            read = terms.sum(1)
            rstd = tail.norm.rstd(read, tail.normed(read))
            given = given if tail.norm.bias is None else given + along @ tail.norm.bias.to(along)
            along = along if tail.norm.gain is None else along * tail.norm.gain.to(along)
            along = along - along.mean(-1, keepdim=True) if tail.norm.centre else along
            along = along * rstd[:, None].to(along)
        nothing = (targets[part] < 0)[:, None]
        found = {"attribution": torch.einsum("tsd,td->ts", terms, along), "attribution_bias": given[:, None]}
        parts.append({name: value.masked_fill(nothing, torch.nan) for name, value in found.items()})
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return joined | {"attribution_bias": joined["attribution_bias"][:, 0]}


def require_linear(tail: Tail) -> None:
    """Check that the logits are linear in the final reader's input, up to a norm and a cap.

    Raises:
        CaptureError: If they are not.
    """
    if (tail.steps and tail.norm is None) or not is_matrix(tail.head):
        names = " and ".join(type(module).__name__ for module in (*tail.steps, tail.head))
        raise CaptureError(
            f"the model's tail is {names}, which is not one norm and one matrix, so no source has a part of a logit of "
            "its own; capture it without attribution in keep."
        )


def definitions(keep: frozenset[str], tail: Tail | None, *, terms: bool) -> dict[str, str]:
    """Attributes of a trace that say what was looked at; ``terms`` for programs whose weights are no scalars."""
    capped = f", before the soft cap at {tail.finish.cap:g}" if tail and tail.finish.cap else ""
    frozen = " (pushed as vectors through the model's own natives, frozen)" if terms else ""
    found = {
        "lens": LENS.format(frozen=frozen),
        "attribution": ATTRIBUTION.format(capped=capped),
        "gradient": GRADIENT,
    }
    return {f"{name}_definition": text for name, text in found.items() if name in keep}


def _compare(lens: Tensor, final: Tensor, likeliest: Tensor) -> dict[str, Tensor]:
    """Two log-distributions ``(token, vocabulary)``, and the tokens that the second makes likeliest."""
    share = final.exp()
    mine = lens.topk(likeliest.shape[-1]).indices
    return {
        "lens_kl": torch.where(share > 0, share * (final - lens), 0.0).sum(-1).clamp(min=0),
        "lens_entropy": torch.special.entr(lens.exp()).sum(-1),
        "lens_overlap": (mine[:, :, None] == likeliest[:, None, :]).any(-1).to(lens.dtype).mean(-1),
    }


def _loss(lens: Tensor, targets: Tensor) -> Tensor:
    loss = -lens.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return loss.masked_fill(targets < 0, torch.nan)


def _parts(tokens: int, per_token: int) -> Iterator[slice]:
    step = max(1, NUMBERS_AT_ONCE // per_token)
    yield from (slice(start, start + step) for start in range(0, tokens, step))


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()

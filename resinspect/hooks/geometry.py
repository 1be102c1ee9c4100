"""Second-order geometry of captured vectors: what (W, G) needs and what only the vectors can say.

Everything works on chunks of tokens small enough to stay in cache, so that each vector is read from memory once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 20


def chunks(values: Tensor, *, copies: int = 1) -> Iterator[slice]:
    """Slices of the token dimension of ``(token, slot, d)``, of about ``CHUNK_BYTES`` in so many copies."""
    per_token = max(1, values[0].numel() * values.element_size() * copies)
    step = max(1, CHUNK_BYTES // per_token)
    yield from (slice(i, i + step) for i in range(0, len(values), step))


def measure_readers(
    writes: Tensor, norms: Tensor, inputs: Tensor, weight: Tensor, magnitude: Tensor
) -> dict[str, Tensor]:
    """Compare reader inputs with their reconstruction from the writes.

    Args:
        writes: ``(token, source, d)``; only sources some of the readers can read.
        norms: ``(token, source)``: their lengths.
        inputs: ``(token, reader, d)``, as the forward formed them.
        weight: ``(token, reader, source)``, zero where a source cannot be read.
        magnitude: Same shape: the sum of the absolute paths behind each weight, at least its absolute value.

    Returns:
        ``cross (token, reader, source)``, and per ``(token, reader)``: ``fidelity`` (relative L2 error of
        ``weight @ writes``), ``kappa = sum_s magnitude ||v_s|| / ||h_r||``, ``reader_norm``, ``reader_max``,
        ``reader_mean``.
    """
    parts = []
    for part in chunks(writes):
        v, h, w = _real(writes[part]), _real(inputs[part]), weight[part]
        norm = lengths(h)
        contribution = (magnitude[part].double() @ norms[part, :, None]).squeeze(-1)
        # In the model's own dtype (float64 would cost a twentieth of the forward): often the same bits, an error of 0.
        error = lengths(torch.baddbmm(h, w.to(h.dtype), v, beta=-1))
        parts.append(
            {
                **_describe(h, norm),
                "cross": h @ v.mT,
                "fidelity": _relative(error, norm),
                "kappa": _relative(contribution, norm),
            }
        )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def measure_terms(writes: Tensor, inputs: Tensor, terms: Tensor, paths: Tensor) -> dict[str, Tensor]:
    """Compare reader inputs with the contributions that a program of vectors makes of each write.

    Args:
        writes: ``(token, source, d)``.
        inputs: ``(token, reader, d)``, as the forward formed them.
        terms: ``(token, reader, source, d)``: what became of each write on its way to each reader.
        paths: ``(token, reader, d)``: the sum of the absolute paths to each reader.

    Returns:
        Per ``(token, reader, source)``: ``weight`` (the best scalar ``<c, v> / <v, v>``), ``discarded`` (the part of
        the contribution's norm that no scalar gives), ``contribution = <c, h>``, ``contribution_norm`` and ``cross``;
        and the measures of a reader as in ``measure_readers``.
    """
    v, h = _real(writes), _real(inputs)
    norm, written = lengths(h), lengths(v)[:, None]
    along = torch.einsum("trsd,tsd->trs", terms, v).double()
    weight = torch.where(written > 0, along / written.square(), 0.0)
    size = lengths(terms)
    rest = lengths(terms - weight[..., None].to(terms.dtype) * v[:, None])
    return {
        **_describe(h, norm),
        "weight": weight.to(h.dtype),
        "discarded": torch.where(size > 0, rest / size, 0.0).to(h.dtype),
        "contribution": torch.einsum("trsd,trd->trs", terms, h),
        "contribution_norm": size.to(h.dtype),
        "cross": h @ v.mT,
        "fidelity": _relative(lengths(terms.sum(2) - h), norm),
        "kappa": _relative(lengths(paths), norm),
    }


def _describe(h: Tensor, norm: Tensor) -> dict[str, Tensor]:
    return {"reader_norm": norm.to(h.dtype), "reader_max": h.abs().amax(-1), "reader_mean": h.mean(-1)}


def measure_pairs(writes: Tensor, inputs: Tensor) -> dict[str, Tensor]:
    """What (W, G) does not give where W is not one known scalar: inner products of the reader inputs themselves.

    Args:
        writes: ``(token, source, d)``.
        inputs: ``(token, reader, d)``, all readers.

    Returns:
        ``reader_gram (token, reader, reader)`` and ``write_cross (token, source, reader)``, later writes included.
    """
    v, h = _real(writes), _real(inputs)
    return {"reader_gram": h @ h.mT, "write_cross": v @ h.mT}


def measure_writes(writes: Tensor, *, gram: bool) -> dict[str, Tensor]:
    """``source_max (token, source)``, and ``gram (token, source, source)`` if asked for."""
    parts = []
    for part in chunks(writes):
        v = _real(writes[part])
        measured = {
            "source_max": v.abs().amax(-1),
        }
        parts.append(measured | ({"gram": v @ v.mT} if gram else {}))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of ``logits (token, vocab)`` against ``targets (token)``, in chunks."""
    parts = [
        torch.nn.functional.cross_entropy(_real(logits[part]), targets[part], reduction="none")
        for part in chunks(logits[:, None, :])
    ]
    return torch.cat(parts)


def lengths(values: Tensor) -> Tensor:
    """L2 norms over the last dimension, in float64, where squares neither overflow nor vanish."""
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)


def _relative(value: Tensor, norm: Tensor) -> Tensor:
    """``value / norm``, infinite where either is not finite.

    0 / 0 is 0: an input of exactly zero that is reconstructed as zero has no error.
    """
    ratio = torch.where((value == 0) & (norm == 0), 0.0, value / norm)
    return ratio.masked_fill(~(value.isfinite() & norm.isfinite()), torch.inf)


def _real(values: Tensor) -> Tensor:
    """Half precision is measured in float32."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()

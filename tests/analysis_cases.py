"""Small traces with known writes and weights, for closed-form tests of measures."""

import numpy as np

import resinspect as ri
from resinspect.anatomy import decoder_anatomy


def trace_of(writes, weight=None, *, samples=None, hidden=False, natives=None, loss=None, token_ids=None):
    """A trace of a decoder whose readers get exactly ``weight @ writes``.

    Args:
        writes: ``(token, source, d)``; 2 L + 1 sources for L layers.
        weight: ``(token, reader, source)`` or one for all tokens; default the plain residual.
        samples: Document of each token, default one for all.
        hidden: Whether to keep the vectors.
        natives: name -> (dims, array).
        loss: ``(token,)``.
        token_ids: ``(token,)``, default counting up.
    """
    writes = np.asarray(writes, dtype=np.float64)
    tokens, sources, _ = writes.shape
    anatomy = decoder_anatomy((sources - 1) // 2)
    prefix = np.array([reader.prefix for reader in anatomy.readers])
    reach = np.arange(sources) < prefix[:, None]
    weight = np.broadcast_to(1.0 if weight is None else weight, (tokens, len(prefix), sources)) * reach
    read = weight @ writes
    samples = np.zeros(tokens, dtype=int) if samples is None else np.asarray(samples)
    starts = np.r_[True, samples[1:] != samples[:-1]]
    position = np.arange(tokens) - np.maximum.accumulate(np.where(starts, np.arange(tokens), 0))
    token_ids = np.arange(tokens) if token_ids is None else token_ids
    norm = np.linalg.norm(read, axis=-1)
    variables = {
        "weight": np.where(reach, weight, np.nan),
        "gram": writes @ writes.swapaxes(1, 2),
        "cross": np.where(reach, read @ writes.swapaxes(1, 2), np.nan),
        "source_norm": np.linalg.norm(writes, axis=-1),
        "reader_norm": norm,
        "fidelity": np.zeros_like(norm),
        "kappa": np.ones_like(norm),
        "reader_max": np.abs(read).max(-1),
        "reader_mean": read.mean(-1),
        "source_max": np.abs(writes).max(-1),
    }
    variables |= {"reader_hidden": read, "source_hidden": writes} if hidden else {}
    variables |= natives or {}
    variables |= {} if loss is None else {"loss": loss}
    return ri.build_trace(
        variables,
        readers=anatomy.readers,
        sources=anatomy.sources,
        tokens={
            "sample": samples,
            "position": position,
            "token_id": token_ids,
            "text": [f"t{i}" for i in token_ids],
        },
        coords={"site": [site.name for site in anatomy.sites]} if natives else None,
        attrs={
            "model": "made up",
            "family": "reference",
            "scheme": "pre_ln",
            "method": "replay",
            "dtype": "float64",
            "write_definition": "given",
            "source_definition": "given",
            "versions": {},
            "hash": "0",
            "tolerance": 4.0,
            "hidden_size": writes.shape[-1],
        },
    )


def orthonormal(tokens, sources, width=None, seed=0):
    """Writes of length 1, at right angles within each token."""
    generator = np.random.default_rng(seed)
    width = sources if width is None else width
    return np.linalg.qr(generator.standard_normal((tokens, width, sources)))[0].swapaxes(1, 2)

"""Small traces for the tests of the trace convention and its store."""

import numpy as np

from resinspect import trace as rt
from resinspect.anatomy import decoder_anatomy
from resinspect.trace import manifest

ATTRS = {
    "model": "tiny",
    "scheme": "pre_ln",
    "method": "replay",
    "dtype": "float32",
    "write_definition": "sublayer output",
    "source_definition": "embedding and writes",
    "versions": {"torch": "2.6"},
    "hash": "0" * 64,
    "tolerance": 4.0,
}


def arrays(lengths=(3, 4), layers=2, seed=0, hidden=8):
    rng = np.random.default_rng(seed)
    anatomy = decoder_anatomy(layers)
    count, total = len(anatomy.sources), sum(lengths)
    prefix = np.array([reader.prefix for reader in anatomy.readers])
    weight = rng.normal(size=(total, count, count)).astype(np.float32)
    weight[:, np.arange(count) >= prefix[:, None]] = np.nan
    writes = rng.normal(size=(total, count, hidden)).astype(np.float32)
    loss = rng.random(total)
    loss[np.cumsum(lengths) - 1] = np.nan
    return {
        "weight": weight,
        "gram": writes @ writes.swapaxes(1, 2),
        "cross": weight.copy(),
        "source_norm": np.linalg.norm(writes, axis=-1),
        "reader_norm": rng.random((total, count)).astype(np.float32),
        "fidelity": np.full((total, count), 1e-8),
        "kappa": np.ones((total, count)),
        "loss": loss,
        "native_score": (("token", "site"), rng.random((total, 3)).astype(np.float16)),
        "native_index": (("token",), np.arange(total)),
    }


def make(lengths=(3, 4), layers=2, seed=0, text=None, attrs=None, **changes):
    anatomy, total = decoder_anatomy(layers), sum(lengths)
    return rt.build_trace(
        {**arrays(lengths, layers, seed), **changes},
        readers=anatomy.readers,
        sources=anatomy.sources,
        tokens={
            "sample": np.repeat(np.arange(len(lengths)), lengths),
            "position": np.concatenate([np.arange(n) for n in lengths]),
            "token_id": np.arange(total),
            "text": text or [f" w{i}" for i in range(total)],
        },
        coords={"site": ["a", "bé", "c"]},
        attrs={**ATTRS, **(attrs or {})},
    )


def recast(trace, name, dtype):
    """A trace with one variable in another dtype."""
    return trace.assign({name: trace[name].astype(dtype)})


def tree(path):
    """Every file below a folder, with its bytes."""
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def only_named_shards(path):
    """Whether nothing was left behind in the folder of a trace."""
    return {p.name for p in path.iterdir()} == {"manifest.json", ".lock", *manifest.read_manifest(path).shards}

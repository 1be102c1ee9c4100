"""What measures need of a trace, as float64 arrays: weights, contributions and inner products.

Where W is one scalar per source, every second-order quantity follows from (W, G). Elsewhere (weights per channel, norms
on the carry, a solve) the trace carries what the vectors themselves gave.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from resinspect.errors import TraceError

STREAMED = 'capture a model of several streams by method="replay" with keep=("natives", ...)'
REMEDY = {
    "gram": 'capture it with keep=("gram", ...)',
    "cross": 'capture it with keep=("cross", ...)',
    "loss": "capture a causal language model, whose head gives logits",
    "reader_hidden": 'capture it with keep=("hidden", ...)',
    "source_hidden": 'capture it with keep=("hidden", ...)',
    "logits": 'capture it with keep=("logits", ...)',
    "native_pre": STREAMED,
    "native_post": STREAMED,
    "native_mix": STREAMED,
    "lens_kl": 'capture it with keep=("lens", ...)',
    "lens_entropy": 'capture it with keep=("lens", ...)',
    "lens_overlap": 'capture it with keep=("lens", ...)',
    "lens_loss": 'capture a causal language model with keep=("lens", ...)',
    "attribution": 'capture it with keep=("attribution", ...)',
    "reader_gradient": 'capture it with keep=("gradient", ...)',
    "source_gradient": 'capture it with keep=("gradient", ...)',
}


def require(trace: xr.Dataset, *names: str) -> list[np.ndarray]:
    """Variables of a trace as float64.

    Raises:
        TraceError: If one is missing; the message says how to get it.
    """
    for name in names:
        if name not in trace:
            remedy = REMEDY.get(name, f"capture it again with {name} kept")
            raise TraceError(f"this measure needs the variable {name!r}, which the trace does not hold; {remedy}.")
    return [trace[name].values.astype(np.float64) for name in names]


def reach(trace: xr.Dataset) -> np.ndarray:
    """Which sources each reader can read: bool ``(reader, source)``."""
    return np.arange(trace.sizes["source"]) < trace.coords["reader_prefix"].values[:, None]


def weights(trace: xr.Dataset) -> np.ndarray:
    """W ``(token, reader, source)``: 0 where a source cannot be read, NaN where its weight is not identifiable."""
    (weight,) = require(trace, "weight")
    return np.where(reach(trace), weight, 0.0)


def contributions(trace: xr.Dataset) -> np.ndarray:
    """``<c_rs, h_r>`` ``(token, reader, source)``, c the contribution of a source; sums over sources to ``|h_r|^2``."""
    if "contribution" in trace:
        return np.where(reach(trace), require(trace, "contribution")[0], 0.0)
    (cross,) = require(trace, "cross")
    return weights(trace) * np.where(reach(trace), cross, 0.0)


def contribution_norms(trace: xr.Dataset) -> np.ndarray:
    """``|c_rs|`` ``(token, reader, source)``."""
    if "contribution_norm" in trace:
        return np.where(reach(trace), require(trace, "contribution_norm")[0], 0.0)
    (norm,) = require(trace, "source_norm")
    return np.abs(weights(trace)) * norm[:, None, :]


def write_products(trace: xr.Dataset) -> np.ndarray:
    """``<v_s, h_r>`` ``(token, source, reader)`` for every pair, also where the write comes after the reader.

    Raises:
        TraceError: If a variable is missing, or what readers get is not all there.
    """
    if "write_cross" in trace:
        return require(trace, "write_cross")[0]
    _require_whole(trace)
    (gram,) = require(trace, "gram")
    return gram @ weights(trace).swapaxes(1, 2)


def reader_products(trace: xr.Dataset) -> np.ndarray:
    """``<h_r, h_r'>`` ``(token, reader, reader)``.

    Raises:
        TraceError: If a variable is missing, or what readers get is not all there.
    """
    if "reader_gram" in trace:
        return require(trace, "reader_gram")[0]
    _require_whole(trace)
    (gram,) = require(trace, "gram")
    weight = weights(trace)
    return weight @ gram @ weight.swapaxes(1, 2)


def _require_whole(trace: xr.Dataset) -> None:
    """What a reader gets can be added up only from all of its sources."""
    terms = trace.coords.get("reader_terms", trace.coords["reader_prefix"]).values
    if cut := trace.coords["reader"].values[terms > trace.coords["reader_prefix"].values].tolist():
        raise TraceError(
            f"this measure needs all sources of its readers, but some of those of {cut[0]!r} were left out; select "
            "sources after measuring."
        )


def own_writes(trace: xr.Dataset) -> list[tuple[int, int]]:
    """Pairs ``(reader, source)`` of sublayers' inputs and writes, matched by name: ``3.attn.q`` goes with ``3.attn``.

    Two sublayers that read one shared input, ``3.attn+mlp``, give two pairs.
    """
    sources = {name: i for i, name in enumerate(trace.coords["source"].values.tolist())}
    pairs = []
    for reader, name in enumerate(trace.coords["reader"].values.tolist()):
        pairs += [(reader, sources[write]) for write in _writes_of(name) if write in sources]
    return pairs


def _writes_of(reader: str) -> list[str]:
    place, dot, kinds = reader.rpartition(".")
    return list(dict.fromkeys([reader, *(f"{place}{dot}{kind}" for kind in kinds.split("+")), place]))


def labelled(
    trace: xr.Dataset | xr.DataArray, values: np.ndarray, dims: tuple[str, ...], name: str, attrs: Mapping[str, Any]
) -> xr.DataArray:
    """A measure with the trace's coordinates on its dimensions; ``attrs`` has at least ``long_name`` and ``units``."""
    coords = {key: coord for key, coord in trace.coords.items() if set(coord.dims) <= set(dims)}
    return xr.DataArray(values, coords, dims, name, dict(attrs))

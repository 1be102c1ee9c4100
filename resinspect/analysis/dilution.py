"""Dilution: how much of what a reader gets comes from each write, and how much each write adds."""

from typing import Literal

import numpy as np
import xarray as xr

from resinspect.analysis.inputs import (
    contribution_norms,
    contributions,
    labelled,
    own_writes,
    reach,
    require,
    write_products,
)
from resinspect.errors import OptionError

READ = ("token", "reader", "source")


def contribution_share(trace: xr.Dataset) -> xr.DataArray:
    """Signed share of each source in what a reader gets: ``<c_rs, h_r> / |h_r|^2``.

    Args:
        trace: With ``cross``, or with ``contribution`` where W is no scalar.

    Returns:
        ``(token, reader, source)``, no unit; sums to 1 over sources, may be negative or above 1. NaN beyond a reader's
        sources and where its input is zero. Null value ``1 / n`` for n equal orthogonal writes read alike.
        Source: own definition, the projection of a part on the whole.

    Raises:
        TraceError: If a variable is missing.
    """
    inner = contributions(trace)
    (norm,) = require(trace, "reader_norm")
    share = _over(inner, norm[:, :, None] ** 2)
    attrs = {"long_name": "contribution share", "units": "1", "formula": "<c_rs, h_r> / |h_r|^2"}
    return labelled(trace, np.where(reach(trace), share, np.nan), READ, "contribution_share", attrs)


def magnitude_share(trace: xr.Dataset) -> xr.DataArray:
    """Share of each source by length: ``|c_rs| / sum_s' |c_rs'|``, whatever the contributions' directions.

    Args:
        trace: Any.

    Returns:
        ``(token, reader, source)``, no unit, 0 to 1, sums to 1 over sources. NaN beyond a reader's sources and where
        all contributions are zero. Null value ``1 / n``.
        Source: own definition.
    """
    size = contribution_norms(trace)
    share = _over(size, size.sum(-1, keepdims=True))
    attrs = {"long_name": "magnitude share", "units": "1", "formula": "|c_rs| / sum |c_rs'|"}
    return labelled(trace, np.where(reach(trace), share, np.nan), READ, "magnitude_share", attrs)


def effective_sources(
    trace: xr.Dataset, *, definition: Literal["participation", "entropy"] = "participation"
) -> xr.DataArray:
    """How many sources a reader effectively reads, from magnitude shares m.

    Args:
        trace: Any.
        definition: ``"participation"`` is ``1 / sum m^2``, ``"entropy"`` is ``exp(-sum m log m)``.

    Returns:
        ``(token, reader)``, in sources: 1 if one source is all, n for n equal ones (the null value). NaN where nothing
        is read.
        Source: inverse participation ratio, and exponential of the entropy (Hill 1973).

    Raises:
        OptionError: If there is no such definition.
    """
    share = magnitude_share(trace).values
    if definition == "participation":
        number = _over(np.ones(()), np.where(reach(trace), share**2, 0.0).sum(-1))
        formula = "1 / sum m^2"
    elif definition == "entropy":
        logs = np.log(share, out=np.zeros_like(share), where=share > 0)
        number = np.exp(-np.where(reach(trace), share * logs, 0.0).sum(-1))
        number = np.where(reach(trace).any(-1), number, np.nan)
        formula = "exp(-sum m log m)"
    else:
        raise OptionError(f"definition is {definition!r}; choose participation or entropy.")
    attrs = {"long_name": "effective number of sources", "units": "sources", "formula": formula}
    return labelled(trace, number, READ[:2], "effective_sources", attrs)


def dilution_index(trace: xr.Dataset) -> xr.DataArray:
    """How evenly readers spread over the sources they have: ``(N_eff - 1) / (n - 1)``, averaged over readers.

    Args:
        trace: Any.

    Returns:
        ``(token,)``, no unit, 0 (every reader has one source) to 1, the null value: what equal writes read alike give.
        Readers with a single source are left out.
        Source: own definition.
    """
    number = effective_sources(trace).values
    available = reach(trace).sum(-1)
    spread = _over(number - 1, np.maximum(available - 1, 0)[None])
    known = ~np.isnan(spread)
    index = _over(np.where(known, spread, 0.0).sum(-1), known.sum(-1))
    attrs = {"long_name": "dilution index", "units": "1", "formula": "mean_r (N_eff - 1) / (n_r - 1)", "null": 1.0}
    return labelled(trace, index, ("token",), "dilution_index", attrs)


def update_ratio(trace: xr.Dataset, *, of: Literal["sublayer", "layer"] = "sublayer") -> xr.DataArray:
    """Length of a sublayer's write over that of what it read: ``|v_s| / |h_r|`` (Csordas et al. 2025, section 3).

    Of a whole layer it is the length of the sum of its writes over that of what its first reader got.

    ``|h_r|`` is the length of the input itself, before the sublayer's own norm. Only in a plain residual is that also
    what the write is added to. Where inputs are scaled, their length says little, as the sublayer's norm takes it out:
    depth attention reads a convex mix of writes, never longer than the longest of them; hyper-connections read a
    weighted sum of streams (``pre``), add to each stream with ``post``, and a common factor of ``pre`` changes the
    ratio and nothing else (short of the norm's eps). There the ratio compares what went in with what came out, and is
    not to be compared with that of another scheme.

    Args:
        trace: Any; for layers with ``gram``.
        of: Sublayers, or layers.

    Returns:
        ``(token, reader)`` over the readers that have a write of their own, or over the first readers of layers; no
        unit, non-negative. Large: the sublayer changes the residual much; NaN where its input is zero.
        Null value ``1 / sqrt(n)`` for n equal orthogonal writes read with weight 1, ``sqrt(w / n)`` for a layer of w
        writes.

    Raises:
        TraceError: If ``gram`` is needed and missing.
        OptionError: If ``of`` is neither.
    """
    if of not in ("sublayer", "layer"):
        raise OptionError(f"of is {of!r}; choose sublayer or layer.")
    norm, written = require(trace, "reader_norm", "source_norm")
    if of == "layer":
        readers, members = _layers(trace)
        (gram,) = require(trace, "gram")
        size = np.sqrt(np.maximum(np.einsum("ls,tsz,lz->tl", members, gram, members, optimize=True), 0))
        formula = "|sum_s v_s| / |h_r|"
    else:
        readers, sources = _own(trace)
        size, formula = written[:, sources], "|v_s| / |h_r|"
    attrs = {"long_name": "update ratio", "units": "1", "formula": formula}
    ratio = _over(size, norm[:, readers])
    return labelled(trace.isel(reader=readers), ratio, READ[:2], "update_ratio", attrs)


def write_alignment(trace: xr.Dataset) -> xr.DataArray:
    """Cosine of a sublayer's write and its input: below 0 it erases, above 0 it amplifies, 0 is new.

    Args:
        trace: With ``gram``, or ``write_cross`` where W is no scalar.

    Returns:
        ``(token, reader)`` over the readers that have a write of their own, -1 to 1 (Csordas et al. 2025, section 3).
        Null value 0: a write at right angles to what is there.
    """
    readers, sources = _own(trace)
    norm, written = require(trace, "reader_norm", "source_norm")
    inner = write_products(trace)[:, sources, readers]
    attrs = {"long_name": "cosine of write and input", "units": "1", "formula": "<v_s, h_r> / (|v_s| |h_r|)"}
    cosine = _over(inner, written[:, sources] * norm[:, readers])
    return labelled(trace.isel(reader=readers), cosine, READ[:2], "write_alignment", attrs)


def _own(trace: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    pairs = own_writes(trace)
    return np.array([r for r, _ in pairs], dtype=int), np.array([s for _, s in pairs], dtype=int)


def _layers(trace: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The first reader of each layer that writes, and which sources are its own, ``(layer, source)``."""
    # The place before the dot tells passes of a looped layer apart: 3@1.attn.
    place = {name: name.partition(".")[0] for dim in ("reader", "source") for name in trace.coords[dim].values.tolist()}
    readers, sources = (trace.coords[dim].values.tolist() for dim in ("reader", "source"))
    inside = trace.coords["source_layer"].values >= 0
    first = {place[name]: i for i, name in reversed([*enumerate(readers)])}
    owners = [place[name] if own else None for name, own in zip(sources, inside, strict=True)]
    layers = [layer for layer in dict.fromkeys(owners) if layer in first]
    members = [[owner == layer for owner in owners] for layer in layers]
    return np.array([first[layer] for layer in layers], dtype=int), np.array(members, dtype=float)


def _over(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    top, bottom = np.broadcast_arrays(top, bottom)
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)

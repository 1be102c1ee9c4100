"""What a model would predict at each depth, what each source adds to its prediction, and how the loss depends on both.

These need the model itself, so a capture brings them: ``keep=("lens", "attribution", "gradient")``.
"""

from typing import Literal

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.inputs import labelled, require
from resinspect.analysis.resampling import bootstrap, percentiles
from resinspect.analysis.summary import LEVEL, RESAMPLES, by_document, summarise
from resinspect.errors import OptionError

Quantity = Literal["kl", "entropy", "overlap", "loss"]
QUANTITIES = {
    "kl": ("KL(final || lens)", "nats", "sum_y p(y) log(p(y) / q(y)), p final, q lens"),
    "entropy": ("entropy of the lens", "nats", "-sum_y q(y) log q(y)"),
    "overlap": ("overlap with the final prediction", "1", "|top5(q) and top5(p)| / 5"),
    "loss": ("loss of the lens", "nats", "-log q(next token)"),
}
FINAL = {
    "kl": "0 at the final reader, whose lens is the model's own prediction",
    "overlap": "1 at the final reader, whose lens is the model's own prediction",
}


def logit_lens(trace: xr.Dataset, *, quantity: Quantity = "kl") -> xr.DataArray:
    """The logit lens at every reader (nostalgebraist 2020; the KL of Csordas et al. 2025 has its sides swapped).

    The lens q is the model's own norm and head on the final readout restricted to the sources so far, as the attribute
    ``definition`` says; in a plain residual that is the reader's own input. p is the model's prediction.

    Args:
        trace: Captured with ``keep=("lens", ...)``.
        quantity: ``"kl"`` is ``KL(p || q)``, ``"entropy"`` that of q, ``"overlap"`` the share of the 5 likeliest tokens
            that p and q have in common, ``"loss"`` that of q in predicting the next token.

    Returns:
        ``(token, reader)``: nats from 0 up; overlap 0 to 1. Null values: entropy ``log V`` and overlap ``5 / V`` for a
        lens that knows nothing.

    Raises:
        TraceError: If the trace has no lens.
        OptionError: If there is no such quantity.
    """
    if quantity not in QUANTITIES:
        raise OptionError(f"quantity is {quantity!r}; choose one of {', '.join(QUANTITIES)}.")
    (values,) = require(trace, f"lens_{quantity}")
    long_name, units, formula = QUANTITIES[quantity]
    attrs = {
        "long_name": long_name,
        "units": units,
        "formula": formula,
        "definition": trace.attrs.get("lens_definition", ""),
        "guaranteed": FINAL.get(quantity, ""),
    }
    return labelled(trace, values, ("token", "reader"), f"lens_{quantity}", attrs)


def lens_profile(
    trace: xr.Dataset, *, drop_first: int = 0, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> pd.DataFrame:
    """The lens by depth: every quantity at every reader, averaged over tokens.

    Args:
        trace: Captured with ``keep=("lens", ...)``.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples over documents.
        level: Of the interval.
        seed: Of the resampling.

    Returns:
        One row per quantity and reader: ``quantity``, ``reader``, ``sources`` (how many the reader can read), ``mean``,
        ``median``, ``low``, ``high``, ``units``, ``tokens``, ``documents``, ``guaranteed`` (what holds by definition
        and is no finding). No loss where the model has none.
        Null value at the final reader: KL 0, overlap 1. Source: the logit lens (nostalgebraist 2020).
    """
    tables = []
    prefix = dict(zip(trace.coords["reader"].values, trace.coords["reader_prefix"].values, strict=True))
    for quantity in QUANTITIES:
        if quantity == "loss" and "lens_loss" not in trace:
            continue
        values = logit_lens(trace, quantity=quantity)
        table = summarise(values, drop_first=drop_first, resamples=resamples, level=level, seed=seed)
        last = trace.coords["reader_kind"].values == "final"
        table.insert(0, "quantity", quantity)
        table.insert(2, "sources", [int(prefix[name]) for name in table["reader"]])
        table["units"] = values.attrs["units"]
        table["guaranteed"] = np.where(last, values.attrs["guaranteed"], "")
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def direct_logit_attribution(trace: xr.Dataset) -> xr.DataArray:
    """What each source adds directly to the logit of the true next token above the mean logit.

    ``rstd <c_s, gain * (u_y - mean_v u_v)>``, with the final norm's statistics frozen, c_s the source's contribution to
    the final reader and u the head's rows (Elhage et al. 2021). What a source does through later sublayers is theirs.

    Args:
        trace: Captured with ``keep=("attribution", ...)``.

    Returns:
        ``(token, source)`` in nats, any sign, null value 0. Over sources and with ``attribution_bias`` it sums to the
        next token's logit above the mean logit, before a soft cap if the model has one. NaN at last tokens.

    Raises:
        TraceError: If the trace has no attribution.
    """
    (values,) = require(trace, "attribution")
    attrs = {
        "long_name": "direct logit attribution",
        "units": "nats",
        "formula": "rstd <c_s, gain * (u_y - mean u)>",
        "definition": trace.attrs.get("attribution_definition", ""),
        "null": 0.0,
    }
    return labelled(trace, values, ("token", "source"), "direct_logit_attribution", attrs)


def gradient_norms(
    trace: xr.Dataset, *, drop_first: int = 0, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> pd.DataFrame:
    """Gradient magnitudes ``|dL/dh_r|`` of readers and ``|dL/dv_s|`` of sources, averaged over tokens.

    L is the mean next-token loss of a token's own prompt, so norms fall with the prompt's length; ``relative`` does not
    (AttnRes, arXiv 2603.15031, figure 5, shows both). A reader's gradient is through what it alone reads, a source's
    through all that its write reaches. In a plain residual writes lie on the path of all earlier ones.

    Args:
        trace: Captured with ``keep=("gradient", ...)``.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples over documents.
        level: Of the intervals.
        seed: Of the resampling.

    Returns:
        One row per reader and source: ``of`` (``"reader"`` or ``"source"``), ``name``, ``kind``, ``layer``, ``mean``,
        ``median``, ``low``, ``high`` in nats per activation, ``relative`` (mean over that of the first reader or source
        with a gradient; 1 there by definition) with ``relative_low``, ``relative_high``, ``tokens``, ``documents``.
        Null value of ``relative``: 1.

    Raises:
        TraceError: If the trace has no gradients.
    """
    tables = []
    for of in ("reader", "source"):
        (values,) = require(trace, f"{of}_gradient")
        measure = labelled(trace, values, ("token", of), f"{of}_gradient", {"units": "nats/activation"})
        table = summarise(measure, drop_first=drop_first, resamples=resamples, level=level, seed=seed)
        kept = trace.coords["position"].values >= drop_first
        sums, counts = by_document(values[kept], trace.coords["sample"].values[kept])
        sums, counts = sums[counts.any(1)], counts[counts.any(1)]  # a document of one token has no gradient
        relative = _relative_to_first(bootstrap(len(sums), resamples, seed), sums, counts)
        low, high = percentiles(relative, len(sums), level)
        table = table.rename(columns={of: "name"}).assign(relative=relative[0], relative_low=low, relative_high=high)
        table.insert(0, "of", of)
        for i, label in enumerate(("kind", "layer")):
            table.insert(2 + i, label, trace.coords[f"{of}_{label}"].values)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _relative_to_first(picks: np.ndarray, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Means over that of the first column that has one, for each resample: ``(resample, entry)``."""
    top, bottom = picks @ sums, picks @ counts
    means = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)
    known = np.flatnonzero(counts.sum(0) > 0)
    if not known.size:
        return means
    first = means[:, known[0], None]
    return np.divide(means, first, out=np.full(means.shape, np.nan), where=first != 0)

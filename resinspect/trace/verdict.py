"""Whether a map can be trusted: reconstruction error against what rounding alone would leave."""

from typing import TypedDict

import numpy as np
import xarray as xr

from resinspect.trace.schema import EPS

CEILING = 0.02
"""An error of more than this is never called exact, whatever rounding could explain."""
_NAMES_SHOWN = 3


class FidelitySummary(TypedDict):
    """How well a trace reconstructs what the model read.

    Keys:
        worst: largest fidelity over tokens and readers (relative L2 error), NaN where none is known.
        median: median fidelity over tokens and readers, NaN where none is known.
        verdict: "exact", "off" or "unknown" for the whole trace.
        off: names of the readers that are off.
    """

    worst: float
    median: float
    verdict: str
    off: list[str]


def verdict(trace: xr.Dataset) -> xr.DataArray:
    """Judge each reader: does the map reconstruct what it read, up to rounding?

    Rounding explains a token's fidelity if it is at most

        c * eps * kappa * sqrt(S)

    with c the attribute `tolerance`, eps the spacing of the model's compute dtype, kappa the conditioning and S
    the number of sources the reader can read. A reader is

    - "off" if rounding does not explain some token, or its fidelity or kappa is not finite;
    - "unknown" if rounding explains all, but some error is above 2 %, where it could hide a wrong map (half precision,
      or writes that cancel almost completely), or if the fidelity of all tokens is NaN: nothing is identifiable there;
    - "exact" otherwise. Single tokens whose fidelity is NaN are left out.

    Args:
        trace: a trace.

    Returns:
        "exact", "off" or "unknown", dims (reader,).
    """
    count = trace.coords["reader_terms" if "reader_terms" in trace.coords else "reader_prefix"]
    terms = np.maximum(count.values, 1)
    fidelity, kappa = trace["fidelity"].values.astype(np.float64), trace["kappa"].values.astype(np.float64)
    bound = trace.attrs["tolerance"] * EPS[trace.attrs["dtype"]] * kappa * np.sqrt(terms)
    known = ~np.isnan(fidelity)
    explained = np.isfinite(fidelity) & np.isfinite(bound) & (fidelity <= bound)
    off = (known & ~explained).any(axis=0)
    unknown = (known & (fidelity > CEILING)).any(axis=0) | ~known.any(axis=0)
    words = np.select([off, unknown], ["off", "unknown"], "exact")
    return xr.DataArray(
        words.astype("<U7"),
        {"reader": trace.coords["reader"]},
        ("reader",),
        "verdict",
        {"long_name": "verdict"},
    )


def fidelity_summary(trace: xr.Dataset) -> FidelitySummary:
    """Sum up the fidelity of a trace.

    The trace is "exact" if all its readers are, "off" if any reader is off, and "unknown" otherwise.

    Args:
        trace: a trace.

    Returns:
        Worst and median fidelity (relative L2 error), the overall verdict and the readers that are off.
    """
    words = verdict(trace)
    values = trace["fidelity"].values.astype(np.float64)
    values = values[~np.isnan(values)]
    off = words["reader"].values[words.values == "off"].tolist()
    exact = words.size > 0 and bool((words.values == "exact").all())
    return {
        "worst": float(values.max()) if values.size else float("nan"),
        "median": float(np.median(values)) if values.size else float("nan"),
        "verdict": "off" if off else "exact" if exact else "unknown",
        "off": [str(name) for name in off],
    }


def discarded_share(trace: xr.Dataset) -> tuple[float, float] | None:
    """How much of what readers get the scalar map leaves out, where weights are no scalars.

    For one token and reader: the length of all that the best scalars miss of the contributions, relative to the length
    of the contributions, each taken as the root of the sum of squares over sources.

    Args:
        trace: a trace.

    Returns:
        Median and largest share over tokens and readers, 0 to 1; None where W is one scalar per source.
    """
    if "discarded" not in trace:
        return None
    size = np.nan_to_num(trace["contribution_norm"].values.astype(np.float64))
    lost = np.linalg.norm(size * np.nan_to_num(trace["discarded"].values), axis=-1)
    whole = np.linalg.norm(size, axis=-1)
    share = np.divide(lost, whole, out=np.zeros_like(whole), where=whole > 0)
    return float(np.median(share)), float(share.max(initial=0.0))


def describe(trace: xr.Dataset) -> str:
    """Say in one line what a trace holds and whether it can be trusted.

    Args:
        trace: a trace.

    Returns:
        Such as "tokens 24 · readers 17 · sources 17 · method replay · fidelity worst 3.1e-07, median 8.0e-08 ·
        exact"; readers that are off are named, the first few of them.
    """
    summary = fidelity_summary(trace)
    sizes = " · ".join(f"{dim}s {trace.sizes[dim]}" for dim in ("token", "reader", "source"))
    fidelity = f"fidelity worst {summary['worst']:.1e}, median {summary['median']:.1e}"
    word = summary["verdict"]
    if summary["off"]:
        more = len(summary["off"]) - _NAMES_SHOWN
        word += f" ({', '.join(summary['off'][:_NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''})"
    if share := discarded_share(trace):
        word += f" with vectors; as the scalars shown, {share[0]:.1%} is lost (median, at most {share[1]:.1%})"
    return f"{sizes} · method {trace.attrs['method']} · {fidelity} · {word}"

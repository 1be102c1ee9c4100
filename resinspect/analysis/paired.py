"""Two models on the same documents: the difference of a measure, token by token or document by document."""

import numpy as np
import pandas as pd
import xarray as xr

from resinspect.analysis.summary import LEVEL, RESAMPLES, summarise
from resinspect.errors import OptionError, TraceError

TOKEN = ("sample", "position", "token_id")


def paired_difference(
    first: xr.DataArray,
    second: xr.DataArray,
    *,
    drop_first: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> pd.DataFrame:
    """Mean of ``first - second`` of one measure on two traces of the same tokens, with an interval over documents.

    What makes a document easy or hard for both cancels, so the interval is narrower than that of either mean. It says
    how the difference varies over documents, nothing of other seeds of training.

    Args:
        first: A measure of one trace, or a variable such as ``trace["loss"]``, with dimension ``token``; or one value
            for each document, with dimension ``sample``.
        second: The same of the other trace.
        drop_first: Leading tokens of every document to leave out.
        resamples: Bootstrap resamples over documents.
        level: Of the interval.
        seed: Of the resampling.

    Returns:
        As of ``summarise``: one row per entry of the other dimensions, their labels, ``mean``, ``median``, ``low``,
        ``high`` (NaN with fewer than two documents), ``tokens`` (not for values of documents), ``documents``. Entries
        that are NaN in either are left out. Null value 0. A mean over tokens weighs documents by their tokens; one of
        values of documents weighs them alike.

    Raises:
        TraceError: If the tokens (sample, position and id) or the documents differ.
        OptionError: If the values have other dimensions or labels than each other, or an option is not allowed.
    """
    dim = _shared_dimension(first, second)
    second = second.transpose(*first.dims)
    _require_labels(first, second, dim)
    if dim == "token":
        _require_tokens(first, second)
    attrs = {**first.attrs, "null": 0.0}
    coords = {name: first.coords[name] for name in first.coords if set(first.coords[name].dims) <= set(first.dims)}
    values = first.values.astype(np.float64) - second.values.astype(np.float64)
    gap = xr.DataArray(values, coords, first.dims, first.name, attrs)
    if dim == "sample":
        if drop_first:
            raise OptionError(f"drop_first is {drop_first}, but values of documents have no tokens to leave out.")
        documents = gap.coords["sample"].values
        gap = gap.drop_vars("sample").rename(sample="token")
        gap = gap.assign_coords(sample=("token", documents), position=("token", np.zeros(len(documents), dtype=int)))
    table = summarise(gap, drop_first=drop_first, resamples=resamples, level=level, seed=seed)
    return table if dim == "token" else table.drop(columns="tokens")


def _shared_dimension(first: xr.DataArray, second: xr.DataArray) -> str:
    if set(first.dims) != set(second.dims):
        raise OptionError(f"the dimensions are {first.dims} and {second.dims}; give one measure of both traces.")
    found = [dim for dim in ("token", "sample") if dim in first.dims]
    if len(found) != 1:
        raise OptionError(f"the dimensions are {first.dims}; needed is token, or sample for one value per document.")
    return found[0]


def _require_labels(first: xr.DataArray, second: xr.DataArray, paired: str) -> None:
    """Positions pair only what has the same name."""
    for dim in first.dims:
        ours, theirs = (values.coords[dim].values if dim in values.coords else None for values in (first, second))
        alike = (ours is None) == (theirs is None) and first.sizes[dim] == second.sizes[dim]
        if dim == "token" or (alike and (ours is None or np.array_equal(ours, theirs))):
            continue
        if dim == paired:
            sizes = f"{first.sizes[dim]} and {second.sizes[dim]} of them"
            raise TraceError(f"the documents differ ({sizes}); give the same of both.")
        raise OptionError(f"the values have other labels of {dim} than each other; select the same {dim}s of both.")


def _require_tokens(first: xr.DataArray, second: xr.DataArray) -> None:
    for values in (first, second):
        if missing := [name for name in TOKEN if name not in values.coords]:
            raise OptionError(f"{values.name} has no coordinate {missing[0]}; give measures of two traces.")
    ours, theirs = (np.stack([values.coords[name].values for name in TOKEN], axis=1) for values in (first, second))
    if ours.shape != theirs.shape:
        said = f"{len(ours)} against {len(theirs)} of them"
    elif (differ := (ours != theirs).any(1)).any():
        at = int(differ.argmax())
        said = f"first (sample, position, id) {tuple(ours[at].tolist())} against {tuple(theirs[at].tolist())}"
    else:
        return
    raise TraceError(f"the tokens differ, {said}; capture the same prompts with the same tokenizer.")

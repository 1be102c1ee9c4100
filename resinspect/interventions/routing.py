"""Edits that put one row of W in another's place: the mean, a uniform one, another token's, another trace's."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from resinspect.errors import OptionError, TraceError
from resinspect.interventions.edits import Edit, Place, named, titled


def mean_routing(trace: xr.Dataset | None = None, *, readers: Sequence[str] | None = None) -> Edit:
    """Every token gets the mean row of W: does it matter that routing depends on the token?

    Args:
        trace: Its tokens give the mean; None takes all tokens of the prompts that are run, in the clean run.
        readers: Names of the readers; None for all.

    Raises:
        TraceError: If weights of the trace are not identifiable.
    """
    if trace is None:
        name = titled("mean_routing (of these prompts)", readers)
        return Edit(name, lambda place, row: place.mean.to(row).expand_as(row), named(readers), scalar=True, mean=True)
    weight = _weights(trace)
    means = {name: weight[:, i].mean(0) for i, name in enumerate(trace["reader"].values.tolist())}

    def form(place: Place, row: Tensor) -> Tensor:
        return means[place.reader.name][: len(place.sources)].to(row).expand_as(row)

    return Edit(titled("mean_routing (of a trace)", readers), form, named(readers), scalar=True, given=_names(trace))


def uniform_routing(*, readers: Sequence[str] | None = None) -> Edit:
    """A reader's sources all get the same weight: the mean of its absolute weights at that token.

    So a row that is uniform already stays as it is, and one that a norm follows becomes the direction of the plain sum.

    Args:
        readers: Names of the readers; None for all.
    """

    def form(place: Place, row: Tensor) -> Tensor:
        return row.abs().mean(-1, keepdim=True).expand_as(row)

    return Edit(titled("uniform_routing", readers), form, named(readers), scalar=True)


def shuffle_tokens(
    seed: int = 0,
    *,
    order: Callable[[int], Sequence[int]] | None = None,
    readers: Sequence[str] | None = None,
) -> Edit:
    """Every token gets the row of another token of its own prompt, the same one at every reader.

    Rows of later tokens come to earlier ones, so the loss of the edited run is that of no causal model.

    Args:
        seed: Of the permutation, with the prompt's number; no token keeps its own row unless it is alone.
        order: Instead: for n tokens, whose row each gets.
        readers: Names of the readers; None for all.

    Raises:
        OptionError: When it runs, if ``order`` does not give n numbers from 0 to n - 1.
    """

    def form(place: Place, row: Tensor) -> Tensor:
        sample = place.tokens.sample
        index = torch.arange(len(sample), device=sample.device)
        for number in sample.unique().tolist():
            mine = torch.nonzero(sample == number).flatten()
            chosen = _cycle(len(mine), (seed, number)) if order is None else order(len(mine))
            index[mine] = mine[torch.as_tensor(_indices(chosen, len(mine)), device=mine.device)]
        return row[index.to(row.device)]

    name = titled(f"shuffle_tokens (seed {seed})" if order is None else "shuffle_tokens (given order)", readers)
    return Edit(name, form, named(readers), scalar=True)


def freeze_to(trace: xr.Dataset, *, readers: Sequence[str] | None = None) -> Edit:
    """Every token gets its row from another trace: of another checkpoint, or of other prompts of the same lengths.

    Args:
        trace: Has the same sources and readers, and every prompt and position that is run.
        readers: Names of the readers; None for all.

    Raises:
        TraceError: If weights of the trace are not identifiable.
    """
    weight = _weights(trace)
    columns = {name: i for i, name in enumerate(trace["reader"].values.tolist())}
    keys = _keys(trace["sample"].values, trace["position"].values)
    order = np.argsort(keys)

    def form(place: Place, row: Tensor) -> Tensor:
        wanted = _keys(place.tokens.sample.cpu().numpy(), place.tokens.position.cpu().numpy())
        found = np.searchsorted(keys, wanted, sorter=order)
        rows = order[np.minimum(found, len(order) - 1)]
        if (missing := np.flatnonzero(keys[rows] != wanted)).size:
            sample, position = (int(v[missing[0]]) for v in (place.tokens.sample, place.tokens.position))
            raise TraceError(
                f"the trace of freeze_to has no token at position {position} of prompt {sample}; give a trace of "
                "prompts of the same lengths."
            )
        return weight[torch.from_numpy(rows), columns[place.reader.name], : len(place.sources)].to(row)

    return Edit(titled("freeze_to", readers), form, named(readers), scalar=True, given=_names(trace))


def _names(trace: xr.Dataset) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(trace["reader"].values.tolist()), tuple(trace["source"].values.tolist())


def _weights(trace: xr.Dataset) -> Tensor:
    """W ``(token, reader, source)`` of a trace, 0 where a source cannot be read."""
    weight = trace["weight"].values.astype(np.float64)
    reach = np.arange(weight.shape[-1]) < trace["reader_prefix"].values[:, None]
    if np.isnan(weight[:, reach]).any():
        raise TraceError('weights of the trace are not all identifiable; capture it with method="replay".')
    return torch.from_numpy(np.where(reach, weight, 0.0))


def _cycle(count: int, seed: tuple[int, ...]) -> np.ndarray:
    """A random cycle through all: a permutation that leaves nothing in its place."""
    order = np.random.default_rng(seed).permutation(count)
    result = np.empty(count, dtype=np.int64)
    result[order] = np.roll(order, 1)
    return result


def _indices(chosen: Sequence[int], count: int) -> np.ndarray:
    """An order as given, if it says for each token whose row it gets."""
    indices = np.asarray(chosen)
    if indices.shape != (count,) or indices.dtype.kind not in "iu" or not ((indices >= 0) & (indices < count)).all():
        raise OptionError(f"order({count}) gives {chosen!r}; it must give {count} numbers from 0 to {count - 1}.")
    return indices


def _keys(sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    return sample.astype(np.int64) * 2**32 + position.astype(np.int64)

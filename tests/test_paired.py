"""Paired differences of two traces against closed forms."""

import numpy as np
import pytest
from analysis_cases import orthonormal, trace_of

import resinspect as ri
from resinspect.analysis.dilution import contribution_share, dilution_index
from resinspect.analysis.paired import paired_difference
from resinspect.analysis.summary import summarise
from resinspect.errors import OptionError, TraceError

SAMPLES = np.repeat(np.arange(20), np.tile([3, 7], 10))
LAST = np.flatnonzero(np.diff(SAMPLES, append=20))
HARD = np.random.default_rng(0).standard_normal(20)[SAMPLES]


def losses(gain=0.0, noise=0.01, seed=0, **options):
    """The loss of a trace, which differs much between documents and is lower by a gain."""
    loss = HARD - gain + noise * np.random.default_rng(seed).standard_normal(SAMPLES.size)
    loss[LAST] = np.nan
    return trace_of(np.ones((SAMPLES.size, 3, 2)), samples=SAMPLES, loss=loss, **options)["loss"]


def test_what_documents_have_in_common_cancels():
    """An interval of two unpaired means, the wrong sign, or a bootstrap over tokens."""
    worse, better = losses(seed=1), losses(0.1, seed=2)
    row = ri.paired_difference(worse, better).iloc[0]
    assert row["mean"] == pytest.approx(0.1, abs=0.01)
    assert row["low"] < row["mean"] < row["high"] < row["low"] + 0.02
    alone = summarise(worse).iloc[0]
    assert alone["high"] - alone["low"] > 0.3
    assert row[["tokens", "documents"]].tolist() == [80, 20]
    exact = summarise(worse - better).iloc[0]
    assert row[["mean", "median", "low", "high"]].tolist() == exact[["mean", "median", "low", "high"]].tolist()
    assert ri.paired_difference(better, worse)["mean"].item() == pytest.approx(-row["mean"])
    assert ri.paired_difference(worse, worse)[["low", "high"]].eq(0).all(axis=None)


def test_entries_are_paired_by_name_and_only_where_both_are_known():
    """NaN of one side taken for 0, or readers of two orders subtracted from each other."""
    one, other = (
        contribution_share(trace_of(orthonormal(6, 5), weight, samples=[0, 0, 0, 1, 1, 1]))
        for weight in (None, np.eye(5))
    )
    frame = paired_difference(one, other).set_index(["reader", "source"])
    assert frame.loc[("final", "1.mlp"), "mean"] == pytest.approx(1 / 5 - 1)
    assert frame.loc[("0.mlp", "1.mlp"), "tokens"] == 0
    missing = other.copy(data=np.where(np.arange(6)[:, None, None] == 2, np.nan, other.values))
    frame = paired_difference(one, missing, drop_first=1).set_index(["reader", "source"])
    assert frame.loc[("final", "1.mlp"), ["tokens", "documents"]].tolist() == [3, 2]
    turned = paired_difference(one, other.transpose("source", "reader", "token"))
    np.testing.assert_allclose(turned["mean"], paired_difference(one, other)["mean"])
    for wrong in (other.isel(reader=slice(None, None, -1)), other.isel(reader=slice(1, None))):
        with pytest.raises(OptionError, match="select the same readers of both"):
            paired_difference(one, wrong)


def test_values_of_documents_weigh_alike():
    """Documents weighed by tokens that a value for each document no longer has."""
    one, other = (loss.groupby("sample").mean() for loss in (losses(seed=1), losses(0.1, seed=2)))
    table = paired_difference(one, other)
    assert table["mean"].item() == pytest.approx(float((one - other).mean()))
    assert table["documents"].item() == 20
    assert "tokens" not in table
    with pytest.raises(OptionError, match="no tokens to leave out"):
        paired_difference(one, other, drop_first=1)
    with pytest.raises(TraceError, match=r"documents differ \(20 and 19 of them\)"):
        paired_difference(one, other.isel(sample=slice(1, None)))


def test_traces_of_other_tokens_are_refused():
    """Tokens of different texts or tokenizers subtracted from each other, position by position."""
    loss, ids = losses(), np.arange(SAMPLES.size)
    ids[5] = 999
    with pytest.raises(TraceError, match=r"tokens differ, first .* \(1, 2, 5\) against \(1, 2, 999\); capture"):
        paired_difference(loss, losses(token_ids=ids))
    with pytest.raises(TraceError, match="100 against 99 of them"):
        paired_difference(loss, loss.isel(token=slice(1, None)))
    with pytest.raises(TraceError, match="tokens differ"):
        paired_difference(loss, loss.isel(token=slice(None, None, -1)))
    with pytest.raises(OptionError, match="no coordinate token_id"):
        paired_difference(loss, loss.drop_vars("token_id"))
    trace = trace_of(orthonormal(6, 5))
    with pytest.raises(OptionError, match="give one measure of both"):
        paired_difference(dilution_index(trace), contribution_share(trace))
    with pytest.raises(OptionError, match="needed is token, or sample"):
        paired_difference(loss.mean(), loss.mean())

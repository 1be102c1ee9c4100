"""All measures together: the one table, what it needs, what it costs."""

import re
import warnings

import numpy as np
import pytest
from analysis_cases import orthonormal, trace_of
from cases import NAMED, build, prompts_for

import resinspect as ri
from resinspect.analysis.table import MEASURES, headlines, measure
from resinspect.errors import OptionError, TraceError


def test_every_measure_is_public_and_documented():
    """A table line without its function, or a function whose docstring says neither what it returns nor of what."""
    for name in MEASURES:
        function = measure(name)
        assert getattr(ri, name) is function
        for section in ("Args:", "Returns:", r"[Nn]ull", r"Source: |\d{4}\.\d{5}|\b(19|20)\d\d\b|own definition"):
            assert re.search(section, function.__doc__), (name, section)


@pytest.mark.parametrize("case", ["pre_ln", "attnres", "hyper_connections", "ddl_operator", "dca", "post_ln"])
def test_every_measure_runs_or_says_what_it_lacks(case):
    """A measure that fails on weights per channel, on a model without streams, or on short documents."""
    model = build(NAMED[case], "random")
    trace = ri.capture(model, prompts_for(model), keep=("gram", "cross", "natives", "hidden", "lens", "attribution"))
    tables, left_out = ri.analyze(trace)
    assert tables.keys() | left_out.keys() == MEASURES.keys()
    assert all("needs" in reason or "no " in reason for reason in left_out.values()), left_out
    assert "gradient_norms" in left_out
    assert {"contribution_share", "novelty", "logit_lens"} <= tables.keys()
    assert len(headlines(tables)) > 5


@pytest.mark.parametrize(
    "case", ["pre_ln", "denseformer", "attnres", "hyper_connections", "mhc", "ddl", "dca", "post_ln"]
)
def test_measures_equal_those_of_the_vectors(case):
    """A measure from weights and inner products that differs from the same one computed with the vectors themselves."""
    model = build(NAMED[case], "random")
    trace = ri.capture(model, prompts_for(model), keep=("gram", "cross", "hidden"))
    reads, writes = (trace[f"{of}_hidden"].values.astype(np.float64) for of in ("reader", "source"))
    length, written = np.linalg.norm(reads, axis=-1), np.linalg.norm(writes, axis=-1)
    readers, sources = (trace[dim].values.tolist() for dim in ("reader", "source"))
    if "contribution" not in trace:
        parts = np.nan_to_num(trace["weight"].values.astype(np.float64))[..., None] * writes[:, None]
        share = np.einsum("trsd,trd->trs", parts, reads) / length[..., None] ** 2
        np.testing.assert_allclose(np.nan_to_num(ri.contribution_share(trace).values), share, atol=1e-5)
        size = np.linalg.norm(parts, axis=-1)
        number = size.sum(-1) ** 2 / (size**2).sum(-1)
        np.testing.assert_allclose(ri.effective_sources(trace).values, number, rtol=1e-5)
    alignment, ratio, layers = ri.write_alignment(trace), ri.update_ratio(trace), ri.update_ratio(trace, of="layer")
    for name in set(readers) & set(sources):
        r, s = readers.index(name), sources.index(name)
        cosine = np.einsum("td,td->t", writes[:, s], reads[:, r]) / (written[:, s] * length[:, r])
        np.testing.assert_allclose(alignment.sel(reader=name).values, cosine, atol=1e-5)
        np.testing.assert_allclose(ratio.sel(reader=name).values, written[:, s] / length[:, r], rtol=1e-5)
    for name in layers["reader"].values.tolist():
        own = [s for s, other in enumerate(sources) if other.partition(".")[0] == name.partition(".")[0]]
        expected = np.linalg.norm(writes[:, own].sum(1), axis=-1) / length[:, readers.index(name)]
        np.testing.assert_allclose(layers.sel(reader=name).values, expected, rtol=1e-5)


def test_one_document_has_numbers_but_no_interval():
    """Uncertainty invented from one text."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tables, _ = ri.analyze(trace_of(orthonormal(30, 9), natives=None))
    rows = headlines(tables)
    assert len(rows) > 5
    assert rows["value"].notna().all()
    assert rows["low"].isna().all()


def test_dropped_tokens_are_dropped_from_every_measure():
    """An option that some measures obey and others ignore, in one table of results."""
    model = build(NAMED["hyper_connections"], "random")
    trace = ri.capture(model, prompts_for(model), keep=("gram", "cross", "natives", "hidden", "lens", "attribution"))
    tables, _ = ri.analyze(trace, drop_first=2)
    whole, _ = ri.analyze(trace)
    kept = int((trace["position"] >= 2).sum())
    for name, table in tables.items():
        assert "tokens" not in table or table["tokens"].max() <= kept, name
        numbers = table.select_dtypes("number")
        same = numbers.equals(whole[name].select_dtypes("number"))
        # What is the same for all tokens, or has no row.
        assert not same or not len(table) or name in ("profile_clusters",), name
    with pytest.raises(OptionError, match="drop_first is 99"):
        ri.analyze(trace, drop_first=99)


def test_a_trace_without_values_leaves_measures_out():
    """One measure that has nothing to work on, and all the others lost with it."""
    trace = trace_of(orthonormal(12, 5), samples=np.repeat(np.arange(3), 4), hidden=True)
    trace = trace.assign(weight=trace["weight"] * np.nan)
    tables, left_out = ri.analyze(trace)
    assert {"variance_of_routing", "staticness"} <= left_out.keys()
    assert "residual_norms" in tables
    broken = trace_of(orthonormal(12, 5), samples=np.repeat(np.arange(3), 4), hidden=True)
    broken["source_hidden"][3, 2] = np.nan
    clean = ri.collective_rank(broken.isel(token=np.arange(12) != 3))
    found = ri.collective_rank(broken)
    assert np.isfinite(found["entropy"]).all()
    np.testing.assert_allclose(found["entropy"][2], clean["entropy"][2])


@pytest.mark.parametrize("name", ["reader_cosine", "block_influence", "write_alignment"])
def test_measures_of_whole_inputs_refuse_a_part_of_them(name):
    """Inputs added up from the sources that are left, and divided by the length of the whole."""
    trace = trace_of(orthonormal(6, 5))
    part = ri.select(trace, sources=["embed", "0.attn"])
    with pytest.raises(TraceError, match=r"some of those of '0\.mlp' were left out|some of those of '1\.attn'"):
        measure(name)(part)
    assert np.isfinite(measure(name)(ri.select(trace, readers=["0.attn", "0.mlp", "1.attn"])).values).all()


def test_the_null_beside_a_value_is_of_that_value():
    """A corrected number beside an uncorrected bound, or one side of a band that has two."""
    model = build(NAMED["attnres"], "random")
    tables, _ = ri.analyze(ri.capture(model, prompts_for(model)))
    rows = headlines(tables).set_index("measure")
    table = tables["class_information"].query("reader == 'all'").iloc[0]
    assert table["information"] == pytest.approx(table["plug_in"] - table["null_mean"])
    assert rows.loc["class_information", "null_high"] == table["null_high"] < table["plug_in"] + table["null_high"]
    assert np.isnan(rows.loc["class_information", "null_low"])
    both = rows.loc[["routing_and_loss"]]
    assert (both["null_low"] < both["null_high"]).all()
    assert rows.loc["dilution_index", "null_low"] == rows.loc["dilution_index", "null_high"] == 1


def test_documents_and_tokens_are_counted_in_every_table():
    """An n that is missing, or that counts the tokens that were dropped."""
    trace = trace_of(orthonormal(40, 9), samples=np.repeat(np.arange(4), 10))
    tables, _ = ri.analyze(trace, drop_first=1)
    assert set(tables["contribution_share"].dropna()["tokens"]) == {36}
    for name, table in tables.items():
        if {"low", "high"} <= set(table.columns):
            assert {"tokens", "documents"} <= set(table.columns), name

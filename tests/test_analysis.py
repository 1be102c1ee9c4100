"""All measures together: the one table, what it needs, what it costs."""

import warnings

import numpy as np
import pytest
from analysis_cases import orthonormal, trace_of
from cases import NAMED, build, prompts_for

import resinspect as ri
from resinspect.analysis.table import MEASURES, headlines, measure


def test_every_measure_is_public_and_documented():
    """A table line without its function, or a function whose docstring says neither what it returns nor of what."""
    for name in MEASURES:
        function = measure(name)
        assert getattr(ri, name) is function
        for section in ("Args:", "Returns:"):
            assert section in function.__doc__, name


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


def test_one_document_has_numbers_but_no_interval():
    """Uncertainty invented from one text."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tables, _ = ri.analyze(trace_of(orthonormal(30, 9), natives=None))
    rows = headlines(tables)
    assert len(rows) > 5
    assert rows["value"].notna().all()
    assert rows["low"].isna().all()


def test_documents_and_tokens_are_counted_in_every_table():
    """An n that is missing, or that counts the tokens that were dropped."""
    trace = trace_of(orthonormal(40, 9), samples=np.repeat(np.arange(4), 10))
    tables, _ = ri.analyze(trace, drop_first=1)
    assert set(tables["contribution_share"].dropna()["tokens"]) == {36}
    for name, table in tables.items():
        if {"low", "high"} <= set(table.columns):
            assert {"tokens", "documents"} <= set(table.columns), name

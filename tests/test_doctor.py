"""The doctor's checks of traces against closed forms: each has a case that triggers it and one that does not."""

import numpy as np
import pytest
from analysis_cases import orthonormal, trace_of
from cases import NAMED, build, prompts_for

import resinspect as ri
from resinspect.checkup import CHECKS, describe_report, doctor, exit_code
from resinspect.errors import OptionError, TraceError

TOKENS = 24
STREAM = ("token", "site", "stream")


def rows(patient, check, **options):
    """What one check says."""
    return list(doctor(patient, checks=[check], **options).query("check != 'prompts'").itertuples())


def said(patient, check, **options):
    """Severities of what one check says."""
    return [row.severity for row in rows(patient, check, **options)]


def known_as(trace, scheme, family="reference"):
    return trace.assign_attrs(scheme=scheme, family=family)


def attended(alpha, tokens=TOKENS):
    """A trace of full AttnRes over three sources: ``alpha (site, slot)`` or ``(token, site, slot)``, NaN padded."""
    alpha = np.broadcast_to(np.asarray(alpha, dtype=float), (tokens, 3, 3)).copy()
    trace = trace_of(
        orthonormal(tokens, 3), np.nan_to_num(alpha), natives={"native_alpha": (("token", "site", "slot"), alpha)}
    )
    return known_as(trace, "attnres")


PLAIN_MEAN = [[1, np.nan, np.nan], [1 / 2, 1 / 2, np.nan], [1 / 3, 1 / 3, 1 / 3]]
ROUTED = [[1, np.nan, np.nan], [0.3, 0.7, np.nan], [0.5, 0.1, 0.4]]


def streamed(mix, pre=((0.5, 0.5), (0.5, 0.5)), post=((1, 1), (1, 1)), scheme="mhc"):
    """A trace of two streams over one layer, its W from their own program."""
    mix, pre, post = (np.asarray(value, dtype=float) for value in (mix, pre, post))
    state, weight = np.ones((2, 1)), np.zeros((3, 3))
    for site in range(2):
        weight[site, : site + 1] = pre[site] @ state
        state = np.concatenate([mix[site] @ state, post[site][:, None]], axis=1)
    weight[2] = state.sum(0)

    def padded(value, dims):
        full = np.concatenate([value, np.full_like(value[:1], np.nan)])
        return dims, np.broadcast_to(full, (TOKENS, *full.shape))

    natives = {
        "native_pre": padded(pre, STREAM),
        "native_post": padded(post, STREAM),
        "native_mix": padded(mix, (*STREAM, "stream2")),
    }
    return known_as(trace_of(orthonormal(TOKENS, 3), weight, natives=natives), scheme)


IDENTITY, BLURRED = [np.eye(2)] * 2, [np.full((2, 2), 0.5)] * 2
MIXED = [[[0.8, 0.2], [0.2, 0.8]]] * 2
APART = {"pre": ((0.9, 0.1), (0.1, 0.9)), "post": ((0.2, 1.6), (1.5, 0.1))}


def test_fidelity_speaks_for_each_reader():
    """One verdict for all, an error that rounding explains, or a reader called wrong because it is not finite."""
    trace = trace_of(orthonormal(TOKENS, 3))
    assert said(trace, "fidelity") == ["ok"]
    trace["fidelity"].values[3, 1] = 1e-3
    finding, ok = rows(trace, "fidelity")
    assert (finding.severity, finding.where, ok.where) == ("finding", "0.mlp", "0.attn, final")
    assert finding.value == pytest.approx(1e-3 / (4 * 2**-52 * np.sqrt(2)))
    trace["fidelity"].values[3, 1] = np.inf
    assert "cannot be told" in rows(trace, "fidelity")[0].consequence
    trace["fidelity"].values[3, 1] = 0.03
    trace["kappa"].values[3, 1] = 1e15
    assert said(trace, "fidelity") == ["note", "ok"]


def test_the_first_value_that_is_not_finite_is_named_with_its_position():
    """A reader blamed for what an earlier source wrote, or the first token instead of the first bad one."""
    trace = trace_of(orthonormal(TOKENS, 5), samples=np.repeat([0, 1], TOKENS // 2))
    assert said(trace, "non-finite values") == ["ok"]
    trace["source_norm"].values[14:, 2] = np.nan
    trace["reader_norm"].values[14:, 2:] = np.inf
    (row,) = rows(trace, "non-finite values")
    assert row.where == "source 0.mlp, sample 1, position 2 ('t14')"
    assert (row.severity, row.value, row.n) == ("finding", TOKENS - 14, TOKENS)
    trace = trace_of(orthonormal(TOKENS, 3))
    trace["reader_max"].values[1, 1] = np.inf
    assert rows(trace, "non-finite values")[0].where == "reader_max"


def test_untrained_queries_are_found_and_single_slots_are_not():
    """A finding at the first read, whose weight is 1 by construction, or one token that routes overlooked."""
    (row,) = rows(attended(PLAIN_MEAN), "uniform routing")
    assert (row.severity, row.where, row.n) == ("finding", "0.mlp, final", TOKENS)
    once = np.broadcast_to(PLAIN_MEAN, (TOKENS, 3, 3)).copy()
    once[7, 1, :2] = 0.501, 0.499
    assert rows(attended(once), "uniform routing")[0].where == "final"
    assert said(attended(ROUTED), "uniform routing") == ["ok"]
    assert said(trace_of(orthonormal(TOKENS, 3)), "uniform routing") == ["not applicable"]
    with_nan = np.full((TOKENS, 3, 3), np.nan)
    assert said(attended(with_nan), "uniform routing") == ["not applicable"]


def test_a_scheme_that_routes_nothing_is_the_plain_residual():
    """W = 1 found in a model that has no routing, or weights that differ at one token overlooked."""
    assert said(streamed(IDENTITY), "equal weights") == ["finding"]
    assert said(streamed(MIXED, **APART), "equal weights") == ["ok"]
    assert said(trace_of(orthonormal(TOKENS, 3)), "equal weights") == ["not applicable"]
    assert said(attended(PLAIN_MEAN), "equal weights") == ["not applicable"]


def test_mixing_stuck_at_the_identity():
    """A near identity called frozen, or one frozen sublayer hidden by others."""
    assert said(streamed(MIXED), "frozen mixing") == ["ok"]
    near = np.array([[0.999, 0.001], [0.001, 0.999]])
    (row,) = rows(streamed([np.eye(2), near]), "frozen mixing")
    assert (row.severity, row.where) == ("finding", "0.attn")
    assert "needs the model" in row.evidence
    assert said(known_as(streamed(IDENTITY), "ihc", "hy_v4"), "frozen mixing") == ["not applicable"]
    assert said(trace_of(orthonormal(TOKENS, 3)), "frozen mixing") == ["not applicable"]


def test_sources_that_write_nothing():
    """A dead sublayer overlooked, or a bias that starts at zero called dead."""
    writes = orthonormal(TOKENS, 5)
    assert said(trace_of(writes), "zero sources") == ["ok"]
    writes[:, 2], writes[5, 3] = 0, 0
    finding, note = rows(trace_of(writes), "zero sources")
    assert (finding.severity, finding.where, note.severity, note.where) == ("finding", "0.mlp", "note", "1.attn")
    assert note.evidence.startswith("norm is 0 at some tokens (at most 1 of 24 tokens")
    model = build(NAMED["post_ln"], "init")
    assert said(model, "zero sources", prompts=prompts_for(model)) == ["note"]


def test_one_source_that_takes_almost_all_tokens():
    """A reader of a single source counted, or a source that is largest at 23 of 24 tokens called constant."""
    writes = orthonormal(TOKENS, 3)
    writes[:, 1] *= 5
    writes[::2, 0] *= 9
    assert said(trace_of(writes), "dominant source") == ["ok"]
    writes[:, 2] *= 100
    (row,) = rows(trace_of(writes), "dominant source")
    assert (row.severity, row.where, row.value) == ("note", "final", 1.0)
    assert "1 of 2 readers" in row.evidence
    writes[0, 2] /= 1000
    assert rows(trace_of(writes), "dominant source")[0].value == pytest.approx(23 / 24)
    writes[1, 2] /= 1000
    assert said(trace_of(writes), "dominant source") == ["ok"]
    assert said(trace_of(orthonormal(19, 3)), "dominant source") == ["not applicable"]


def test_softmax_weights_that_do_not_sum_to_one():
    """Weights rescaled after the softmax, or negative ones that still sum to 1."""
    assert said(attended(ROUTED), "softmax sums") == ["ok"]
    (row,) = rows(attended([ROUTED[0], ROUTED[1], [0.5, 0.1, 0.41]]), "softmax sums")
    assert (row.severity, row.where, row.value) == ("finding", "final", pytest.approx(0.01))
    assert rows(attended([ROUTED[0], [1.2, -0.2, np.nan], ROUTED[2]]), "softmax sums")[0].where == "0.mlp"


def test_rows_and_columns_of_mixing_are_judged_apart():
    """Only the sums that Sinkhorn-Knopp norms last looked at, or the others held to rounding."""
    assert said(streamed(MIXED), "mixing sums") == ["ok", "ok"]
    nearly = [[[0.8, 0.2], [0.22, 0.78]], MIXED[0]]
    assert said(streamed(nearly), "mixing sums") == ["ok", "ok"]
    unconverged = rows(streamed([[[0.8, 0.2], [0.3, 0.7]], MIXED[0]]), "mixing sums")
    assert [row.severity for row in unconverged] == ["ok", "finding"]
    assert (unconverged[1].where, unconverged[1].value) == ("0.attn", pytest.approx(0.1))
    assert said(streamed([[[0.8, 0.21], [0.2, 0.8]], MIXED[0]]), "mixing sums") == ["finding", "ok"]
    negative = [[[1.2, -0.2], [-0.2, 1.2]], MIXED[0]]
    assert said(streamed(negative), "mixing sums") == ["ok", "ok", "finding"]
    assert said(streamed(negative, scheme="hyper_connections"), "mixing sums") == ["not applicable"]


def test_streams_that_act_as_one():
    """Streams called different because their weights are, or a mixing of rank 1 overlooked."""
    assert said(streamed(MIXED, **APART), "collapsed streams") == ["ok"]
    assert said(streamed(MIXED), "collapsed streams") == ["finding"]
    verdict, single, product = rows(streamed(BLURRED, **APART), "collapsed streams")
    assert [verdict.severity, single.severity, product.severity] == ["ok", "note", "note"]
    assert (single.where, product.where) == ("0.attn, 0.mlp", "0.mlp")
    slow = [[[0.53, 0.47], [0.47, 0.53]]] * 2  # second singular value 0.06, of the product 0.0036
    assert said(streamed(slow, **APART), "collapsed streams") == ["ok", "note"]


def test_gates_at_their_ends_on_all_tokens():
    """A gate closed on most tokens called fixed, or the end of the wrong range."""
    assert said(streamed(MIXED, **APART), "saturated gates") == ["ok"]
    closed = streamed(MIXED, pre=((0.9999, 0.1), (0.1, 0.9)), post=((0.2, 1.9999), (1.0, 0.0001)))
    (row,) = rows(closed, "saturated gates")
    assert (row.severity, row.where) == ("finding", "0.attn pre[0], 0.attn post[1], 0.mlp post[1]")
    closed["native_pre"] = closed["native_pre"].copy(data=closed["native_pre"].values.copy())
    closed["native_pre"].values[9, 0, 0] = 0.5
    assert rows(closed, "saturated gates")[0].where == "0.attn post[1], 0.mlp post[1]"
    one_hot = attended([ROUTED[0], ROUTED[1], [0.0004, 0.9995, 0.0001]])
    assert rows(one_hot, "saturated gates")[0].where == "softmax final"
    # Another slot at every other token, and no gradient at any.
    one_hot["native_alpha"] = one_hot["native_alpha"].copy(data=one_hot["native_alpha"].values.copy())
    one_hot["native_alpha"].values[::2, 2] = [0.9999, 0.0001, 0]
    assert rows(one_hot, "saturated gates")[0].where == "softmax final"
    few = one_hot.isel(token=slice(0, 19))
    assert said(few, "saturated gates") == ["not applicable"]
    assert said(attended(ROUTED), "saturated gates") == ["ok"]


def gated(gate, scheme="state_attention_full", family="open_attnres"):
    """A trace of depth attention over states with a gate ``(site, ...)`` beside it."""
    gate = np.broadcast_to(gate, (TOKENS, *np.shape(gate)))
    trace = attended(ROUTED).assign(native_gate=(("token", "site", "hidden")[: gate.ndim], gate))
    return known_as(trace, scheme, family)


def test_gates_beside_a_softmax():
    """Gates that only some variants of a scheme have, never looked at; or a free number at 0 called a closed gate."""
    open_ = np.full((3, 4), 0.3)
    assert said(gated(open_), "saturated gates") == ["ok"]
    shut = open_.copy()
    shut[1, 2] = 0.0002
    (row,) = rows(gated(shut), "saturated gates")
    assert (row.severity, row.where) == ("finding", "0.mlp gate[2]")
    assert " of 14 gates" in row.evidence
    # One number per sublayer: a sigmoid, or a weight without ends, which a trace does not tell apart.
    assert " of 2 gates" in rows(gated(np.zeros(3)), "saturated gates")[0].evidence
    read = gated(shut, "gated_streams", "qwen4_exp").assign(native_post=(("token", "site"), np.ones((TOKENS, 3))))
    assert rows(read, "saturated gates")[0].where == "0.mlp gate[2]"


def test_states_taken_for_writes():
    """Outputs that contain the residual pass as writes, or similar writes as states."""
    writes = orthonormal(TOKENS, 9)
    assert said(trace_of(writes), "cumulative sources") == ["ok"]
    (row,) = rows(trace_of(writes.cumsum(1)), "cumulative sources")
    assert (row.severity, row.value) == ("finding", 1.0)
    only_mlp = writes.copy()
    only_mlp[:, 2::2] = writes.cumsum(1)[:, 2::2]
    assert rows(trace_of(only_mlp), "cumulative sources")[0].where == "0.mlp, 1.mlp, 2.mlp, 3.mlp"
    alike = writes + 1.0 * writes[:, :1]  # all share one direction: cosine 0.5
    assert said(trace_of(alike), "cumulative sources") == ["ok"]
    assert said(trace_of(writes).drop_vars("gram"), "cumulative sources") == ["not applicable"]


def test_what_a_scalar_weight_leaves_out():
    """Sources averaged alike whatever they weigh, or a scheme of scalars blamed."""
    trace = trace_of(orthonormal(TOKENS, 3))
    assert said(trace, "discarded by scalar W") == ["not applicable"]
    part = trace["weight"].copy(data=np.where(np.isnan(trace["weight"].values), np.nan, 0.05))
    trace = trace.assign(discarded=part, contribution_norm=trace["weight"])
    assert said(trace, "discarded by scalar W") == ["ok"]
    trace["discarded"].values[:, 2, 2] = 0.3
    (row,) = rows(trace, "discarded by scalar W")
    assert (row.severity, row.where) == ("note", "final")
    assert row.value == pytest.approx(np.sqrt((2 * 0.05**2 + 0.3**2) / 3))
    trace["contribution_norm"].values[:, 2, 2] = 0.01
    assert said(trace, "discarded by scalar W") == ["ok"]


def test_tokens_that_decide_a_mean():
    """Every first token blamed, or a mean that one token moves by less than a quarter."""
    writes = orthonormal(100, 3)
    assert said(trace_of(writes), "extreme tokens") == ["ok"]
    writes[0] *= 30
    assert said(trace_of(writes), "extreme tokens") == ["ok"]
    writes[0] *= 2
    (row,) = rows(trace_of(writes), "extreme tokens")
    assert row.severity == "note"
    assert row.value == pytest.approx(1 - 1 / (159 / 100))
    assert "100% of them are first tokens" in row.evidence


def test_of_a_trace_alone_what_needs_the_model_says_so():
    """A check that passes because it could not look."""
    report = doctor(trace_of(orthonormal(TOKENS, 3)))
    assert set(report["check"]) == set(CHECKS)
    needs = ("parameters without effect", "parameters without gradient", "attention to the future")
    for row in report.set_index("check").loc[list(needs)].itertuples():
        assert (row.severity, row.evidence) == ("not applicable", "only a trace was given; this needs the model")
    assert exit_code(report) == 0
    assert describe_report(report)[0][0] == ""


def test_wrong_use_is_one_sentence():
    """A check that is silently skipped, or prompts that a trace cannot use."""
    trace = trace_of(orthonormal(TOKENS, 3))
    with pytest.raises(OptionError, match="no check 'fidelty'; choose from fidelity, non-finite values"):
        doctor(trace, checks=["fidelty"])
    with pytest.raises(OptionError, match="a trace has its own prompts"):
        doctor(trace, "text")
    with pytest.raises(OptionError, match="a model or a trace, not a str; load it"):
        doctor("attnres")
    with pytest.raises(TraceError, match="not a valid trace"):
        doctor(trace.drop_vars("fidelity"))


def test_every_check_states_its_threshold():
    """A number in the code that no one can argue with."""
    assert all("hreshold" in check.__doc__ for check in CHECKS.values())


def test_a_stored_trace_is_examined_like_the_one_in_memory(tmp_path):
    """Object columns, lazy arrays, or attributes lost on the way through a folder."""
    model = build(NAMED["mhc"], "random")
    trace = ri.capture(model, prompts_for(model))
    ri.save_trace(trace, tmp_path / "t")
    stored = doctor(ri.open_trace(tmp_path / "t"))
    assert stored.equals(doctor(trace))
    assert stored.attrs == doctor(trace).attrs

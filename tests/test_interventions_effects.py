"""Rank agreement of routing and effect, and skipped sublayers."""

import numpy as np
import pytest
import torch
from cases import NAMED, build, prompts_for
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from test_families import PROMPTS, built
from tiny import TINY

import resinspect as ri
from resinspect.errors import CaptureError, OptionError
from resinspect.interventions import routing_vs_causal, skip_effects
from resinspect.interventions.agreement import spearman

LENGTHS = (26, 9, 40)


def random_model(name):
    return build(NAMED[name], "random", torch.float64)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 30), st.integers(0, 1000), st.booleans())
def test_spearman_is_that_of_scipy(count, seed, ties):
    """Ranks of ties that are not averaged."""
    draw = np.random.default_rng(seed)
    one, other = (draw.integers(0, 4, (2, count)) if ties else draw.standard_normal((2, count)) for _ in range(2))
    expected = [
        spearmanr(a, b).statistic if len({*a}) > 1 and len({*b}) > 1 else np.nan
        for a, b in zip(one, other, strict=True)
    ]
    np.testing.assert_allclose(spearman(one, other), expected, atol=1e-12)
    assert np.isnan(spearman(one[:, :2], other[:, :2])).all()


def test_agreement_follows_from_the_table_of_edges():
    """Shares and effects of different edges compared, or means of means over documents."""
    model = random_model("attnres")
    edges, agreement = routing_vs_causal(model, prompts_for(model), resamples=50)
    assert len(edges) == 2 * sum(reader.prefix for reader in model.anatomy.readers)
    assert (edges["kl"] >= 0).all()
    for mode in ("frozen", "recomputed"):
        mine = edges[edges["downstream"] == mode]
        np.testing.assert_allclose(mine.groupby("reader")["contribution_share"].sum(), 1)
        for reader in ("all", "2.attn", "final"):
            some = mine if reader == "all" else mine[mine["reader"] == reader]
            chosen = agreement["downstream"].eq(mode) & agreement["reader"].eq(reader)
            row = agreement[chosen & agreement["share"].eq("magnitude_share") & agreement["effect"].eq("kl")]
            assert row["rho"].item() == pytest.approx(spearmanr(some["magnitude_share"], some["kl"]).statistic)
            assert row["low"].item() <= row["high"].item()
            assert row["edges"].item() == len(some)
    final = edges[edges["reader"] == "final"]
    frozen, recomputed = (final.loc[final["downstream"] == mode, "kl"] for mode in ("frozen", "recomputed"))
    np.testing.assert_allclose(frozen, recomputed, rtol=1e-6)  # nothing is downstream of the readout


def test_edges_ranked_by_weight():
    """``|W|`` over its sum, or a signed W, or an option that changes the other columns."""
    model = random_model("hyper_connections_static")
    options = {"downstream": ("recomputed",), "edges": 30, "resamples": 10}
    edges, agreement = routing_vs_causal(model, prompts_for(model), share=("weight", "contribution"), **options)
    usual, _ = routing_vs_causal(model, prompts_for(model), **options)
    weight = ri.capture(model, prompts_for(model))["weight"].mean("token")
    expected = [abs(float(weight.sel(reader=e.reader, source=e.source))) for e in edges.itertuples()]
    np.testing.assert_allclose(edges["absolute_weight"], expected)
    assert (weight < 0).any()
    assert "magnitude_share" not in edges
    assert "absolute_weight" not in usual
    np.testing.assert_allclose(edges["contribution_share"], usual["contribution_share"])
    row = agreement.query("share == 'absolute_weight' and effect == 'kl' and reader == 'all'")
    assert row["rho"].item() == pytest.approx(spearmanr(edges["absolute_weight"], edges["kl"]).statistic)
    plain = random_model("pre_ln")
    _, agreement = routing_vs_causal(plain, prompts_for(plain), share=["weight"], **options)
    assert agreement["rho"].isna().all()  # equal weights rank nothing
    for wrong in ("weight", [], ["norm"]):
        with pytest.raises(OptionError, match="choose one or more of contribution, magnitude, weight"):
            routing_vs_causal(model, prompts_for(model), share=wrong)


def test_an_unread_edge_has_neither_share_nor_effect():
    """A share of what is written instead of what is read."""
    model = random_model("hyper_connections_static")
    with torch.no_grad():
        model.connection.post[2].zero_()
    edges, _ = routing_vs_causal(model, prompts_for(model), downstream=("recomputed",), resamples=10)
    unread = edges[edges["source"] == "1.attn"]
    assert len(unread) == 4
    assert not unread[["contribution_share", "magnitude_share", "kl", "loss_change"]].to_numpy().any()


def test_a_sample_of_edges_is_a_part_of_all_of_them():
    """A draw whose effects are labelled with other edges."""
    model = random_model("dca")
    prompts, key = prompts_for(model), ["source", "reader"]
    every, _ = routing_vs_causal(model, prompts, downstream=("recomputed",), resamples=10)
    some, agreement = routing_vs_causal(model, prompts, downstream=("recomputed",), edges=8, resamples=10)
    assert len(some) == 8
    assert agreement["edges"].max() == 8
    both = some.merge(every, on=key)
    np.testing.assert_allclose(both["kl_x"], both["kl_y"], rtol=1e-6)
    np.testing.assert_allclose(both["contribution_share_x"], both["contribution_share_y"])
    with pytest.raises(OptionError, match="at least 3"):
        routing_vs_causal(model, prompts, edges=2)
    with pytest.raises(OptionError, match="downstream is 'frosen'; choose one or both of"):
        routing_vs_causal(model, prompts, downstream="frosen")
    alone, _ = routing_vs_causal(model, prompts, downstream="recomputed", edges=8, resamples=10)
    assert alone.equals(some)


def test_a_document_alone_has_no_interval():
    """An interval out of nothing."""
    model = random_model("attnres")
    edges, agreement = routing_vs_causal(model, prompts_for(model)[:1], edges=6, resamples=10)
    assert edges["kl_low"].isna().all()
    assert agreement["low"].isna().all()


def test_readers_that_are_the_carry_have_no_edges():
    """Effects of edits that were never applied."""
    minimax = next(tiny for tiny in TINY if tiny.name == "minimax")
    with pytest.raises(CaptureError, match="the model also carries on"):
        routing_vs_causal(built(minimax), PROMPTS, edges=5)


@pytest.mark.parametrize("name", ["pre_ln", "attnres", "dca", "hyper_connections"])
def test_skipped_writes_by_hand(name):
    """A change measured against the wrong run, at the wrong token, or of a write that came before."""
    model = random_model(name)
    prompts = prompts_for(model)
    result = skip_effects(model, prompts, downstream="recomputed")
    points = {f"{site.name}": model.site_module(site).hook_write for site in model.anatomy.sites[:-1]}
    mine = result["sample"].values == 2

    def run(skip):
        writes = {}
        handles = [p.register_forward_hook(lambda m, a, v, n=n: writes.update({n: v[0]})) for n, p in points.items()]
        if skip:

            def gone(module, args, value):
                value = value.clone()
                value[:, 1:] = 0
                return value

            handles.append(points["1.attn"].register_forward_hook(gone))
        with torch.no_grad():
            logits = model(torch.tensor([prompts[2]])).logits[0]
        for handle in handles:
            handle.remove()
        return writes, logits.softmax(-1)

    (clean, p), (edited, q) = run(False), run(True)
    for later in ("1.mlp", "2.attn", "2.mlp"):
        expected = (edited[later] - clean[later]).norm(dim=-1) / clean[later].norm(dim=-1)
        got = result["write_change"].sel(skipped="1.attn", source=later).values[mine]
        np.testing.assert_allclose(got[1:], expected[1:], rtol=1e-6, atol=1e-12)
        assert np.isnan(got[0])
    assert result["write_change"].sel(skipped="1.attn", source=["embed", "0.mlp", "1.attn"]).isnull().all()
    got = result["output_change"].sel(skipped="1.attn").values[mine]
    np.testing.assert_allclose(got[1:], (p - q).norm(dim=-1)[1:], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("downstream", ["recomputed", "frozen"])
def test_the_future_owes_nothing_to_the_last_layer(downstream):
    """Tokens counted as future that were skipped themselves."""
    model = random_model("attnres")
    result = skip_effects(model, prompts_for(model, LENGTHS), downstream=downstream, variant="future", cuts=2)
    output = result["output_change"]
    assert float(output.sel(skipped=["2.attn", "2.mlp"]).max()) == 0
    assert float(output.sel(skipped="0.attn").max()) > 1e-4
    assert output.isel(token=result["sample"] == 1).isnull().all()  # 9 tokens: too short for a cut
    known = output.isel(token=result["sample"] == 2).notnull()
    first = int(result["position"].isel(token=result["sample"] == 2)[known.any("skipped")].min())
    assert first in range(8, 37, 8)
    again = skip_effects(
        model, prompts_for(model, LENGTHS), downstream=downstream, variant="future", cuts=2, batch_size=1
    )
    np.testing.assert_allclose(again["output_change"], output, rtol=1e-6, atol=1e-9)
    with pytest.raises(OptionError, match="choose one of all, future"):
        skip_effects(model, [[1, 2]], downstream=downstream, variant="past")


def test_constants_are_not_skipped():
    """A bias taken for a sublayer."""
    model = random_model("post_ln")
    result = skip_effects(model, prompts_for(model), downstream="recomputed")
    assert result["skipped"].values.tolist() == ["0.attn", "0.mlp", "1.attn", "1.mlp", "2.attn", "2.mlp"]

"""Families with weights on the carry: deliberate mistakes that must not close, and facts worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from mutation import TINY, as_kind, broken, verdict_of
from test_families import built, captured
from tiny.gated import CASES, doge

import resinspect as ri
from resinspect.families import FAMILIES, find_layout
from resinspect.families.gemma3n import AltUp
from resinspect.families.minimax import NormedCarry
from resinspect.families.weighted import Weighted


class LowerOff(AltUp):
    """The correction's + 1 is forgotten."""

    def write(self, carrier, state, site, native, *values):
        if site.kind == "mlp":
            native = native | {"correct": native["correct"] - 1}
        return super().write(carrier, state, site, native, *values)


class Transposed(AltUp):
    """Streams are predicted with the transposed matrix."""

    def read(self, carrier, state, site, native):
        native = native | {"predict": native["predict"].mT} if site.kind == "attn" else native
        return super().read(carrier, state, site, native)


class AllButActive(AltUp):
    """The per-layer embedding goes to all streams but the active one."""

    def write(self, carrier, state, site, native, *values):
        if site.kind != "ple":
            return super().write(carrier, state, site, native, *values)
        streams, _ = state
        others = torch.arange(len(self.unembed) + 1) != self.active
        return streams + carrier.outer(others.to(streams.dtype), *values), None


class PlainMean(AltUp):
    """The readout forgets to rescale the projected streams."""

    def read(self, carrier, state, site, native):
        native = native | {"unembed": torch.ones_like(native["unembed"])} if site.kind == "final" else native
        return super().read(carrier, state, site, native)


class NoRoot(AltUp):
    """The square root of 2 under the sum of attention and LAuReL is forgotten."""

    def write(self, carrier, state, site, native, *values):
        streams, moved = super().write(carrier, state, site, native, *values)
        return streams, moved * 2**0.5 if site.kind == "attn" else moved


@pytest.mark.parametrize("kind", [LowerOff, Transposed, AllButActive, PlainMean, NoRoot])
def test_gemma3n_with_a_mistake_does_not_close(kind, monkeypatch):
    """A reading of AltUp that only closes because the check is blind."""
    mistake = broken("gemma3n_active2", lambda connection, _: as_kind(connection, kind), monkeypatch)
    assert mistake in ("off", "refused")


def test_gemma3n_with_the_wrong_active_stream_does_not_close(monkeypatch):
    """Stream 0 taken for the active one."""

    def change(connection, _):
        connection.active = 0
        return connection

    assert broken("gemma3n_active2", change, monkeypatch) in ("off", "refused")


def test_gemma3n_streams_start_with_one_size_and_its_first_site_only_writes():
    """Embedding sources in another order than the streams, or the raw projections taken for them."""
    trace = captured(built(TINY["gemma3n"]))
    names = ["embed", "stream1.embed", "stream2.embed", "stream3.embed"]
    assert trace["source"].values[:4].tolist() == names
    norms = trace["source_norm"].sel(source=names).values
    np.testing.assert_allclose(norms, norms[:, :1].repeat(4, 1), rtol=1e-5)
    assert trace["reader"].values[0] == "0.attn"


def test_gemma3n_readers_inside_a_layer_have_scalar_weights_and_the_readout_has_not():
    """Projected sources of the readout collapsed to scalars without saying what that discards."""
    trace = captured(built(TINY["gemma3n"]))
    discarded = trace["discarded"]
    assert float(discarded.sel(reader=["0.attn", "0.mlp", "1.attn"]).max()) < 1e-3
    assert float(discarded.sel(reader="final").median()) > 0.3


def hidden(name):
    model = built(TINY[name])
    trace = captured(model, keep=("hidden",))
    return model, trace, torch.tensor(trace["source_hidden"].values), torch.tensor(trace["reader_hidden"].values)


def test_muse_spark_follows_its_closed_form():
    """A gate taken from the wrong sublayer: ``beta_i prod_{k > i} alpha_k`` with ``alpha^2 = 1 - beta^2``."""
    model, trace, sources, readers = hidden("muse_spark")
    names = ("post_attention_residual_gate", "post_feedforward_residual_gate")
    gates = [getattr(layer, name) for layer in model.layers for name in names]
    with torch.no_grad():
        beta = torch.stack([torch.sigmoid(gate.gate / gate.temperature) for gate in gates])
    beta = torch.cat([torch.ones_like(beta[:1]), beta])
    alpha = (1 - beta**2).clamp_min(1e-3).sqrt()
    weight = torch.stack([beta[i] * alpha[i + 1 :].prod(0) for i in range(len(beta))])
    terms = weight * sources
    torch.testing.assert_close(terms.sum(1), readers[:, -1], rtol=1e-4, atol=1e-4)
    expected = terms.norm(dim=-1).numpy()
    np.testing.assert_allclose(trace["contribution_norm"].sel(reader="final").values, expected, rtol=1e-4)


def swapped(connection, layout):
    """Weights of attention and MLP change places."""
    for weights in (connection.keep, connection.add):
        for site in [s for s in layout.anatomy.sites if s.kind == "attn" and s.index in weights]:
            weights[site.index], weights[site.index + 1] = weights[site.index + 1], weights[site.index]
    return connection


def without_keep(connection, _):
    """Nothing is weighed on the carry."""
    connection.keep = {}
    return connection


@pytest.mark.parametrize("change", [swapped, without_keep])
@pytest.mark.parametrize("name", ["muse_spark", "zaya", "minimax", "beam", "doge"])
def test_static_weights_at_the_wrong_place_do_not_close(name, change, monkeypatch):
    """Gates of attention taken for those of the MLP, or a carry that is not weighed."""
    assert broken(name, change, monkeypatch) in ("off", "refused")


class NoConstants(Weighted):
    """The constants that scaling adds are left out."""

    def write(self, carrier, state, site, native, *values):
        values = values if not site.views else values[:1]
        return super().write(carrier, state, site, native, *values)


def test_zaya_without_its_constants_does_not_close(monkeypatch):
    """Biases that no source stands for."""
    mistake = broken("zaya", lambda connection, _: as_kind(connection, NoConstants), monkeypatch)
    assert mistake in ("off", "refused")


def test_zaya_constants_do_not_depend_on_the_token():
    """A constant source taken from a write."""
    trace = captured(built(TINY["zaya"]))
    constants = [name for name in trace["source"].values if name.endswith(".bias")]
    assert len(constants) == 7
    norms = trace["source_norm"].sel(source=constants).values
    assert (norms == norms[:1]).all()
    assert (norms > 0).all()


def test_gemma4_weight_is_the_product_of_the_scalars_passed():
    """A scalar on the write alone, or of the wrong layer: whole streams are scaled by 0.6, -1.3 and 0.8."""
    final = captured(built(TINY["gemma4"]))["weight"].sel(reader="final")
    after = {-1: 0.6 * -1.3 * 0.8, 0: 0.6 * -1.3 * 0.8, 1: -1.3 * 0.8, 2: 0.8}
    expected = [after[layer] for layer in final["source_layer"].values]
    np.testing.assert_allclose(final.values, np.broadcast_to(expected, final.shape), rtol=1e-6)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe"])
def test_gemma4_with_the_scalar_on_the_write_alone_does_not_close(name, monkeypatch):
    """``layer_scalar`` taken for a weight of the last write of a layer."""
    assert broken(name, without_keep, monkeypatch) in ("off", "refused")


class NormedForReading(NormedCarry):
    """The norm is taken for that of a pre-norm layer: read, but not carried on."""

    def read(self, carrier, state, site, native):
        inputs, _ = super().read(carrier, state, site, native)
        return inputs, state


def test_minimax_without_its_norm_on_the_carry_does_not_close(monkeypatch):
    """Pre-norm taken for granted."""
    mistake = broken("minimax", lambda connection, _: as_kind(connection, NormedForReading), monkeypatch)
    assert mistake in ("off", "refused")


def test_nanochat_reads_out_at_the_second_call_of_its_norm(monkeypatch):
    """The norm of the embedding taken for that of the readout."""
    model = built(TINY["nanochat"])
    layout = find_layout(model)
    assert [tap.call for tap in layout.taps if tap.path == "model.norm"] == [1]
    norm = captured(model)["source_norm"].sel(source="embed").values
    np.testing.assert_allclose(norm, 32**0.5, rtol=1e-3)  # so source 0 is the normed embedding
    taps = tuple(replace(tap, call=0) for tap in layout.taps)
    assert verdict_of(model, replace(layout, taps=taps), monkeypatch) == "refused"


def test_beam_gives_all_writes_the_same_weight():
    """A count of additions that starts at 1 or misses one: the last of 6 additions has k = 7."""
    final = captured(built(TINY["beam"]))["weight"].sel(reader="final").values
    np.testing.assert_allclose(final, 7**-0.5, rtol=1e-6)


def test_doge_with_experts_closes_too():
    """An MLP that returns a tuple. Its experts mix the tokens of a batch, so it is not in the table of all families."""
    model = doge(moe=True)
    assert find_layout(model).family == "doge"
    summary = ri.fidelity_summary(captured(model))
    assert summary["verdict"] == "exact"
    assert summary["worst"] <= FAMILIES["doge"].error


def test_foreign_models_are_not_mistaken_for_these_families():
    """A family that recognises by a word in a name."""
    mine = {tiny.family for tiny in CASES}
    for tiny in CASES:
        model = built(tiny)
        found = [name for name in mine if FAMILIES[name].recognise(model) is not None]
        assert found == [tiny.family], tiny.name
    empty = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
    assert all(FAMILIES[name].recognise(empty) is None for name in mine)

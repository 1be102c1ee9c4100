"""Families with loops, late writes and the embedding read again: deliberate mistakes, and facts worked out by hand."""

import numpy as np
import pytest
import torch
from mutation import TINY, as_kind, broken
from test_families import PROMPTS, built, captured

from resinspect.families.dory import Sphere
from resinspect.families.hrm_text import TwoStates
from resinspect.families.longcat_flash import Shortcut
from resinspect.families.neomme import InitialMix


class Prompt(Shortcut):
    """The experts' write enters at once."""

    def write(self, carrier, state, site, native, *values):
        carry, _ = state
        return sum(values, carry), None


def test_longcat_flash_with_experts_in_time_does_not_close(monkeypatch):
    """A write that is taken to enter where it is computed."""
    mistake = broken("longcat_flash", lambda connection, _: as_kind(connection, Prompt), monkeypatch)
    assert mistake in ("off", "refused")


def test_longcat_flash_experts_are_read_from_the_next_layer_on():
    """A delayed write that is never, or too early, in W."""
    experts = captured(built(TINY["longcat_flash"]))["weight"].sel(source="0.moe").isel(token=0)
    expected = {"0.attn_1": 0, "0.mlp_1": 0, "1.attn_0": 1, "1.mlp_0": 1, "1.attn_1": 1, "1.mlp_1": 1, "final": 1}
    assert {name: int(experts.sel(reader=name)) for name in expected} == expected
    assert np.isnan(experts.sel(reader=["0.attn_0", "0.mlp_0"]).values).all()


class CarriedMix(InitialMix):
    """The mix is taken to go on as the carry."""

    def read(self, carrier, state, site, native):
        inputs, (_, embedding) = super().read(carrier, state, site, native)
        return inputs, (inputs[0], embedding)


def test_neomme_with_its_mix_on_the_carry_does_not_close(monkeypatch):
    """What attention reads taken for the residual itself."""
    assert broken("neomme", lambda connection, _: as_kind(connection, CarriedMix), monkeypatch) in ("off", "refused")


def test_neomme_attention_reads_the_embedding_twice():
    """Lambdas the wrong way round: l0 = 0.7, l1 = -0.9, 0.1, 1.1, and every write has 6^-1/2."""
    weight = captured(built(TINY["neomme"]))["weight"].isel(token=0)
    embedding = weight.sel(source="embed", reader=["0.attn", "1.attn", "2.attn", "2.mlp", "final"]).values
    np.testing.assert_allclose(embedding, [-0.2, 0.8, 1.8, 1, 1], rtol=1e-5)
    write = weight.sel(source="0.mlp", reader=["1.attn", "1.mlp", "final"]).values
    np.testing.assert_allclose(write, np.array([0.7, 1, 1]) * 6**-0.5, rtol=1e-5)


class NoEntry(Sphere):
    """Passes of the loop start without what entered it."""

    def read(self, carrier, state, site, native):
        return super().read(carrier, state, site, {name: v for name, v in native.items() if name != "entry"})


class Added(Sphere):
    """The write is added, not approached."""

    def write(self, carrier, state, site, native, *values):
        carry, entered = state
        return carry + carrier.channels(self.rates[site.kind, site.layer], *values), entered


@pytest.mark.parametrize("kind", [NoEntry, Added])
def test_dory_with_a_mistake_does_not_close(kind, monkeypatch):
    """A loop that forgets its start, or an addition in place of an interpolation."""
    assert broken("dory", lambda connection, _: as_kind(connection, kind), monkeypatch) in ("off", "refused")


def test_dory_runs_its_middle_layers_three_times_on_the_sphere():
    """Loop passes that share a name, or inputs taken before they are put on the sphere."""
    trace = captured(built(TINY["dory"]))
    names = [
        f"{layer}.{kind}" for layer in ("0", "1", "2", "1@1", "2@1", "1@2", "2@2", "3") for kind in ("attn", "mlp")
    ]
    assert trace["reader"].values.tolist() == [*names, "final"]
    np.testing.assert_allclose(trace["reader_norm"].sel(reader=names).values, 1, rtol=1e-4)
    np.testing.assert_allclose(trace["source_norm"].sel(source=names).values, 1, rtol=1e-2)


class Unnormed(TwoStates):
    """States are taken before the norm of their stack."""

    def write(self, carrier, state, site, native, *values):
        native = {name: torch.ones_like(value) for name, value in native.items()}
        return super().write(carrier, state, site, native, *values)


class Forgetful(TwoStates):
    """The low stack starts from the high state alone."""

    def read(self, carrier, state, site, native):
        carry, low, high = state
        if site.views and site.layer < self.layers and low is not None:
            state = carry, low * 0, high
        return super().read(carrier, state, site, native)


@pytest.mark.parametrize("kind", [Unnormed, Forgetful])
def test_hrm_text_with_a_mistake_does_not_close(kind, monkeypatch):
    """A state that skips its norm, or a recurrence that forgets."""
    assert broken("hrm_text", lambda connection, _: as_kind(connection, kind), monkeypatch) in ("off", "refused")


def test_hrm_text_starts_from_both_states_and_its_runs_have_names_of_their_own():
    """Runs in the wrong order: low twice, high once, and again."""
    trace = captured(built(TINY["hrm_text"]), PROMPTS[:1])
    first = [name for name in trace["reader"].values if name.endswith(".attn")]
    assert first == [
        *("0.attn", "1.attn", "0@1.attn", "1@1.attn", "2.attn", "3.attn"),
        *("0@2.attn", "1@2.attn", "0@3.attn", "1@3.attn", "2@1.attn", "3@1.attn"),
    ]
    weight = trace["weight"].isel(token=0)
    assert weight.sel(reader="0.attn", source=["embed", "z_L_init"]).values.tolist() == [1, 1]
    assert weight.sel(reader="final", source=["2@1.attn", "3@1.mlp"]).values.tolist() == [1, 1]
    assert float(weight.sel(reader="0@1.attn", source="embed")) > 1  # kept as the high state, and once in the low

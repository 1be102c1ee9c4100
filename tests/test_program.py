"""The linear core by itself: closed forms first, then properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resinspect.anatomy import decoder_anatomy
from resinspect.program import COEFFICIENT, TERM, VECTOR, CarrierError, Connection, Unroll, one_hot, solve, terms

EPS = torch.finfo(torch.float64).eps


class ScaledCarry(Connection):
    """h' = a h + b v, whose weights are b_s times the product of later a."""

    def write(self, carrier, state, site, native, value):
        return carrier.scale(native["a"], state) + carrier.scale(native["b"], value)


class PostNorm(Connection):
    """h' = LayerNorm(h + v) with frozen statistics: a norm on the carry."""

    def route_write(self, state, site, value):
        return {"rstd": ((state + value).var(-1, unbiased=False) + 1e-5).rsqrt()}

    def write(self, carrier, state, site, native, value):
        return carrier.normalise(state + value, native["rstd"], self.gain, centre=True)


class Delta(Connection):
    """h' = (I - beta k k^T) h + v: a rank-one operator on the carry."""

    def route_write(self, state, site, value):
        key = value / value.norm(dim=-1, keepdim=True)
        return {"key": key, "beta": torch.sigmoid(state.mean(-1))}

    def write(self, carrier, state, site, native, value):
        return carrier.rank_one(state, native["beta"], native["key"]) + value


class Channels(Connection):
    """h' = g h + v with one gate per channel."""

    def route_write(self, state, site, value):
        return {"gate": torch.sigmoid(state)}

    def write(self, carrier, state, site, native, value):
        return carrier.channels(native["gate"], state) + value


def simulate(connection, anatomy, writes):
    """The forward on given writes ``(token, S, d)``: natives and reader inputs."""
    state, natives, read = connection.start(VECTOR, writes[:, 0]), [], []
    for site in anatomy.sites:
        native = connection.route_read(state, site)
        inputs, state = connection.read(VECTOR, state, site, native)
        read += inputs
        if site.kind != "final":
            value = writes[:, anatomy.sources_of(site)[0]]
            native = native | connection.route_write(state, site, value)
            state = connection.write(VECTOR, state, site, native, value)
        natives.append(native)
    return natives, torch.stack(read, 1)


def unrolled(connection, anatomy, carrier, source, natives):
    unroll, rows = Unroll(connection, anatomy, carrier, source), []
    for site, native in zip(anatomy.sites, natives, strict=True):
        rows += unroll.read({})
        if site.kind != "final":
            unroll.write(native)
    return rows


def test_scaled_carry_has_its_closed_form():
    """A program that applies a write before scaling the carry, or one step late."""
    anatomy = decoder_anatomy(2)
    a, b = torch.tensor([[0.5, 2.0, 3.0, 0.25]] * 2), torch.tensor([[1.0, -1.0, 2.0, 4.0]] * 2)
    natives = [{"a": a[:, i], "b": b[:, i]} for i in range(4)] + [{}]
    rows = unrolled(ScaledCarry(), anatomy, COEFFICIENT, one_hot(5), natives)
    torch.testing.assert_close(rows[0], torch.tensor([1.0, 0, 0, 0, 0]))
    expected = [0.5 * 2 * 3 * 0.25, 1 * 2 * 3 * 0.25, -1 * 3 * 0.25, 2 * 0.25, 4.0]
    torch.testing.assert_close(rows[4], torch.tensor([expected] * 2))


@pytest.mark.parametrize("scheme", [PostNorm, Delta, Channels])
def test_terms_close_where_coefficients_cannot(scheme):
    """An operator applied to the sum but not to each term, or applied to coefficients in silence."""
    torch.manual_seed(0)
    anatomy = decoder_anatomy(3)
    connection = scheme()
    connection.gain = torch.randn(8, dtype=torch.float64)
    writes = torch.randn(4, len(anatomy.sources), 8, dtype=torch.float64)
    natives, read = simulate(connection, anatomy, writes)
    with pytest.raises(CarrierError, match="term carrier"):
        unrolled(connection, anatomy, COEFFICIENT, one_hot(7, dtype=torch.float64), natives)
    rows = torch.stack(unrolled(connection, anatomy, TERM, terms(writes), natives), 1)
    torch.testing.assert_close(rows.sum(-2), read, rtol=1e-12, atol=1e-12)
    assert (rows[:, 0, 1:] == 0).all()


@settings(max_examples=40, deadline=None)
@given(sources=st.integers(1, 8), extra=st.integers(0, 20), seed=st.integers(0, 2**16))
def test_solve_finds_the_weights(sources, extra, seed):
    """A prefix that is off by one, or a scale applied on one side only."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (sources, 1), generator=generator)
    writes = torch.randn(3, sources, sources + extra + 4, dtype=torch.float64, generator=generator) * scale
    prefix = torch.randint(1, sources + 1, (5,), generator=generator).tolist()
    weight = torch.randn(3, 5, sources, dtype=torch.float64, generator=generator)
    for i, p in enumerate(prefix):
        weight[:, i, p:] = 0
    solution = solve(writes, weight @ writes, prefix, eps=EPS)
    for i, p in enumerate(prefix):
        assert solution.weight[:, i, p:].isnan().all()
        assert solution.weight_error[:, i, p:].isnan().all()
        assert not solution.identifiable[:, i, p:].any()
        within = (solution.weight - weight)[:, i, :p].abs() <= solution.weight_error[:, i, :p]
        assert within.all()


def test_solve_names_what_a_dependence_hides():
    """Dropping one of two equal sources and giving its weight to the other: an invented number."""
    torch.manual_seed(0)
    writes = torch.randn(2, 5, 20, dtype=torch.float64)
    writes[1, 3] = 2 * writes[1, 1]
    weight = torch.ones(2, 2, 5, dtype=torch.float64)
    weight[:, 0, 3:] = 0
    solution = solve(writes, weight @ writes, [3, 5], eps=EPS)
    assert solution.identifiable[0].sum() == 8, "token 0 has no dependence"
    assert solution.identifiable[1, 0, :3].all(), "the first reader comes before the dependence"
    assert solution.identifiable[1, 1].tolist() == [True, False, True, False, True]
    torch.testing.assert_close(solution.weight[1, 1][[0, 2, 4]], torch.ones(3, dtype=torch.float64))
    fitted = solution.weight[1, 1] @ writes[1]
    torch.testing.assert_close(fitted, writes[1].sum(0), rtol=1e-6, atol=1e-6)


def test_solve_sees_through_writes_that_cancel():
    """A massive write that a later one undoes: weight 0 for both fits as well, and looks precise."""
    torch.manual_seed(0)
    massive, other = torch.zeros(8), torch.randn(8)
    massive[0], other[0] = 2.0**20, 0
    writes = torch.stack([other, massive, -massive])[None]
    solution = solve(writes, writes.sum(1, keepdim=True), [3], eps=torch.finfo(torch.float32).eps)
    assert solution.identifiable.tolist() == [[[True, False, False]]]
    assert abs(float(solution.weight[0, 0, 0]) - 1) <= float(solution.weight_error[0, 0, 0])


DISTORTIONS = {
    "none": lambda v, noise: v,
    "scales": lambda v, noise: v * 10.0 ** torch.randint(-3, 4, (*v.shape[:2], 1), generator=noise),
    "nearly equal": lambda v, noise: torch.cat([v[:, :-1], v[:, :1] + 1e-4 * v[:, -1:]], 1),
    "cancelling": lambda v, noise: torch.cat([1e5 * v[:, :1], v[:, 1:-1], -1e5 * v[:, :1]], 1),
    "massive channel": lambda v, noise: v * torch.where(torch.arange(v.shape[-1]) == 0, 1e4, 1.0),
    "a sum of two": lambda v, noise: torch.cat([v[:, :-1], v[:, :2].sum(1, keepdim=True)], 1),
}


@settings(max_examples=150, deadline=None)
@given(
    sources=st.integers(2, 16),
    width=st.integers(4, 60),
    distortion=st.sampled_from(list(DISTORTIONS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**16),
)
def test_identified_weights_are_within_their_bound(sources, width, distortion, dtype, seed):
    """A bound that is too small on ill-conditioned writes, as a model's own rounding forms the inputs."""
    generator = torch.Generator().manual_seed(seed)
    writes = DISTORTIONS[distortion](torch.randn(3, sources, width, generator=generator), generator).to(dtype)
    weight = torch.randn(3, sources, generator=generator).to(dtype)
    inputs = (weight[..., None] * writes).cumsum(1)
    solution = solve(writes, inputs, range(1, sources + 1), eps=torch.finfo(dtype).eps)
    error = (solution.weight - weight[:, None].double()).abs()
    assert (error <= solution.weight_error)[solution.identifiable].all()


def test_solve_leaves_a_zero_source_open():
    """0/0 in the scaling, which would make a whole token NaN."""
    torch.manual_seed(0)
    writes = torch.randn(2, 4, 20)
    writes[0, 2] = 0
    solution = solve(writes, torch.ones(2, 1, 4) @ writes, [4], eps=torch.finfo(torch.float32).eps)
    assert solution.identifiable.tolist() == [[[True, True, False, True]], [[True] * 4]]
    assert solution.weight_error[0, 0, 2] == torch.inf


@pytest.mark.parametrize("sources", [9, 70])
def test_solve_identifies_nothing_with_more_sources_than_channels(sources):
    """Least squares always fits then, and would look perfect; or noise divided by noise, over and over, overflows."""
    torch.manual_seed(0)
    writes = torch.randn(3, sources, 6, dtype=torch.float64)
    inputs = torch.stack([writes[:, :4].sum(1), writes.sum(1)], 1)
    solution = solve(writes, inputs, [4, sources], eps=EPS)
    assert not solution.identifiable[:, 1].any()
    assert solution.weight[:, 1].isfinite().all()
    torch.testing.assert_close(solution.weight[:, 1:] @ writes, inputs[:, 1:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(solution.weight[:, 0, :4], torch.ones(3, 4, dtype=torch.float64))
    assert solution.identifiable[:, 0, :4].all()


def test_solve_does_not_trust_a_system_that_does_not_close():
    """A missing source: the fit's leftover bounds how wrong every weight may be."""
    torch.manual_seed(0)
    writes = torch.randn(3, 5, 40, dtype=torch.float64)
    solution = solve(writes[:, :4], writes.sum(1, keepdim=True), [4], eps=EPS)
    assert not solution.identifiable.any()
    assert (solution.weight_error >= (solution.weight - 1).abs()).float().mean() > 0.5


def test_unknown_connection_is_named():
    """A KeyError instead of a sentence."""
    from resinspect.errors import OptionError
    from resinspect.models import build_connection

    with pytest.raises(OptionError, match="choose one of pre_ln"):
        build_connection("residual", num_layers=1, hidden_size=8)
    with pytest.raises(OptionError, match="strems"):
        build_connection("hyper_connections", num_layers=1, hidden_size=8, strems=2)

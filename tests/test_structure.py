"""What an architecture guarantees, hence must never be reported as a finding; and one duality."""

import numpy as np
import pytest
import torch
from cases import CASES, NAMED, build, prompts_for

import resinspect as ri
from resinspect.anatomy import Site, decoder_anatomy
from resinspect.models import ResidualConfig
from resinspect.models.connections import HyperConnections, ShortSWA
from resinspect.models.connections.mhc import sinkhorn
from resinspect.models.sublayers import WindowAttention
from resinspect.program import COEFFICIENT, Unroll, one_hot


def traced(name):
    model = build(NAMED[name], "random", torch.float64)
    return ri.capture(model, prompts_for(model))


def test_row_stochastic_mixing_keeps_the_embedding():
    """mHC cannot erase the embedding: each stream keeps coefficient 1, so a reader's weight is the sum of its reads."""
    trace = traced("mhc")
    np.testing.assert_allclose(trace["native_mix"].values[:, :-1].sum(-1), 1, rtol=1e-12)
    read = trace["native_pre"].sum("stream").values[:, :-1]
    np.testing.assert_allclose(trace["weight"].sel(source="embed").values[:, :-1], read, rtol=1e-12)


def unrolled(mix, pre, post):
    """Rows of W and the last streams' coefficients of hyper-connections with given matrices per site."""
    anatomy = decoder_anatomy(len(mix) // 2)
    connection = HyperConnections(num_sites=len(anatomy.sites), hidden_size=4, streams=mix.shape[-1])
    unroll = Unroll(connection, anatomy, COEFFICIENT, one_hot(len(anatomy.sources), dtype=torch.float64))
    rows = []
    for i in range(len(mix)):
        rows += unroll.read({"pre": pre[i], "post": post[i], "mix": mix[i]})
        unroll.write()
    return rows + list(unroll.read({})), unroll.state


def random_natives(sites, streams, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sites, streams, streams, dtype=torch.float64, generator=generator)
    pre, post = torch.rand(2, sites, streams, dtype=torch.float64, generator=generator)
    return sinkhorn(logits, 500), pre, post


def test_column_stochastic_mixing_with_a_sum_readout_shows_only_the_writes():
    """Whatever the mixing does, the final row is the sum of each write's gains, and n for the embedding."""
    mix, pre, post = random_natives(12, 4)
    mix = mix * torch.rand(12, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mix = mix / mix.sum(-2, keepdim=True)
    rows, _ = unrolled(mix, pre, post)
    expected = torch.cat([torch.tensor([4.0], dtype=torch.float64), post.sum(-1)])
    torch.testing.assert_close(rows[-1], expected, rtol=1e-12, atol=1e-12)


def test_doubly_stochastic_products_forget_the_streams():
    """The spread of an old write over streams shrinks at least as the second singular values multiply."""
    mix, pre, post = random_natives(80, 4)
    _, state = unrolled(mix, pre, post)
    spread = (state - state.mean(0)).norm(dim=0)
    second = torch.linalg.svdvals(mix)[:, 1]
    for source in range(1, 80):
        written = post[source - 1]
        bound = (written - written.mean()).norm() * second[source:].prod()
        assert spread[source] <= bound + 1e-12
    assert spread[1] < 1e-6 < spread[79]


@pytest.mark.parametrize("name", [case.checkpoint for case in CASES if case.connection == "attnres"])
def test_softmax_reads_over_writes_are_convex(name):
    """No reader's input is longer than the longest write: bounded growth is structure, not training."""
    trace = traced(name)
    np.testing.assert_allclose(trace["weight"].sum("source").values, 1, rtol=1e-12)
    assert float(trace["weight"].min()) >= 0
    for reader, prefix in zip(trace["reader"].values, trace["reader_prefix"].values, strict=True):
        longest = trace["source_norm"].values[:, :prefix].max(1)
        assert (trace["reader_norm"].sel(reader=reader).values <= longest * (1 + 1e-12)).all()


def test_softmax_reads_over_blocks_are_convex_in_block_sums():
    """Native weights of block AttnRes are shares; rows of W are not, and must not be read as such."""
    trace = traced("block_attnres")
    alpha = trace["native_alpha"]
    np.testing.assert_allclose(alpha.sum("slot").values, 1, rtol=1e-12)
    assert float(alpha.min()) >= 0
    # What is read is no longer than the longest sum of any sources, of which blocks are some.
    longest = trace["source_norm"].values.cumsum(-1)[:, trace["reader_prefix"].values - 1]
    assert (trace["reader_norm"].values <= longest * (1 + 1e-12)).all()
    assert float(trace["weight"].sel(reader="final").sum("source").max()) > 1.5


def test_depth_mixing_is_windowed_attention_on_the_other_axis():
    """Residual Stream Duality (essay 003): the same operator, the axis of depth and that of tokens exchanged."""
    torch.manual_seed(0)
    width, depth, window = 16, 9, 4
    config = ResidualConfig(hidden_size=width, num_attention_heads=1, num_hidden_layers=1)
    connection = ShortSWA(num_sites=4, hidden_size=width, window=window)
    mixer = WindowAttention(config, Site(0, 0, "swa"), connection).double()
    bank = torch.randn(3, 5, depth, width, dtype=torch.float64)
    still = torch.ones(1, 1, 1, width // 2, dtype=torch.float64), torch.zeros(1, 1, 1, width // 2, dtype=torch.float64)
    with torch.no_grad():
        over_tokens = mixer((bank.flatten(0, 1),), still, None, None).unflatten(0, (3, 5))
        normed = mixer.norms[0](bank)
        q, k, v = mixer.q(normed), mixer.k(normed), mixer.v(normed)
        over_depth = torch.empty_like(bank)
        for level in range(depth):
            seen = slice(max(0, level - window + 1), level + 1)
            alpha = (torch.einsum("btd,btsd->bts", q[:, :, level], k[:, :, seen]) / width**0.5).softmax(-1)
            over_depth[:, :, level] = mixer.o(torch.einsum("bts,btsd->btd", alpha, v[:, :, seen]))
    torch.testing.assert_close(over_tokens, over_depth, rtol=1e-12, atol=1e-12)

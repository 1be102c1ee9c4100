"""Published modules with our weights in them: a scheme that we and our own naive forward read wrongly in the same way.

Each test drives somebody else's connection around our sublayers at random weights and compares logits or states. Where
a module computes in float32 by itself, ``wide`` makes its float32 a float64, so that only rounding of 1e-16 remains.
"""

import importlib.util

import pytest
import torch
from cases import Case, build, prompts_for
from naive import Sublayers
from torch import nn

from resinspect.models.connections.mhc import sinkhorn
from resinspect.program import VECTOR

LAYERS, SITES, WIDTH, STREAMS = 3, 6, 32, 4
EQUAL, FAR = 1e-11, 1e-3
SILENT = torch.ones(1)  # a scale in front of weights that are zero


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def wide(monkeypatch):
    """``Tensor.float`` gives float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


class Call(nn.Module):
    """A function where a published model expects a submodule."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args)


def published(module, package):
    return pytest.importorskip(module, reason=f"{package} is not installed, or one of its requirements is not")


def our(connection, **options):
    """Our model at random weights in float64, its independent sublayers, and a batch of two."""
    model = build(Case(connection, connection, options), "random", torch.float64)
    return model, Sublayers(model), torch.tensor(prompts_for(model, (9, 9)))


def fill(module, **values):
    """Set every parameter of a module: none may stay where its initialisation left it."""
    parameters = dict(module.named_parameters())
    assert parameters.keys() == {name.replace("__", ".") for name in values}
    for name, value in values.items():
        parameters[name.replace("__", ".")].copy_(value.reshape(parameters[name.replace("__", ".")].shape))
    return module


def difference(actual, expected):
    """Largest absolute difference, relative to the largest number."""
    assert actual.dtype == expected.dtype == torch.float64
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


def deepseek(model, f, ids, transpose=True, **config):
    """Logits of DeepSeek-V4 with our sublayers inside its layers and the weights of our mHC in its connections."""
    from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4Model

    sizes = {"head_dim": 16, "q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2, "index_head_dim": 16, "vocab_size": 97}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_attention_heads": 2}
    net = DeepseekV4Model(
        DeepseekV4Config(hidden_size=WIDTH, num_hidden_layers=LAYERS, hc_mult=STREAMS, **sizes, **experts, **config)
    ).double()
    # Its mixing matrix is used transposed, and its Sinkhorn starts with rows: both are ours at transposed logits.
    order = torch.arange(STREAMS * (STREAMS + 2))
    if transpose:
        order[2 * STREAMS :] = order[2 * STREAMS :].view(STREAMS, STREAMS).T.flatten()
    c = model.connection
    for i, layer in enumerate(net.layers):
        for site, hc in ((2 * i, layer.attn_hc), (2 * i + 1, layer.ffn_hc)):
            fill(hc, fn=c.weight[site].T[order], base=c.bias[site][order], scale=c.scale[site])
        layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
        layer.self_attn = Call(lambda x, i=i: (f(2 * i + 1, x), None))
        layer.mlp = Call(lambda x, i=i: f(2 * i + 2, x))
    # Its readout is a learned sigmoid per stream; at a bias of 50 that is our plain sum.
    fill(net.hc_head, hc_fn=torch.zeros(STREAMS * STREAMS * WIDTH), hc_base=50 * torch.ones(STREAMS), hc_scale=SILENT)
    net.norm = Call(f.logits)
    return net(inputs_embeds=f.embed(ids)).last_hidden_state


def test_mhc_is_that_of_deepseek_v4(wide):
    """A wrong Sinkhorn order, stream axis or joint norm in mHC.

    The module's own: ``hc_eps`` (0 here) in reads, softmax and Sinkhorn; the learned readout (a plain sum here); and
    the transposed use of its matrix, which our transposed logits undo exactly, after any number of rounds.
    """
    model, f, ids = our("mhc", iterations=3, eps=1e-6)
    logits = model(ids).logits
    settings = {"hc_sinkhorn_iters": 3, "rms_norm_eps": 1e-6}
    assert difference(deepseek(model, f, ids, hc_eps=0.0, **settings), logits) < EQUAL
    assert 1e-8 < difference(deepseek(model, f, ids, hc_eps=1e-6, **settings), logits) < FAR
    assert difference(deepseek(model, f, ids, hc_eps=0.0, transpose=False, **settings), logits) > FAR


def through_streams(package, modules, f, ids):
    expand, collapse = package.get_expand_reduce_stream_functions(STREAMS)
    streams = expand(f.embed(ids))
    for number, module in enumerate(modules, 1):
        read, add = module(streams)
        streams = add(f(number, read))
    return f.logits(collapse(streams))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_hyper_connections_are_those_of_their_package(dynamic):
    """Streams mixed the wrong way round, or weights computed from the wrong stream."""
    package = published("hyper_connections", "hyper-connections")
    model, f, ids = our("hyper_connections", dynamic=dynamic, streams=STREAMS, eps=0.0)
    c = model.connection

    def module(i, mix):
        weight = c.weight[i] if dynamic else torch.zeros(WIDTH, STREAMS + 2)
        return fill(
            package.HyperConnections(STREAMS, dim=WIDTH).double(),
            static_alpha=torch.cat([c.pre[i][:, None], mix], dim=1),
            static_beta=c.post[i],
            dynamic_alpha_fn=weight[:, [0, *range(2, STREAMS + 2)]],
            dynamic_beta_fn=weight[:, 1],
            dynamic_alpha_scale=c.scale_alpha[i] if dynamic else torch.ones(()),
            dynamic_beta_scale=c.scale_beta[i] if dynamic else torch.ones(()),
            norm__gamma=c.gain[i] - 1 if dynamic else torch.zeros(WIDTH),
        )

    logits = model(ids).logits
    right, wrong = ([module(i, m) for i, m in enumerate(mixes)] for mixes in (c.mix, c.mix.mT))
    assert difference(through_streams(package, right, f, ids), logits) < EQUAL
    assert difference(through_streams(package, wrong, f, ids), logits) > FAR


def per_stream_mhc(package, rounds, pre, post, mix, weight, scale, gamma):
    """The package's mHC: ``mix[s, t]`` is the logit from stream s to t, ``weight (width, n + 2)`` as pre, post, mix."""
    return fill(
        package.mHC(STREAMS, dim=WIDTH, sinkhorn_iters=rounds).double(),
        static_alpha=torch.cat([pre[:, None], mix], dim=1),
        static_beta=post,
        dynamic_alpha_fn=weight[:, [0, *range(2, STREAMS + 2)]],
        dynamic_beta_fn=weight[:, 1],
        pre_branch_scale=scale[0],
        h_post_scale=scale[1],
        residual_scale=scale[2],
        norm__gamma=gamma,
    )


@pytest.mark.parametrize(("rounds", "low", "high"), [(500, 0, EQUAL), (1, FAR, 1)])
def test_static_mhc_is_that_of_its_package_once_sinkhorn_converged(wide, rounds, low, high):
    """Pre, post and mixing logits mixed up, or a Sinkhorn with another limit.

    The package's own: it norms columns first as we do, but uses the matrix transposed. So its columns are exact and
    our rows are; both tend to one limit and differ after one round. Its token-dependent part is compared below.
    """
    package = published("hyper_connections", "hyper-connections")
    model, f, ids = our("mhc", streams=STREAMS, iterations=rounds)
    c = model.connection
    c.weight.zero_()
    c.bias.normal_()
    splits = [bias.split([STREAMS, STREAMS, STREAMS**2]) for bias in c.bias]
    silent = {"weight": torch.zeros(WIDTH, STREAMS + 2), "scale": torch.ones(3), "gamma": torch.zeros(WIDTH)}

    def modules(turn):
        mixes = [turn(mix.view(STREAMS, STREAMS)) for *_, mix in splits]
        return [per_stream_mhc(package, rounds, *s[:2], mix, **silent) for s, mix in zip(splits, mixes, strict=True)]

    logits = model(ids).logits
    assert low <= difference(through_streams(package, modules(lambda mix: mix.T), f, ids), logits) < high
    assert difference(through_streams(package, modules(lambda mix: mix), f, ids), logits) > FAR
    logit = c.bias[:, -(STREAMS**2) :].unflatten(-1, (STREAMS, STREAMS))
    inner = importlib.import_module("hyper_connections.manifold_constrained_hyper_connections")
    assert difference(inner.sinkhorn_knopps(logit, rounds), sinkhorn(logit, rounds)) < EQUAL


def test_dynamic_mhc_is_that_of_its_package_at_streams_of_equal_length(wide):
    """A token-dependent part with its weights in the wrong order, or scales mixed up.

    The package's own: one norm and one projection per stream, where the paper has one of all streams together. At
    streams of equal length the norms agree, and its projection is ours with blocks of zeros.
    """
    package = published("hyper_connections", "hyper-connections")
    model, _, _ = our("mhc", streams=STREAMS, iterations=500)
    n, c = STREAMS, model.connection
    for site in model.anatomy.sites[:-1]:
        w, gamma = torch.randn(WIDTH, n + 2).double() / 4, torch.randn(WIDTH).double() / 4
        blocks = torch.zeros(n, WIDTH, n * (n + 2)).double()
        for s in range(n):
            blocks[s][:, [s, n + s, *range(2 * n + s, n * (n + 2), n)]] = (1 + gamma)[:, None] * w
        c.weight[site.index] = blocks.flatten(0, 1)
        c.bias[site.index].normal_()
        c.scale[site.index] = torch.tensor([0.7, 1.3, 0.9])
        pre, post, mix = c.bias[site.index].split([n, n, n * n])
        state = nn.functional.rms_norm(torch.randn(2, 5, n, WIDTH).double(), (WIDTH,))
        value = torch.randn(2, 5, WIDTH).double()
        native = c.route_read(state, site)
        ((read,), _) = c.read(VECTOR, state, site, native)
        after = c.write(VECTOR, state, site, native, value)
        for scale, equal in ((c.scale[site.index], True), (c.scale[site.index].flip(0), False)):
            module = per_stream_mhc(package, 500, pre, post, mix.view(n, n).T, w, scale, gamma)
            their_read, add = module(state.permute(0, 2, 1, 3).flatten(0, 1))
            their_after = add(value).unflatten(0, (2, n)).transpose(1, 2)
            for theirs, ours in ((their_read, read), (their_after, after)):
                assert (difference(theirs, ours) < EQUAL) if equal else (difference(theirs, ours) > FAR)


def deep_cross_attention(model, f, ids, first_and_last, slots=lambda x: x):
    """Logits of the package's model around our sublayers. Its norm before the gate's projection is taken out."""
    package = published("deep_cross_attention", "deep-cross-attention")
    net = package.DCAGPT(97, WIDTH, LAYERS, past_layers_k=first_and_last).double()
    net.token_emb, net.norm, net.to_logits = Call(f.embed), nn.Identity(), Call(f.logits)
    for i, block in enumerate(net.dca_blocks):
        block.attn, block.ff = Call(lambda *x, i=i: f(2 * i + 1, *x)), Call(lambda x, i=i: f(2 * i + 2, x))
        block.pre_ff_norm = nn.Identity()
    c = model.connection
    for i, grn in enumerate([*(block.qkv_grn for block in net.dca_blocks), net.final_grn]):
        grn.to_aggregate[0] = nn.Identity()
        fill(grn, bias=slots(c.bias[i]), to_aggregate__1__weight=c.weight[i])
    return net(ids)


def test_dca_is_that_of_its_package():
    """A layer's input added to its output, queries and values mixed up, or a gate from the wrong slot."""
    model, f, ids = our("dca")
    logits = model(ids).logits
    assert difference(deep_cross_attention(model, f, ids, LAYERS), logits) < EQUAL
    assert difference(deep_cross_attention(model, f, ids, LAYERS, lambda b: b.flip(0)), logits) > FAR

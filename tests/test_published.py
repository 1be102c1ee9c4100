"""Published modules with our weights in them: a scheme that both we and our naive forward read wrongly still closes.

Each test drives somebody else's connection around our sublayers at random weights, and has a control that must be far
off. All runs in float64, also where a module asks for float32, so that equal means equal to about 1e-15.
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from cases import NAMED, Case, build, prompts_for
from naive import Sublayers
from torch import nn
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4Model
from transformers.models.inkling2.modeling_inkling2 import Inkling2BlockAttentionResidual, Inkling2TextConfig

from resinspect.models.connections.mhc import sinkhorn
from resinspect.program import VECTOR

LAYERS, WIDTH, N = 3, 32, 4
EQUAL, FAR = 1e-11, 1e-3
right_and_wrong = pytest.mark.parametrize("wrong", [False, True], ids=["right", "control"])


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.no_grad():
        yield
    torch.set_default_dtype(before)


def put(module, **functions):
    """Functions in place of submodules."""
    for name, function in functions.items():
        delattr(module, name)
        setattr(module, name, function)


def our(name, **options):
    """Our model at random weights, its connection, its sublayers by themselves, and a batch of two."""
    case = NAMED[name]
    model = build(Case(case.connection, name, case.options | options), "random", torch.float64)
    return model, model.connection, Sublayers(model), torch.tensor(prompts_for(model, (9, 9)))


def fill(module, values):
    """Set every parameter of a module: none stays where its initialisation left it."""
    parameters = dict(module.named_parameters())
    assert parameters.keys() == values.keys()
    for name, value in values.items():
        parameters[name].copy_(value.reshape(parameters[name].shape))
    return module


def difference(actual, expected):
    """Largest absolute difference, relative to the largest number."""
    assert (actual.shape, actual.dtype, expected.dtype) == (expected.shape, torch.float64, torch.float64)
    return float((actual - expected).abs().max() / expected.abs().max())


def compare(actual, expected, wrong):
    error = difference(actual, expected)
    assert error > FAR if wrong else error < EQUAL


def deepseek_v4(c, f, ids, *, wrong=False, **settings):
    """Logits of DeepSeek-V4 with our sublayers in its layers and our mHC's weights in its connections."""
    small = ("head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "num_attention_heads", "index_head_dim")
    sizes = dict.fromkeys(small, 2) | {"n_routed_experts": 2, "moe_intermediate_size": 8, "vocab_size": 97}
    config = DeepseekV4Config(hidden_size=WIDTH, num_hidden_layers=LAYERS, rms_norm_eps=c.eps, **sizes, **settings)
    net = DeepseekV4Model(config).double()
    order = torch.arange(N * (N + 2))
    order[2 * N :] = order[2 * N :] if wrong else order[2 * N :].view(N, N).T.flatten()
    for i, layer in enumerate(net.layers):
        for site, hc in ((2 * i, layer.attn_hc), (2 * i + 1, layer.ffn_hc)):
            fill(hc, {"fn": c.weight[site].T[order], "base": c.bias[site][order], "scale": c.scale[site]})
        put(layer, input_layernorm=nn.Identity(), post_attention_layernorm=nn.Identity())
        put(layer, self_attn=lambda x, i=i, **_: (f(2 * i + 1, x), None), mlp=lambda x, i=i, **_: f(2 * i + 2, x))
    fill(net.hc_head, {"hc_fn": torch.zeros(N, N * WIDTH), "hc_base": 50 * torch.ones(N), "hc_scale": torch.ones(1)})
    put(net, norm=f.logits)
    return net(inputs_embeds=f.embed(ids)).last_hidden_state


def test_mhc_is_that_of_deepseek_v4():
    """A wrong Sinkhorn order, stream axis or joint norm in mHC.

    Its Sinkhorn starts with rows (the softmax) and its matrix is used transposed: that is ours at transposed logits,
    after any number of rounds, here too few to converge. Its own are ``hc_eps`` (a difference of about 1e-6, here 0)
    and a learned readout, of one sigmoid per stream, that becomes our plain sum at large biases.
    """
    model, *ours = our("mhc", iterations=2)
    logits, exact = model(ours[-1]).logits, {"hc_sinkhorn_iters": 2, "hc_eps": 0.0}
    assert difference(deepseek_v4(*ours, **exact), logits) < EQUAL
    assert EQUAL < difference(deepseek_v4(*ours, **exact | {"hc_eps": 1e-6}), logits) < 1e-4
    assert difference(deepseek_v4(*ours, **exact | {"hc_sinkhorn_iters": 3}), logits) > FAR
    assert difference(deepseek_v4(*ours, **exact, wrong=True), logits) > FAR


def alphas_and_betas(pre, post, mix, weight, gamma):
    """Names of hyper-connections; ``mix[s, t]`` goes from stream s to t, ``weight`` has columns pre, post, mix."""
    alpha, weight_alpha = torch.cat([pre[:, None], mix], dim=1), weight[:, [0, *range(2, N + 2)]]
    dynamic = {"dynamic_alpha_fn": weight_alpha, "dynamic_beta_fn": weight[:, 1], "norm.gamma": gamma}
    return {"static_alpha": alpha, "static_beta": post} | dynamic


@right_and_wrong
@pytest.mark.parametrize("case", ["hyper_connections", "hyper_connections_static"])
def test_hyper_connections_are_those_of_their_package(case, wrong):
    """Streams mixed the wrong way round, or weights computed from the wrong stream. The package's norm has no eps."""
    hyper = pytest.importorskip("hyper_connections")
    model, c, f, ids = our(case, eps=0.0)
    expand, collapse = hyper.get_expand_reduce_stream_functions(N)
    streams = expand(f.embed(ids))
    for i, mix in enumerate(c.mix):
        weight, gamma = (c.weight[i], c.gain[i] - 1) if c.dynamic else (torch.zeros(WIDTH, N + 2), torch.zeros(WIDTH))
        scale = (c.scale_alpha[i], c.scale_beta[i]) if c.dynamic else torch.ones(2)
        values = alphas_and_betas(c.pre[i], c.post[i], mix.T if wrong else mix, weight, gamma)
        scales = dict(zip(("dynamic_alpha_scale", "dynamic_beta_scale"), scale, strict=True))
        read, add = fill(hyper.HyperConnections(N, dim=WIDTH), values | scales)(streams)
        streams = add(f(i + 1, read))
    compare(f.logits(collapse(streams)), model(ids).logits, wrong)


@right_and_wrong
@pytest.mark.parametrize("rounds", [500, 1], ids=["converged", "one-round"])
def test_mhc_is_that_of_hyper_connections_once_converged_at_streams_of_equal_length(rounds, wrong):
    """Logits of reads, writes and mixing in the wrong order, their scales exchanged, or a Sinkhorn with another limit.

    The package's own: it norms and projects each stream by itself, where the paper and we take all of them together.
    At streams of equal length the norms agree, and its projection is ours with blocks of zeros. And while it norms
    columns first, as we do, it uses the matrix transposed, so that its columns are exact and our rows are.
    """
    hyper = pytest.importorskip("hyper_connections")
    model, c, *_ = our("mhc", iterations=rounds)
    for i, site in enumerate(model.anatomy.sites[:-1]):
        weight, gamma, scale = torch.randn(WIDTH, N + 2) / 4, torch.randn(WIDTH) / 4, torch.tensor([0.7, 1.3, 0.9])
        blocks = torch.zeros(N, WIDTH, N * (N + 2))
        for s in range(N):
            blocks[s][:, [s, N + s, *range(2 * N + s, N * (N + 2), N)]] = (1 + gamma)[:, None] * weight
        c.weight[i], c.scale[i] = blocks.flatten(0, 1), scale
        pre, post, mix = c.bias[i].normal_().split([N, N, N * N])
        mix = mix.view(N, N)
        values = alphas_and_betas(pre, post, mix if wrong else mix.T, weight, gamma)
        scales = dict(zip(("pre_branch_scale", "h_post_scale", "residual_scale"), scale, strict=True))
        module = fill(hyper.mHC(N, dim=WIDTH, sinkhorn_iters=rounds), values | scales)
        state, value = nn.functional.rms_norm(torch.randn(2, 5, N, WIDTH), (WIDTH,)), torch.randn(2, 5, WIDTH)
        native = c.route_read(state, site)
        read, add = module(state.transpose(1, 2).flatten(0, 1))
        compare(read, c.read(VECTOR, state, site, native)[0][0], False)
        after = add(value).unflatten(0, (2, N)).transpose(1, 2)
        compare(after, c.write(VECTOR, state, site, native, value), wrong or rounds == 1)
        compare(hyper.manifold_constrained_hyper_connections.sinkhorn_knopps(mix, rounds), sinkhorn(mix, rounds), False)


@right_and_wrong
@pytest.mark.parametrize("case", ["dca", "dca_window"])
def test_dca_is_that_of_its_package(case, wrong):
    """A layer's input added to its output, queries and values exchanged, or a gate on the wrong slot.

    The package's own: a norm in front of the gates' projection (taken out here, tested below), and a window that drops
    the layers between the first and the last ones, where ours has their sum (here behind closed gates).
    """
    dca = pytest.importorskip("deep_cross_attention")
    model, c, f, ids = our(case)
    net = dca.DCAGPT(97, WIDTH, LAYERS, c.window or LAYERS)
    put(net, token_emb=f.embed, norm=nn.Identity(), to_logits=f.logits)
    for i, block in enumerate(net.dca_blocks):
        put(block, attn=lambda *x, i=i: f(2 * i + 1, *x), pre_ff_norm=nn.Identity(), ff=lambda x, i=i: f(2 * i + 2, x))
    for grn, bias, weight in zip([*(b.qkv_grn for b in net.dca_blocks), net.final_grn], c.bias, c.weight, strict=True):
        if c.window:
            bias[:, 1:-1] = weight[:] = 0
        kept = bias[:, [0, -1]] if c.window and bias.shape[1] > 2 else bias
        grn.to_aggregate[0] = nn.Identity()
        fill(grn, {"bias": kept.flip(0, 1) if wrong else kept, "to_aggregate.1.weight": weight})
    compare(net(ids), model(ids).logits, wrong)


@right_and_wrong
def test_dca_gate_is_that_of_its_package_at_tokens_of_unit_length(wrong):
    """A gate whose ReLU, bias or sum over slots is not theirs; at unit length their norm only scales its weight."""
    dca = pytest.importorskip("deep_cross_attention")
    model, c, *_ = our("dca")
    for layer, site in enumerate(model.anatomy.sites[:-1:2]):
        slots, gain = nn.functional.rms_norm(torch.randn(layer + 1, 2, 5, WIDTH), (WIDTH,)), torch.rand(WIDTH)
        weights = {"to_aggregate.0.weight": gain, "to_aggregate.1.weight": c.weight[layer]}
        grn = fill(dca.GRN(WIDTH, layer + 1, num_outputs=3), {"bias": c.bias[layer]} | weights)
        c.weight[layer] *= 1 if wrong else gain
        state = (tuple(slots), None, None)
        compare(torch.stack(c.read(VECTOR, state, site, c.route_read(state, site))[0]), grn(slots), wrong)


def flash_attn_res(block_size, eps):
    """The package's PyTorch reference. It lies beside kernels that need Triton, and its imports are missing."""
    if (found := importlib.util.find_spec("flash_attn_res")) is None:
        pytest.skip("flash-attn-res is not installed")
    path = f"{found.submodule_search_locations[0]}/experimental/torch.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    exact = {"float32": torch.float64, "bfloat16": torch.float64, "compile": lambda **_: lambda function: function}
    constants = {"EPS": eps, "DTYPE": torch.float64, "BLOCK_SIZE": block_size}
    vars(module).update(torch=SimpleNamespace(**vars(torch) | exact), F=nn.functional, **constants)
    spec.loader.exec_module(module)
    return module


@right_and_wrong
@pytest.mark.parametrize("forward", ["paper_forward", "torch_compile_phases_forward"])
@pytest.mark.parametrize(("case", "block_size"), [("attnres", 1), ("block_attnres", 4)])
def test_attnres_is_that_of_flash_attn_res(case, block_size, forward, wrong):
    """A key norm, block boundary, partial sum or final query that is not theirs, in one softmax or in two phases."""
    model, c, f, ids = our(case)
    query = torch.cat([torch.randn(1, WIDTH), c.query.flip(0) if wrong else c.query])
    layers = [lambda x, i=i: f(i + 1, x) for i in range(2 * LAYERS)]
    final = getattr(flash_attn_res(block_size, c.eps), forward)(f.embed(ids), query, layers)
    compare(f.logits(final), model(ids).logits, wrong)


@right_and_wrong
def test_block_attnres_weights_are_those_of_inkling2(wrong):
    """Weights of another query or key. Its own: it divides scores by the root of the width, and norms values too."""
    model, c, *_ = our("block_attnres")
    config = Inkling2TextConfig(hidden_size=WIDTH)
    config._attn_implementation = "sdpa"  # the eager softmax is in float32
    for i, site in enumerate(model.anatomy.sites[1:]):
        slots = torch.randn(2 + i // 3, 2, 5, WIDTH)
        query = c.query[i - 1 if wrong else i] * WIDTH**0.5
        module = fill(Inkling2BlockAttentionResidual(config).double(), {"query": query})
        (read,) = module(slots[:-1].movedim(0, -2), slots[-1])
        alpha = c.route_read((tuple(slots[:-1]), slots[-1]), site)["alpha"]
        compare(VECTOR.combine(alpha, nn.functional.rms_norm(slots, (WIDTH,), eps=c.eps)), read, wrong)


@right_and_wrong
@pytest.mark.parametrize("case", ["denseformer", "denseformer_2x2"])
def test_denseformer_is_that_of_its_authors(case, wrong):
    """An average over other outputs, in another order, or before the layer instead of after it."""
    authors = pytest.importorskip("denseformer", reason="denseformer is in no index, only in its authors' repository")
    model, c, f, ids = our(case)
    dwa = authors.DWAModules(LAYERS, c.dilation, c.period)
    fill(dwa, {f"alphas.{int(i) - 1}.weight": a.flip(0) if wrong else a for i, a in c.alpha.items()})
    x = f.embed(ids)
    dwa.init_accumulators(x)
    for i in range(LAYERS):
        x = x + f(2 * i + 1, x)
        x = dwa(x + f(2 * i + 2, x), block_idx=i)
    compare(f.logits(x), model(ids).logits, wrong)

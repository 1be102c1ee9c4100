"""Capture on models, prompts and batches: every token its own row, nothing left behind."""

import gc
import warnings
from types import MethodType

import numpy as np
import pytest
import torch
from cases import CASES, NAMED, build, prompts_for
from torch import nn
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import resinspect as ri
from resinspect.errors import CaptureError, OptionError, PromptError
from resinspect.families import find_layout
from resinspect.hooks.geometry import lengths, measure_readers
from resinspect.hooks.prompts import token_texts

every_case = pytest.mark.parametrize("case", CASES, ids=str)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}


def small(kind):
    torch.manual_seed(0)
    config = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=97, bos_token_id=0, eos_token_id=0)
        ),
        "narrow": lambda: LlamaForCausalLM(
            LlamaConfig(**SMALL | {"hidden_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2})
        ),
        "granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, num_key_value_heads=2, residual_multiplier=0.2)),
    }
    model = config[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plain_decoders_have_weight_one(kind, dtype):
    """A write or reader hooked at the wrong module of a Hugging Face decoder."""
    model = small(kind).to(dtype)
    trace = ri.capture(model, prompts_for(model))
    summary = ri.fidelity_summary(trace)
    assert summary["verdict"] == "exact"
    assert summary["worst"] <= (1e-5 if dtype == torch.float32 else 1e-12)
    prefix = trace["reader_prefix"].values[:, None] > np.arange(trace.sizes["source"])
    np.testing.assert_array_equal(
        trace["weight"].values, np.broadcast_to(np.where(prefix, 1, np.nan), trace["weight"].shape)
    )
    solved = ri.capture(model, prompts_for(model), method="solve")
    np.testing.assert_allclose(solved["weight"].values[:, prefix], 1, atol=1e-4)


def test_half_precision_is_judged_by_its_own_rounding():
    """float32 tolerances on a bfloat16 model would call every map off."""
    model = small("llama").to(torch.bfloat16)
    trace = ri.capture(model, prompts_for(model))
    assert trace.attrs["dtype"] == "bfloat16"
    assert ri.fidelity_summary(trace)["verdict"] == "exact"


def test_a_wrong_half_precision_map_is_not_exact(monkeypatch):
    """A bound so wide that 5 % of every write may be missing."""
    model = small("granite")
    for layer in model.model.layers:
        layer.residual_multiplier = 1.0
    layout = find_layout(model)
    monkeypatch.setattr("resinspect.hooks.capture.find_layout", lambda _: layout)
    for layer in model.model.layers:
        layer.residual_multiplier = 0.95
    with pytest.raises(CaptureError, match="map is wrong"):
        ri.capture(model.to(torch.bfloat16), prompts_for(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["replay", "solve"])
def test_values_that_are_not_finite_are_never_exact(value, method):
    """NaN compares false, so a broken token would pass every check."""
    model = small("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[4] = value
    with pytest.warns(UserWarning, match="off at 7 readers"):
        trace = ri.capture(model, [[3, 5, 6], [4]], method=method)
    assert (ri.verdict(trace) == "off").all()
    assert ri.fidelity_summary(ri.select(trace, samples=[0]))["verdict"] == "exact"
    with pytest.raises(CaptureError, match=r"'0\.attn' gets values that are not finite"):
        ri.capture(model, [[4]], method=method)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_tiny_and_huge_activations_are_judged_alike(scale):
    """Norms whose squares vanish or overflow in float32: a wrong map exact, a right one off."""
    torch.manual_seed(0)
    writes = torch.randn(5, 3, 16)
    weight = torch.ones(5, 1, 3)
    for inputs in (writes.sum(1, keepdim=True), 0.9 * writes.sum(1, keepdim=True)):
        expected = measure_readers(writes, lengths(writes), inputs, weight, weight)
        scaled = measure_readers(writes * scale, lengths(writes * scale), inputs * scale, weight, weight)
        for name in ("fidelity", "kappa"):
            torch.testing.assert_close(scaled[name], expected[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(scaled["reader_norm"], expected["reader_norm"] * scale)


def test_autocast_does_not_round_the_record():
    """The capture's own products in bfloat16: wrong by 1e-3 and labelled float32."""
    model = small("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace = ri.capture(model, prompts_for(model), keep=("gram", "hidden"))
    writes = trace["source_hidden"].values.astype(np.float64)
    size = np.linalg.norm(writes, axis=-1)
    error = np.abs(writes @ writes.swapaxes(1, 2) - trace["gram"].values) / (size[:, :, None] * size[:, None, :])
    assert error.max() < 1e-5


def test_wrapped_and_compiled_models_are_unwrapped():
    """A model refused, or run through a compiler that skips hooks."""
    model = small("llama")
    expected = ri.capture(model, [[1, 2, 3]])["cross"].values
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        np.testing.assert_array_equal(ri.capture(wrapped, [[1, 2, 3]])["cross"].values, expected)


class Keywords(nn.Module):
    """A norm that is called with keywords only, the residual second."""

    def __init__(self, clear):
        super().__init__()
        torch.manual_seed(0)
        self.clear = clear
        self.wte, self.mix = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.norm, self.out = Named(), nn.LayerNorm(16)

    def forward(self, ids):
        x = self.wte(ids)
        mask = ids > 0 if self.clear else 0.5 * x
        return self.out(x + self.mix(self.norm(mask=mask, hidden=x)))


class Named(nn.Module):
    def forward(self, *, mask, hidden):
        return torch.tanh(hidden)


def test_keyword_inputs_are_found_or_refused():
    """The first keyword taken for the residual: a mask, or half of it."""
    options = {"sublayers": [("mix", "norm")], "final": "out"}
    trace = ri.capture(Keywords(clear=True), [[1, 2]], **options)
    np.testing.assert_allclose(trace["weight"].sel(reader="final").values, 1, rtol=1e-4)
    with pytest.raises(CaptureError, match=r"'norm' gets only keyword arguments \(mask, hidden\)"):
        ri.capture(Keywords(clear=False), [[1, 2]], **options)


def test_no_loss_is_invented_without_a_head():
    """Hidden states read as logits."""
    trace = ri.capture(Parallel(), [[1, 2, 30]], sublayers=[("h.*.mix", "h.*.norm")], final="out")
    assert "loss" not in trace


def test_explicit_layers_keep_their_order():
    """Two stacks of layers shuffled into each other by their numbers."""
    pairs = [("h.0.mix", "h.0.norm"), ("h.1.mix", "h.1.norm"), ("h.2.mix", "h.2.norm")]
    trace = ri.capture(Parallel(), [[1, 2]], sublayers=pairs, final="out")
    assert trace["reader"].values.tolist() == ["h.0.mix", "h.1.mix", "h.2.mix", "final"]


def gated():
    """A Llama by the names of its modules, whose MLP writes pass a gate that depends on the token."""
    model = small("llama")

    def forward(layer, x, **options):
        x = x + layer.self_attn(hidden_states=layer.input_layernorm(x), **options)[0]
        return x + torch.sigmoid(x.mean(-1, keepdim=True)) * layer.mlp(layer.post_attention_layernorm(x))

    for layer in model.model.layers:
        layer.forward = MethodType(forward, layer)
    return model


def test_gated_residual_is_refused_not_drawn():
    """Llama's module names with another residual: a plausible, wrong map."""
    with pytest.raises(CaptureError, match=r"no known family.*what 'model\.layers\.0' gives is no weighted sum"):
        ri.capture(gated(), [[1, 2]])


def test_unknown_model_says_what_was_found():
    """A bare KeyError or a guess at the sublayers."""
    with pytest.raises(CaptureError, match=r"no known family.*'model\.layers' holds 3 .*Name its sublayers") as error:
        ri.capture(gated(), [[1, 2]])
    assert "post_attention_layernorm" in str(error.value)


@every_case
def test_padded_batches_equal_single_prompts(case):
    """Padding that leaks into real tokens, positions that shift, or rows taken from batch row 0."""
    model = build(case, "random")
    prompts = prompts_for(model)
    together = ri.capture(model, prompts, batch_size=4)
    for i, prompt in enumerate(prompts):
        alone = ri.capture(model, [prompt])
        mine = ri.select(together, samples=[i])
        assert mine["token_id"].values.tolist() == prompt
        for name in ("weight", "cross", "gram", "loss", "reader_norm"):
            expected = alone[name].values
            size = np.nanmax(np.abs(expected), initial=1.0)
            np.testing.assert_allclose(mine[name].values, expected, atol=1e-5 * size, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_users_own_batch_may_be_padded_on_either_side(kind):
    """Left padding shifts absolute positions unless it is told apart."""
    model = small(kind)
    prompts = prompts_for(model, (5, 9))
    right = {
        "input_ids": torch.tensor([prompts[0] + [0] * 4, prompts[1]]),
        "attention_mask": torch.tensor([[1] * 5 + [0] * 4, [1] * 9]),
    }
    left = {"input_ids": right["input_ids"].clone(), "attention_mask": right["attention_mask"].flip(1)}
    left["input_ids"][0] = torch.tensor([0] * 4 + prompts[0])
    expected = ri.capture(model, prompts)
    for batch in (right, left):
        trace = ri.capture(model, batch)
        assert trace["token_id"].values.tolist() == expected["token_id"].values.tolist()
        np.testing.assert_allclose(trace["cross"].values, expected["cross"].values, rtol=1e-4, atol=1e-4)


def test_two_runs_are_bit_identical():
    """A seed or buffer that changes between runs."""
    model = build(NAMED["attnres"], "random")
    first, second = (ri.capture(model, prompts_for(model)) for _ in range(2))
    assert first.identical(second)


def test_batching_keeps_order_and_numbers():
    """Samples renumbered or reordered when batches are joined."""
    model = build(NAMED["pre_ln"], "random")
    prompts = prompts_for(model, (3, 8, 1, 5, 2))
    trace = ri.capture(model, prompts, batch_size=2)
    assert trace["sample"].values.tolist() == [i for i, p in enumerate(prompts) for _ in p]
    assert trace["position"].values.tolist() == [j for p in prompts for j in range(len(p))]
    assert trace["token_id"].values.tolist() == [t for p in prompts for t in p]


def test_loss_is_that_of_the_next_token():
    """Labels shifted the wrong way, or across prompts."""
    model = build(NAMED["pre_ln"], "random")
    ids = prompts_for(model)[0]
    trace = ri.capture(model, [ids, ids[:3]])
    with torch.no_grad():
        expected = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    mine = ri.select(trace, samples=[0])["loss"].values
    assert np.isnan(mine[-1])
    assert np.isclose(np.nanmean(mine), float(expected), rtol=1e-5)


def test_hidden_and_logits_are_kept_only_on_request():
    """Hidden states stored unasked, or views that the next forward overwrites."""
    model = build(NAMED["hyper_connections"], "random")
    ids = prompts_for(model)[0]
    assert not {"reader_hidden", "logits"} & set(ri.capture(model, [ids]).data_vars)
    trace = ri.capture(model, [ids], keep=("hidden", "logits"))
    _, cache = model.run_with_cache(torch.tensor([ids]))
    np.testing.assert_array_equal(
        trace["source_hidden"].sel(source="1.mlp").values, cache["layers.1.mlp.hook_write"][0]
    )
    np.testing.assert_array_equal(trace["reader_hidden"].sel(reader="final").values, cache["final.hook_read"][0])
    with torch.no_grad():
        np.testing.assert_allclose(trace["logits"].values, model(torch.tensor([ids])).logits[0], rtol=1e-6)
    assert not {"gram", "cross"} & set(trace.data_vars)


def test_natives_are_those_of_the_hook_points():
    """Natives stored at the wrong site, or padded with zeros that look like weights."""
    model = build(NAMED["attnres"], "random")
    ids = prompts_for(model)[0]
    alpha = ri.capture(model, [ids])["native_alpha"]
    _, cache = model.run_with_cache(torch.tensor([ids]))
    row = alpha.sel(site="1.attn").values
    np.testing.assert_array_equal(row[:, :3], cache["layers.1.attn.hook_native_alpha"][0])
    assert np.isnan(row[:, 3:]).all()
    np.testing.assert_allclose(np.nansum(alpha.values, -1), 1, rtol=1e-6)


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_no_hook_is_left_behind(stop):
    """Hooks that outlive an exception or Ctrl-C slow and corrupt every later forward; so does a flipped mode."""
    model = build(NAMED["attnres"], "random").train()
    model.layers[0]["mlp"].eval()

    def fail(*_):
        raise stop("in the middle")

    handle = model.layers[1]["attn"].register_forward_hook(fail)
    before = hooks_of(model)
    with pytest.raises(CaptureError if stop is RuntimeError else stop, match="in the middle"):
        ri.capture(model, [[1, 2, 3]])
    assert hooks_of(model) == before
    assert model.training
    assert not model.layers[0]["mlp"].training
    handle.remove()
    ri.capture(model, [[1, 2, 3]])
    assert hooks_of(model) == before - 1


def test_the_record_does_not_change_with_the_model():
    """Stored views of tensors that a later in-place operation overwrites."""

    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(NAMED["pre_ln"], "random")

        def forward(self, ids):
            output = self.inner(ids)
            output.logits.zero_()
            return output

    model = InPlace().eval()
    handle = model.inner.layers[0]["attn"].hook_write.register_forward_hook(lambda m, i, o: None)
    writes = []
    model.inner.layers[2]["mlp"].register_forward_hook(lambda m, i, o: writes.append(o))
    pairs = [
        ("inner.layers.*.attn", "inner.layers.*.attn.norms.0"),
        ("inner.layers.*.mlp", "inner.layers.*.mlp.norms.0"),
    ]
    trace = ri.capture(model, [[1, 2, 3]], sublayers=pairs, final="inner.final.norms.0", keep=("hidden",))
    expected = trace["source_hidden"].values.copy()
    for tensor in writes:
        tensor.zero_()
    gc.collect()
    np.testing.assert_array_equal(trace["source_hidden"].values, expected)
    assert np.abs(expected[:, -1]).min() > 0
    handle.remove()


class Parallel(nn.Module):
    """A module of no family: attention-free, two branches that read the same input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(50, 24)
        self.h = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(24), "mix": nn.Linear(24, 24)}) for _ in range(3))
        self.out = nn.LayerNorm(24)

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.h:
            x = 0.5 * x + layer["mix"](torch.tanh(layer["norm"](x)))
        return self.out(x)


def test_any_module_is_solved_from_named_sublayers():
    """A decaying carry: weights are powers of a half, which no one told the solver."""
    trace = ri.capture(Parallel(), [[1, 2, 3], [4, 5]], sublayers=[("h.*.mix", "h.*.norm")], final="out")
    assert trace.attrs["method"] == "solve"
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    np.testing.assert_allclose(trace["weight"].sel(reader="final").values, [[0.125, 0.25, 0.5, 1.0]] * 5, rtol=1e-4)
    assert trace["reader"].values.tolist() == ["h.0.mix", "h.1.mix", "h.2.mix", "final"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sublayers": [("h.*.mix", "h.*.nrm")], "final": "out"}, "'h.*.nrm' matches no module.*it has wte"),
        ({"sublayers": [("h.*.mix", "h.*.norm")], "final": "ln_f"}, "final names 'ln_f'"),
        ({"sublayers": [("h.0.mix", "h.*.norm")], "final": "out"}, "must match the same layers"),
        ({"sublayers": [], "final": "out"}, "sublayers is empty"),
        ({"sublayers": "h.*.mix", "final": "out"}, "holds 'h.*.mix'; name pairs"),
        ({"sublayers": ["h.*.mix"], "final": "out"}, "holds 'h.*.mix'; name pairs"),
        ({"sublayers": [("a", "b", "c")], "final": "out"}, r"holds \('a', 'b', 'c'\); name pairs"),
        ({"sublayers": 42, "final": "out"}, "holds 42; name pairs"),
        ({"sublayers": [None], "final": "out"}, "holds None; name pairs"),
        ({"sublayers": [("h.*.norm", "h.*.mix")], "final": "out"}, "ran out of order"),
        ({}, "no known family"),
    ],
)
def test_naming_sublayers_wrongly_is_explained(options, words):
    """A map of the wrong modules, or an IndexError."""
    with pytest.raises(CaptureError, match=words):
        ri.capture(Parallel(), [[1, 2]], **options)


def test_more_sources_than_channels_is_said():
    """A perfect fit of anything, sold as a map."""
    model = small("narrow")
    with pytest.warns(UserWarning, match=r"readers from '3\.mlp' on have as many sources as .* channels \(8\)"):
        trace = ri.capture(model, prompts_for(model), method="solve")
    verdicts = ri.verdict(trace).to_series()
    assert (verdicts[:"3.attn"] == "exact").all()
    assert (verdicts["3.mlp":] == "unknown").all()
    assert np.isnan(trace["weight"].sel(reader="final").values).all()
    assert ri.fidelity_summary(trace)["verdict"] == "unknown"


def test_a_missing_sublayer_is_found():
    """Solving without one source fits something; the map must not look right."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CaptureError, match="seems to be missing"):
            ri.capture(
                Parallel(), [[1, 2, 3]], sublayers=[("h.0.mix", "h.0.norm"), ("h.1.mix", "h.1.norm")], final="out"
            )


class Shared(Parallel):
    def forward(self, ids):
        x = self.wte(ids)
        for _ in range(2):
            x = x + self.h[0]["mix"](self.h[0]["norm"](x))
        return self.out(x)


def test_a_module_called_twice_is_refused():
    """The second call overwriting the record of the first."""
    with pytest.raises(CaptureError, match="second time"):
        ri.capture(Shared(), [[1, 2]], sublayers=[("h.0.mix", "h.0.norm")], final="out")


def test_prompts_come_in_many_forms():
    """A form that every tokenizer returns, refused or misread."""
    model = build(NAMED["pre_ln"], "random")
    ids = [3, 5, 8]
    expected = ri.capture(model, [ids])["token_id"].values.tolist()
    tensor = torch.tensor(ids)
    forms = [ids, tuple(ids), [tuple(ids)], tensor, tensor[None], [tensor], np.array(ids), [np.array(ids)]]
    forms += [[np.int64(i) for i in ids], [[np.int32(i) for i in ids]], (row for row in [ids])]
    forms += [{"input_ids": ids}, {"input_ids": [ids], "attention_mask": None}, {"input_ids": tensor[None].numpy()}]
    forms += [{"input_ids": [ids], "attention_mask": [[1, 1, 1]]}, {"input_ids": ids, "attention_mask": [1, 1, 1]}]
    for form in forms:
        assert ri.capture(model, form)["token_id"].values.tolist() == expected
    ragged = ri.capture(model, {"input_ids": [ids, [4]], "attention_mask": [[1, 1, 1], [1]]})
    assert ragged["token_id"].values.tolist() == [*ids, 4]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "no prompts"),
        ([[1], []], "prompt 1 is empty"),
        ("text", "no tokenizer"),
        ([[1, 97]], r"outside 0\.\.96"),
        ([[-1]], "outside"),
        ([list(range(65))], "65 tokens but the model's context is 64"),
        ([[1.5]], r"prompt 0 holds 1\.5, which is no token id"),
        ([[True]], "prompt 0 holds True"),
        ([None], "prompt 0 is a NoneType"),
        ([b"ab"], "prompt 0 is a bytes"),
        (b"ab", "prompts are a bytes"),
        (5, "prompts are a int"),
        ({"attention_mask": torch.ones(1, 2)}, "needs input_ids"),
        ({"input_ids": None}, "needs input_ids"),
        ({"input_ids": []}, "no prompts"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.tensor([[1, 0, 1]])}, "prompt 0 has holes"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.zeros(1, 3)}, "prompt 0 is empty"),
        ({"input_ids": torch.ones(1, 2).long(), "attention_mask": torch.tensor([[0, -1e9]])}, "other than 0 and 1"),
        (
            {"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)},
            "3 ids but an attention_mask of 2",
        ),
        ({"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.ones(1, 3)}, "2 rows of input_ids but 1"),
    ],
)
def test_bad_prompts_get_one_sentence(prompts, words):
    """A crash inside the model, or an empty trace."""
    with pytest.raises(PromptError, match=words):
        ri.capture(build(NAMED["pre_ln"], "random"), prompts)


def test_token_texts_are_literal(pytestconfig):
    """Byte-level pieces shown in their private alphabet: a space as Ġ, half an em dash as âĢ."""
    tokenizer = AutoTokenizer.from_pretrained(pytestconfig.rootpath / "data" / "tokenizer", local_files_only=True)
    text = " naïve 😀 —\n<b>$x$"
    shown = token_texts(tokenizer(text)["input_ids"], tokenizer)
    assert "Ġ" not in "".join(shown)
    raw = b"".join(s.encode().decode("unicode_escape").encode("latin-1") if "\\x" in s else s.encode() for s in shown)
    assert raw.decode() == text
    assert token_texts([7], None) == ["7"]


def test_truncation_says_what_it_cut():
    """A prompt cut in silence."""
    model = build(NAMED["pre_ln"], "random")
    with pytest.warns(UserWarning, match="prompt 1 was cut to its first 64 of 70 tokens"):
        trace = ri.capture(model, [[1], [2] * 70], truncate=True)
    assert trace.sizes["token"] == 65


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "guess"}, "choose one of auto, replay, solve"),
        ({"keep": ["grams"]}, "keep has grams; allowed are gram, cross"),
        ({"keep": None}, "keep has None"),
        ({"keep": [3]}, "keep has 3"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": "a"}, "batch_size is 'a'"),
        ({"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number"),
        ({"tokenizer": "gpt2"}, "tokenizer is 'gpt2'; give the tokenizer itself"),
        ({"final": "final"}, "there are no sublayers= that it could go with"),
        ({"sublayers": [("layers.*.attn", "layers.*.attn.norms.0")], "final": 3}, "needs final="),
        ({"sublayers": [("h.*.mix", "h.*.norm")]}, "needs final="),
        (
            {"sublayers": [("layers.*.attn", "layers.*.attn.norms.0")], "final": "final", "method": "replay"},
            "only 'solve'",
        ),
    ],
)
def test_bad_options_get_one_sentence(options, words):
    """An option ignored in silence."""
    with pytest.raises(OptionError, match=words):
        ri.capture(build(NAMED["pre_ln"], "random"), [[1]], **options)


def test_one_part_to_keep_needs_no_list():
    """A name taken for its letters."""
    assert "gram" in ri.capture(build(NAMED["pre_ln"], "random"), [[1, 2]], keep="gram")

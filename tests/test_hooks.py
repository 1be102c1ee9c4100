"""Hooks on models as they come: wrapped, checkpointed, offloaded, looking ahead; and nothing left behind."""

import warnings

import numpy as np
import pytest
import torch
from cases import NAMED, build
from tiny import TINY, randomised
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

import resinspect as ri
from resinspect.errors import CaptureError, PromptError
from resinspect.hooks.causality import is_causal

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8], [27, 18, 28, 18]]
CPU = torch.device("cpu")


def llama():
    torch.manual_seed(0)
    return randomised(LlamaForCausalLM(LlamaConfig(**SIZES)))


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def quiet(model, prompts=PROMPTS, **options):
    """A capture during which nothing may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return ri.capture(model, prompts, **options)


# Wrapped


def compiled_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer)
    return model


def compiled_parts(model):
    for layer in model.model.layers:
        layer.mlp, layer.input_layernorm = torch.compile(layer.mlp), torch.compile(layer.input_layernorm)
    return model


def compiled_in_place(model):
    model.compile()
    for layer in model.model.layers:
        layer.compile()
    return model


def checkpointed_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    return model


@pytest.mark.parametrize("wrap", [compiled_layers, compiled_parts, compiled_in_place, checkpointed_layers])
def test_wrappers_inside_a_model_are_seen_through(wrap):
    """A layer that is not recognised in its wrapper, or whose hooks a compiler skips."""
    expected, model = quiet(llama()), wrap(llama())
    trace = quiet(model)
    np.testing.assert_array_equal(trace["cross"].values, expected["cross"].values)
    assert trace["reader"].values.tolist() == expected["reader"].values.tolist()
    assert hooks_of(model) == 0


@pytest.mark.parametrize("make", [llama, lambda: build(NAMED["hyper_connections"], "random")], ids=["llama", "ours"])
def test_gradient_checkpointing_records_once(make):
    """A sublayer recorded again when it is recomputed, or a training flag that stays off."""
    expected, model = quiet(make()), make()
    getattr(model, "gradient_checkpointing_enable", model.activation_checkpointing_enable)()
    model.train()
    trace = quiet(model)
    np.testing.assert_array_equal(trace["weight"].values, expected["weight"].values)
    np.testing.assert_array_equal(trace["cross"].values, expected["cross"].values)
    assert model.training
    assert all(module.training for module in model.modules())


class Own(nn.Module):
    """A small module of no family that adds in place, checkpoints itself, or fails, as asked."""

    def __init__(self, behave=""):
        super().__init__()
        torch.manual_seed(0)
        self.behave, self.wte, self.out = behave, nn.Embedding(97, 24), nn.LayerNorm(24)
        self.h = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(24), "mix": nn.Linear(24, 24)}) for _ in range(3))
        self.head = nn.Linear(24, 97)

    def forward(self, ids):
        x = self.wte(ids)
        for i, layer in enumerate(self.h):
            run = lambda x, layer=layer: layer["mix"](torch.tanh(layer["norm"](x)))  # noqa: E731
            write = checkpoint(run, x, use_reentrant=False) if self.behave == "checkpoint" else run(x)
            if self.behave == "in place":
                x += write
                write.zero_()
            else:
                x = x + write
            if self.behave == "fail" and i == 1:
                raise RuntimeError("in the middle")
        return self.head(self.out(x))


OWN = {"sublayers": [("h.*.mix", "h.*.norm")], "final": "out"}


@pytest.mark.parametrize("behave", ["checkpoint", "in place"])
def test_a_module_that_recomputes_or_overwrites_is_recorded_as_it_was(behave):
    """A second record of a recomputed call, or views of tensors that the model goes on to change."""
    trace, expected = quiet(Own(behave).train(), **OWN, keep=("hidden",)), quiet(Own(), **OWN, keep=("hidden",))
    for name in ("weight", "source_hidden", "reader_hidden"):
        np.testing.assert_array_equal(trace[name].values, expected[name].values, err_msg=name)


@pytest.mark.parametrize(
    ("model", "options", "error"),
    [
        (Own("fail"), OWN, CaptureError),
        (Own(), OWN | {"final": "h.0.norm"}, CaptureError),
        (Own(), {"sublayers": [("h.*.norm", "h.*.mix")], "final": "out"}, CaptureError),
        (Own(), {"sublayers": [("h.1.mix", "h.1.norm")], "final": "out"}, CaptureError),
        (Own("fail"), {}, CaptureError),
    ],
    ids=["model fails", "twice", "order", "missing", "unknown"],
)
def test_nothing_is_left_behind_by_an_error(model, options, error):
    """Hooks that slow and corrupt every later forward, or a mode that stays switched."""
    model.train()
    model.h[0]["mix"].eval()
    grad = torch.is_grad_enabled()
    with pytest.raises(error):
        ri.capture(model, PROMPTS, **options)
    assert hooks_of(model) == 0
    assert model.training
    assert not model.h[0]["mix"].training
    assert torch.is_grad_enabled() == grad


# Weights that are not there


def test_weights_on_the_meta_device_are_one_sentence_before_anything_runs():
    """A map of uninitialised memory, or an error from deep inside torch."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(CaptureError, match=r"tensors of the model, such as 'model\.embed.*meta device"):
        ri.capture(model, PROMPTS)
    assert hooks_of(model) == 0


def test_a_buffer_on_the_meta_device_is_one_sentence():
    """Rotary frequencies that were never filled, and a message that the model is of no known family."""
    model = llama()
    model.model.rotary_emb.inv_freq = torch.empty(4, device="meta")
    with pytest.raises(CaptureError, match=r"1 tensors of the model, such as 'model\.rotary_emb\.inv_freq'.*meta"):
        ri.capture(model, PROMPTS)


def test_what_is_no_module_of_python_is_one_sentence():
    """TorchScript that takes no hooks, or the pair that ri.load gives, and an AttributeError."""
    with pytest.raises(CaptureError, match="TorchScript"):
        ri.capture(torch.jit.trace(nn.Linear(2, 2), torch.zeros(2)), PROMPTS)
    with pytest.raises(CaptureError, match=r"a tuple, not a torch\.nn\.Module; ri\.load returns"):
        ri.capture((llama(), None), PROMPTS)


def test_a_model_that_fails_by_itself_is_one_sentence(monkeypatch):
    """A traceback from deep inside someone else's model, or the blame put on the map."""
    model = llama()

    def fail(*_, **__):
        raise IndexError("out of range in self")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(
        CaptureError, match=r"LlamaForCausalLM failed on .*\(IndexError: out of range in self\)"
    ) as error:
        ri.capture(model, PROMPTS, method="solve", sublayers=[("model.layers.*.mlp",) * 2], final="model.norm")
    assert isinstance(error.value.__cause__, IndexError)
    assert hooks_of(model) == 0


def test_quantized_weights_do_not_stop_a_capture():
    """Packed weights that have no shape, and an AttributeError over a fingerprint."""
    model = torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear}, dtype=torch.qint8)
    assert ri.fidelity_summary(quiet(model))["verdict"] == "exact"


def test_text_of_a_model_of_pictures_has_its_own_vocabulary():
    """The places of picture patches counted as token ids."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=sizes, vision_config=vision, mm_tokens_per_image=4, image_token_index=96)
    model = Gemma3ForConditionalGeneration(config).eval()
    trace = quiet(model)
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    assert "loss" in trace
    with pytest.raises(PromptError, match=r"outside 0\.\.96"):
        ri.capture(model, [[97]])
    with pytest.raises(PromptError, match="the model's context is 64"):
        ri.capture(model, [[1] * 65])


def test_positions_that_begin_after_padding_leave_less_room():
    """RoBERTa has places for fewer tokens than max_position_embeddings says, and fails on the last ones."""
    shape = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    config = RobertaConfig(**shape, num_attention_heads=4, max_position_embeddings=12, pad_token_id=1)
    model = RobertaForMaskedLM(config).eval()
    assert ri.verdict(ri.capture(model, [[5] * 10])).item(0) == "exact"
    with pytest.raises(PromptError, match="has 11 tokens but the model's context is 10"):
        ri.capture(model, [[5] * 11])


def test_offloaded_weights_are_one_sentence():
    """Weights that are there only while their module runs, and are read after it."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(llama(), execution_device=CPU)
    with pytest.raises(CaptureError, match="offloaded"):
        ri.capture(model, PROMPTS)


# Later tokens


def unmasked():
    """A decoder that lost its mask."""
    model = llama()
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(_without_mask, with_kwargs=True)
    return model


def _without_mask(module, args, kwargs):
    return args, kwargs | {"attention_mask": None}


def test_a_decoder_that_sees_later_tokens_is_called_out():
    """A loss of copying the next token, taken for one of predicting it."""
    with pytest.warns(UserWarning, match="LlamaForCausalLM sees later tokens.*check its attention mask"):
        trace = ri.capture(unmasked(), PROMPTS)
    assert "loss" not in trace
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    assert "loss" in quiet(llama())


def test_half_precision_shows_it_too():
    """A tolerance for rounding that hides the future."""
    with pytest.warns(UserWarning, match="sees later tokens"):
        ri.capture(unmasked().bfloat16(), PROMPTS)
    quiet(llama().bfloat16())


class LooksAhead(Own):
    """The last layer mixes in the next token."""

    def forward(self, ids):
        logits = super().forward(ids)
        return logits + 0.01 * logits.roll(-1, 1)


def test_a_module_of_ones_own_is_taken_at_its_word_only_if_it_keeps_it():
    """A small leak at one position."""
    with pytest.warns(UserWarning, match="LooksAhead sees later tokens"):
        trace = ri.capture(LooksAhead(), PROMPTS, **OWN)
    assert "loss" not in trace
    assert "loss" in quiet(Own(), **OWN)


def bert(kind, **options):
    torch.manual_seed(0)
    return kind(BertConfig(**SIZES, **options)).eval()


def test_an_encoder_has_no_next_token_loss_and_no_warning():
    """A number for a task that the model does not have."""
    trace = quiet(bert(BertForMaskedLM), keep=("logits",))
    assert "logits" in trace
    assert "loss" not in trace


def test_a_decoder_by_its_class_is_one_only_if_it_is_causal():
    """A class name believed: BertLMHeadModel decodes only when its configuration says so."""
    with pytest.warns(UserWarning, match="BertLMHeadModel sees later tokens"):
        assert not is_causal(bert(BertLMHeadModel), PROMPTS, CPU)
    assert is_causal(bert(BertLMHeadModel, is_decoder=True), PROMPTS, CPU)


@pytest.mark.parametrize("tiny", [tiny for tiny in TINY if tiny.causal], ids=str)
def test_no_decoder_is_called_out_wrongly(tiny):
    """Rounding, experts or the chunks of a linear attention taken for a look ahead."""
    try:
        model = tiny.build()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        pytest.skip(f"{tiny.name} cannot be built with the installed transformers: {error}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for prompt in ([[5]], [[5, 5]], PROMPTS, [list(range(40))]):
            assert is_causal(model, prompt, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_do_not_look_like_the_future(dtype):
    """A token that moves between experts because another token changed the order of sums."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=4, num_local_experts=8)).eval().to(dtype)
    for seed in range(8):
        ids = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(seed)).tolist()
        assert is_causal(model, ids, CPU)


def test_the_look_ahead_costs_one_short_forward():
    """A probe for every batch, or over whole prompts."""
    model = build(NAMED["pre_ln"], "random")
    shapes = []
    handle = model.register_forward_pre_hook(lambda m, args, kw: shapes.append(_ids(args, kw).shape), with_kwargs=True)
    ri.capture(model, [list(range(1, 41)), [4, 5]], batch_size=1)
    handle.remove()
    assert [tuple(shape) for shape in shapes] == [(3, 16), (1, 40), (1, 2)]


def _ids(args, kwargs):
    return args[0] if args else kwargs["input_ids"]


class Amplifying(nn.Module):
    """A causal model whose later layers blow up any difference a million times, that of rounding too."""

    config = None

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, ids):
        x = self.embed(ids).cumsum(1)
        # Other batch sizes round otherwise: as if by kernels of another shape.
        x = x * (1 + 1e-7 * len(ids) * (1 + torch.arange(len(ids)))[:, None, None])
        return self.head(torch.sin(1e6 * x))


def test_rounding_that_a_model_blows_up_is_no_view_of_the_future():
    """A chaotic but causal model called no decoder, and its loss left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_causal(Amplifying(), [[3, 4, 5, 6, 7]], torch.device("cpu"))

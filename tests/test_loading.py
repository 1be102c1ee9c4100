"""Checkpoints of others: classes that no Auto class knows, pickled and wrapped weights, nanoGPT."""

import argparse
import json
import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from resinspect.checkpoint import load
from resinspect.errors import CheckpointError

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 97}
# Classes that AutoModelForCausalLM does not give for their configuration.
CLASSES = ("BertForMaskedLM", "BertModel", "BertForPreTraining", "EsmcForMaskedLM", "EsmcModel", "LlamaModel")
WRAPPERS = {
    "bare": lambda state: state,
    "model": lambda state: {"model": state, "step": 7},
    "model_state": lambda state: {"epoch": 1, "model_state": state},
    "model_state_dict": lambda state: {"model_state_dict": state, "optimizer_state_dict": {"state": {}}},
    "state_dict": lambda state: {"state_dict": state},
    "settings": lambda state: {"model": {"layers": 2}, "state_dict": state},
    "nested": lambda state: {"model": {"state_dict": state}, "loss": torch.tensor(1.0)},
    "numpy": lambda state: {"model": state, "loss": np.float64(1.5), "step": np.int64(3), "done": np.bool_(True)},
}
PREFIXES = {
    "_orig_mod.": ["_orig_mod"],
    "module.": ["module"],
    "module._orig_mod.": ["module", "_orig_mod"],
    "_orig_mod.module.": ["_orig_mod", "module"],
}


def save_with(folder, model, classes):
    model.save_pretrained(folder)
    edit(folder / "config.json", architectures=classes)


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def same(first, second):
    assert type(first) is type(second)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def small(name):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**SIZES)).eval()


def gpt2(**options):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=12, vocab_size=31, **options)
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def beside(tmp_path):
    """A GPT-2, and a folder with its config.json but without weights."""
    model = gpt2()
    model.config.architectures = ["GPT2LMHeadModel"]
    model.config.save_pretrained(tmp_path / "gpt")
    return model, tmp_path / "gpt"


def notes_of(path, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, tokenizer = load(path, **options)
    assert tokenizer is None
    return model, [str(warning.message) for warning in caught]


def refused(path, *words):
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize("name", CLASSES)
def test_class_is_the_one_that_architectures_names(name, tmp_path, no_network):
    """A model that no Auto class knows refused, or an encoder loaded as a decoder of the same configuration."""
    model = small(name)
    model.save_pretrained(tmp_path)
    same(load(tmp_path)[0], model)


@pytest.mark.parametrize("classes", [["ViTModel"], ["pipeline"], ["os"], ["GPT2LMHeadModel"], ["nonesuch", "7"], None])
def test_other_names_say_nothing(classes, tmp_path):
    """A function, or a class of another configuration, that is called because config.json says so."""
    model = small("LlamaForCausalLM")
    save_with(tmp_path, model, classes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(load(tmp_path)[0], model)
    says = f"config.json names {', '.join(classes)}, but its weights make a LlamaForCausalLM" if classes else ""
    assert [says in str(w.message) for w in caught] == ([True] if classes else [])


def test_published_encoders_hold_more_heads_than_they_name(tmp_path):
    """bert-base names BertForMaskedLM and holds the heads of BertForPreTraining: nothing is left out in silence."""
    model = small("BertForPreTraining")
    save_with(tmp_path, model, ["BertForMaskedLM"])
    with pytest.warns(UserWarning, match="names BertForMaskedLM, but its weights make a BertForPreTraining"):
        same(load(tmp_path)[0], model)


def test_models_of_pictures_are_refused(tmp_path):
    """A model that reads no text loaded because transformers has its class."""
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    refused(tmp_path, "'vit'", "ViTModel under architectures", "no causal language model", "choose a decoder")


def test_own_code_runs_only_when_trusted(tmp_path, monkeypatch):
    """Code of a checkpoint that runs unasked, or does not run when it is asked for."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
    folder = tmp_path / "own"
    small("LlamaForCausalLM").save_pretrained(folder)
    (folder / "own_code.py").write_text(code)
    own = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    edit(folder / "config.json", model_type="own", architectures=["OwnModel"], auto_map=own)
    refused(folder, "'own'", "unknown to transformers", "--trust-remote-code")
    assert "transformers_modules" not in {name.partition(".")[0] for name in sys.modules}
    model, _ = load(folder, trust_remote_code=True)
    assert type(model).__name__ == "OwnModel"
    torch.testing.assert_close(model.state_dict(), small("LlamaForCausalLM").state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "last.pt", "checkpoint.pth"])
def test_wrapped_weights_load(wrapper, name, beside, no_network):
    """A wrapper that is not opened, a file that only transformers' own names make known, numbers of numpy refused."""
    model, folder = beside
    torch.save(WRAPPERS[wrapper](model.state_dict()), folder / name)
    torch.save({"state": {}}, folder / "optimizer.pt")
    torch.save(argparse.Namespace(lr=1), folder / "training_args.bin")
    for path in (folder, folder / name):
        loaded, notes = notes_of(path)
        same(loaded, model)
        assert notes == []
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        assert loaded.config.name_or_path == ("gpt" if path == folder else f"gpt/{name}")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_prefixes_are_taken_off_and_reported(prefix, name, beside):
    """A compiled or parallel model that loads as noise, is refused, or loads without a word."""
    model, folder = beside
    state = {prefix + key: value.clone() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    torch.save({"model": state}, folder / name) if name.endswith("pt") else save_file(state, folder / name)
    loaded, notes = notes_of(folder)
    same(loaded, model)
    count = len(state)
    assert notes == [f"gpt: took {part}. off {count} of {count} names of tensors." for part in PREFIXES[prefix]]


def test_compiled_layers_within_a_model(beside):
    """A prefix looked for only at the beginning of a name."""
    model, folder = beside
    state = {key.replace(".attn.", ".attn._orig_mod."): value for key, value in model.state_dict().items()}
    torch.save(state, folder / "model.pt")
    loaded, notes = notes_of(folder)
    same(loaded, model)
    assert notes == [f"gpt: took _orig_mod. off 8 of {len(state)} names of tensors."]


def test_shards_of_bin_and_of_prefixed_safetensors(tmp_path, no_network):
    """An index that is followed for plain safetensors only."""
    model = small("LlamaForCausalLM")
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    index = tmp_path / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values())
    assert len(files) > 2
    for name in files:
        tensors = {f"module.{key}": value for key, value in load_file(tmp_path / name).items()}
        save_file(tensors, tmp_path / name)
        torch.save(tensors, tmp_path / name.replace("safetensors", "bin"))
    edit(index, weight_map={f"module.{k}": v for k, v in json.loads(index.read_text())["weight_map"].items()})
    same(notes_of(tmp_path)[0], model)
    index.rename(tmp_path / "pytorch_model.bin.index.json")
    moved = (tmp_path / "pytorch_model.bin.index.json").read_text().replace(".safetensors", ".bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(moved)
    for name in files:
        (tmp_path / name).unlink()
    same(notes_of(tmp_path)[0], model)


def test_dtype_is_that_of_from_pretrained(tmp_path):
    """Weights cast after loading: parameters that must stay float32 would not."""
    config = transformers.DeepseekV4Config(**SIZES, head_dim=8, q_lora_rank=8, n_routed_experts=2, o_groups=2)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    model.config.save_pretrained(tmp_path)
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    loaded = load(tmp_path, dtype="bfloat16")[0]
    dtypes = {name: p.dtype for name, p in loaded.named_parameters()}
    assert dtypes["model.layers.0.attn_hc.fn"] == torch.float32
    assert dtypes["model.layers.0.self_attn.q_a_proj.weight"] == torch.bfloat16
    assert {p.dtype for p in load(tmp_path)[0].parameters()} == {torch.float32}


def test_weights_saved_on_another_device_load(beside, monkeypatch):
    """A file from a GPU that only loads on a GPU."""
    model, folder = beside
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda _: "cuda:3")
        torch.save(model.state_dict(), folder / "model.pt")
    same(load(folder / "model.pt")[0], model)


def test_heads_are_tied_again_only_where_they_were(beside):
    """A head that is a copy, so that a later change of one is not a change of the other; or two heads made one."""
    model, folder = beside
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for drop in ((), ("lm_head.weight",)):
        torch.save({key: value for key, value in state.items() if key not in drop}, folder / "model.pt")
        loaded = load(folder)[0]
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
    torch.save(state | {"lm_head.weight": state["lm_head.weight"] + 1}, folder / "model.pt")
    assert load(folder)[0].lm_head.weight is not loaded.transformer.wte.weight
    assert torch.equal(load(folder)[0].lm_head.weight, state["lm_head.weight"] + 1)


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("config", [True, False], ids=["beside config", "alone"])
@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "zip"])
def test_code_in_a_pickle_does_not_run(config, legacy, beside, tmp_path):
    """torch.load without weights_only on one of the ways in."""
    _, folder = beside
    if not config:
        (folder / "config.json").unlink()
    mark = tmp_path / "ran"
    payload = {"model": {"transformer.wte.weight": Payload(mark)}, "model_args": {}}
    path = folder / "ckpt.pt"
    path.write_bytes(pickle.dumps(payload, protocol=2)) if legacy else torch.save(payload, path)
    for given in (path, folder):
        refused(given, "ckpt.pt cannot be loaded", "more than tensors", "model.state_dict()")
    assert not mark.exists()


def test_numbers_among_the_weights_are_passed_over(beside):
    """An epoch that training code left in the state dict, and weights that are refused for it."""
    model, folder = beside
    torch.save(model.state_dict() | {"epoch": 3, "name": "run", "loss": 1.5, "best": None}, folder / "model.pt")
    same(load(folder / "model.pt")[0], model)


@pytest.mark.parametrize("path", [3, None, ["a"]])
def test_what_is_no_path_is_one_sentence(path):
    with pytest.raises(CheckpointError, match=f"the model is a {type(path).__name__}; give an existing folder"):
        load(path)


REFUSED = {
    "whole model": (lambda m: m, "more than tensors"),
    "settings": (lambda m: {"model": m.state_dict(), "args": argparse.Namespace(lr=1)}, "more than tensors"),
    "no state": (lambda m: {"epoch": 3, "loss": 1.0}, "holds epoch, loss, and no state dict"),
    "nothing": (lambda m: {}, "holds nothing"),
    "a list": (lambda m: [torch.zeros(2)], "holds a list"),
    "a missing tensor": (
        lambda m: {"model": {k: v for k, v in m.state_dict().items() if "ln_f.bias" not in k}},
        "it lacks transformer.ln_f.bias",
    ),
    "another tensor": (lambda m: m.state_dict() | {"extra.weight": torch.zeros(2)}, "it also holds extra.weight"),
    "other shapes": (
        lambda m: m.state_dict() | {"transformer.wpe.weight": torch.zeros(5, 16)},
        "wrong shape of transformer.wpe.weight (5, 16) instead of (12, 16)",
    ),
    "one name twice": (
        lambda m: m.state_dict() | {"module.transformer.wpe.weight": torch.zeros(12, 16)},
        "two tensors transformer.wpe.weight",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_files_are_refused(case, beside):
    """Anything else than a state dict that becomes a traceback or a model with untrained parts."""
    model, folder = beside
    make, words = REFUSED[case]
    torch.save(make(model), folder / "model.pt")
    refused(folder / "model.pt", words)


def test_one_of_several_files_must_be_named(beside):
    """One of two checkpoints of a run taken at random."""
    model, folder = beside
    for name in ("a.pt", "b.pt"):
        torch.save(model.state_dict(), folder / name)
    refused(folder, "several files of weights (a.pt, b.pt)", "give one of them")
    same(load(folder / "b.pt")[0], model)


def nano_state(*, bias=True, layers=2, width=16, context=12, vocabulary=31, seed=0):
    """A state dict as nanoGPT stores it: weights of plain linear layers ``(out, in)``, a tied head."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape, around=0.0):
        return around + 0.3 * torch.randn(*shape, generator=generator)

    state = {"transformer.wte.weight": some(vocabulary, width), "transformer.wpe.weight": some(context, width)}
    for i in range(layers):
        shapes = {"ln_1": None, "attn.c_attn": (3 * width, width), "attn.c_proj": (width, width), "ln_2": None}
        shapes |= {"mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width)}
        for name, shape in shapes.items():
            weight = some(width, around=1.0) if shape is None else some(*shape)
            state[f"transformer.h.{i}.{name}.weight"] = weight
            if bias:
                state[f"transformer.h.{i}.{name}.bias"] = some(weight.shape[0])
    state["transformer.ln_f.weight"] = some(width, around=1.0)
    if bias:
        state["transformer.ln_f.bias"] = some(width)
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


def nano_logits(state, ids, heads):
    """nanoGPT's forward, from its state dict alone."""

    def linear(x, name):
        return F.linear(x, state[f"{name}.weight"].double(), bias(name))

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"].double(), bias(name), 1e-5)

    def bias(name):
        return state[f"{name}.bias"].double() if f"{name}.bias" in state else None

    batch, tokens = ids.shape
    x = state["transformer.wte.weight"].double()[ids] + state["transformer.wpe.weight"].double()[:tokens]
    for i in range(sum(name.endswith("ln_1.weight") for name in state)):
        block = f"transformer.h.{i}"
        q, k, v = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.view(batch, tokens, heads, -1).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.mT / k.shape[-1] ** 0.5).masked_fill(torch.ones(tokens, tokens).tril() == 0, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, -1)
        x = x + linear(mixed, f"{block}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")), f"{block}.mlp.c_proj")
    return F.linear(norm(x, "transformer.ln_f"), state["lm_head.weight"].double())


def kindred(state):
    """The same under the names of other training code, with its masks."""
    names = {"transformer.": "", "wte.": "tok_emb.", "wpe.": "pos_emb.", "h.0": "blocks.0", "h.1": "blocks.1"}
    renamed = {}
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        renamed[name.replace("lm_head", "head")] = tensor
    masks = {f"blocks.{i}.attn.mask": torch.ones(12, 12).tril()[None, None] for i in range(2)}
    return {"model_state": renamed | masks, "config": {"n_head": 4, "dropout": 0.1}, "stoi": {"a": 0}}


NANO = {
    "with biases": lambda: (nano_state(), None),
    "without biases": lambda: (nano_state(bias=False), None),
    "untied": lambda: (nano_state() | {"lm_head.weight": torch.randn(31, 16)}, None),
    "padded vocabulary": lambda: (nano_state(vocabulary=50304), None),
    "compiled": lambda: (
        s := nano_state(),
        {"model": {f"_orig_mod.{k}": v for k, v in s.items()}, "model_args": {"n_head": 4}},
    ),
    "kindred": lambda: (s := nano_state(), kindred(s)),
    "as in GPT-2": lambda: (
        s := nano_state(),
        {"model": {k: v.T if "c_" in k and v.ndim == 2 else v for k, v in s.items()}, "model_args": {"n_head": 4}},
    ),
}


@pytest.mark.parametrize("case", NANO)
def test_nanogpt_computes_the_same(case, tmp_path, no_network):
    """A weight not transposed, another GELU, a wrong number of heads, a vocabulary cut, or a head tied or untied."""
    state, payload = NANO[case]()
    args = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12, "bias": "h.0.ln_1.bias" in state}
    payload = payload or {"model": state, "model_args": args, "optimizer": {}, "best_val_loss": np.float32(1.5)}
    (tmp_path / "out").mkdir()
    torch.save(payload, tmp_path / "out" / "ckpt.pt")
    (tmp_path / "out" / "val.bin").write_bytes(bytes(range(64)))
    vocabulary = state["lm_head.weight"].shape[0]
    ids = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(1))
    for path in (tmp_path / "out", tmp_path / "out" / "ckpt.pt"):
        model, notes = notes_of(path, dtype="float64")
        assert type(model) is GPT2LMHeadModel
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, nano_logits(state, ids, 4), rtol=0, atol=1e-12)
        assert model.config.name_or_path == "out/ckpt.pt"
        assert (model.lm_head.weight is model.transformer.wte.weight) == (case != "untied")
        assert (model.config.vocab_size, model.config.n_positions) == (vocabulary, 12)
        assert any("exact GELU" in note for note in notes)
        assert any("zeros for 13 biases" in note for note in notes) == (case == "without biases")
        assert any("took _orig_mod. off" in note for note in notes) == (case == "compiled")


def test_the_number_of_heads_matters(tmp_path):
    """A test above that any number of heads would pass."""
    state = nano_state()
    torch.save({"model": state, "model_args": {"n_head": 2}}, tmp_path / "ckpt.pt")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = notes_of(tmp_path / "ckpt.pt", dtype="float64")[0](ids).logits
    assert (logits - nano_logits(state, ids, 4)).abs().max() > 1e-3


NOT_NANO = {
    "no heads": (lambda s: {"model": s, "model_args": {}}, "says None", "n_head"),
    "odd heads": (lambda s: {"model": s, "model_args": {"n_head": 3}}, "says 3", "divisor of the width 16"),
    "no positions": (
        lambda s: {"model": {k: v for k, v in s.items() if "wpe" not in k}, "model_args": {"n_head": 2}},
        "not those of nanoGPT",
        "put the config.json",
    ),
    "local mask": (
        lambda s: {"model": s | {"transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12)}, "model_args": {"n_head": 2}},
        "transformer.h.0.attn.bias",
        "not causal",
    ),
    "a router": (
        lambda s: {"model": s | {"transformer.h.0.router.weight": torch.ones(4, 16)}, "model_args": {"n_head": 2}},
        "it also holds transformer.h.0.router",
        "config.json",
    ),
    "a layer short": (
        lambda s: {"model": {k: v for k, v in s.items() if ".h.0.ln_2" not in k}, "model_args": {"n_head": 2}},
        "it lacks transformer.h.0.ln_2",
        "config.json",
    ),
}


@pytest.mark.parametrize("case", NOT_NANO)
def test_other_checkpoints_are_not_taken_for_nanogpt(case, tmp_path):
    """A model that is nearly GPT-2, or whose heads are guessed, loaded as one."""
    make, *words = NOT_NANO[case]
    torch.save(make(nano_state()), tmp_path / "ckpt.pt")
    refused(tmp_path / "ckpt.pt", "ckpt.pt", *words)


@pytest.mark.parametrize("kind", [torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("stored", ["safetensors", "pt"])
def test_numbers_that_are_no_floats_are_refused(kind, stored, tmp_path):
    """Quantised or complex weights converted in silence: a model of garbage, or of half its numbers."""
    model = small("LlamaForCausalLM")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = next(name for name in state if name.endswith("q_proj.weight"))
    state[name] = state[name].to(kind)
    if stored == "safetensors":
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    else:
        (tmp_path / "model.safetensors").unlink()
        torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match=f"holds other numbers than floats for {name}"):
        load(tmp_path)

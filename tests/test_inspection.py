"""What ``resinspect inspect`` says of a checkpoint without its weights, and the table of families."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from tiny import TINY
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    DeepseekV4Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import resinspect as ri
from resinspect import inspection
from resinspect.checkpoint.blank import smaller
from resinspect.errors import CheckpointError, OptionError, UnknownFamilyError
from resinspect.families import FAMILIES, find_layout
from resinspect.families.table import CAPTION, END, START, family_rows, markdown, write_table
from resinspect.inspection import inspect, rows

SHARDS = "model-{:05d}-of-00163.safetensors"


@pytest.fixture(autouse=True)
def without_loading(monkeypatch):
    """Nothing here may load weights."""
    monkeypatch.setattr("safetensors.torch.load_file", lambda *_, **__: pytest.fail("loaded weights"))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded weights"))


def said(path):
    """Rows by name; those of one name on lines."""
    found = {}
    for name, value in rows(inspect(path)):
        found[name] = f"{found[name]}\n{value}" if name in found else value
    return found


def llama(folder, **sizes):
    """A folder with the config.json of a Llama, without weights."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**shape | {"vocab_size": 97} | sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("tiny", TINY, ids=str)
def test_every_family_is_named_from_its_configuration(tiny, tmp_path):
    """A family that is recognised by the values of its weights, or routing parameters of another model."""
    try:
        model = tiny.build()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        pytest.skip(f"{tiny.name} cannot be built with the installed transformers: {error}")
    if not isinstance(model, PreTrainedModel):
        pytest.skip("a module without a configuration")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    found = inspect(tmp_path)
    expected = find_layout(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert found.layout.family == tiny.family
    assert found.layout.scheme == expected.scheme
    assert found.layout.routing == expected.routing
    assert [r.name for r in found.layout.anatomy.readers] == [r.name for r in expected.anatomy.readers]
    assert sum(p.numel() for p in found.model.parameters()) == sum(p.numel() for p in model.parameters())


def test_bundled_checkpoints_are_described(tiny_checkpoint):
    """A number or name that belongs to another checkpoint."""
    found = said(tiny_checkpoint)
    model = AutoModelForCausalLM.from_config(inspect(tiny_checkpoint).config)
    assert found["checkpoint"] == "tiny (ResidualLM, model_type resinspect)"
    assert found["family"].startswith("reference: ")
    assert found["scheme"] == "attnres"
    assert found["readers"] == "5, of 5 sources; in a layer attn, mlp"
    assert found["sizes"] == "layers 2, hidden size 16, vocabulary 2,048, context 64"
    assert found["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert found["weights"].startswith("1 file, ")
    assert "bfloat16, " in found["weights"]
    assert found["routing"] == "connection.query"
    assert found["tokenizer"] == "yes"
    assert "note" not in found
    for name in ri.bundled():
        assert said(name)["family"].startswith("reference: ")


def test_routing_parameters_of_all_layers_are_one_line(tmp_path):
    """Sixty-one lines of one parameter, or a number within a name taken for a layer."""
    config = DeepseekV4Config(num_hidden_layers=5, architectures=["DeepseekV4ForCausalLM"])
    config.save_pretrained(tmp_path)
    found = said(tmp_path)
    lines = found["routing"].split("\n")
    assert "model.layers.*.attn_hc.fn (5)" in lines
    assert "model.hc_head.hc_fn" in lines
    assert len(lines) == 9
    assert "streams 4" in found["sizes"]
    assert found["family"] == f"deepseek_v4: {FAMILIES['deepseek_v4'].scheme}"


def test_an_index_of_half_a_million_tensors(tmp_path):
    """Minutes over an index, or a shard that is not there taken for an error."""
    llama(tmp_path, num_hidden_layers=80, hidden_size=1024, intermediate_size=28672)
    names = {f"model.layers.{i % 80}.experts.{i}.w": SHARDS.format(i % 163 + 1) for i in range(500_000)}
    index = {"metadata": {"total_size": 640_000_000_000}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    start = time.perf_counter()
    found = said(tmp_path)
    assert time.perf_counter() - start < 30
    assert found["weights"] == "none here; the index names 500,000 tensors"
    assert "163 of 163 shards missing: model-00001-of-00163.safetensors, " in found["note"]
    assert "640,000,000,000 bytes when complete" in found["note"]
    assert found["family"] == f"plain: {FAMILIES['plain'].scheme}"
    assert found["readers"] == "as in a copy with 2 layers that was tried out; in a layer attn, mlp"


def test_a_copy_shows_every_kind_of_layer():
    """Layers of a hybrid model that are left out of what is tried out, or lists of settings of the wrong length."""
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(num_hidden_layers=24, layer_types=kinds * 6)
    found, layers = smaller(config)
    assert layers == found.num_hidden_layers == 4
    assert found.layer_types == kinds
    assert config.num_hidden_layers == 24
    assert config.vocab_size > found.vocab_size
    assert found.hidden_size == config.hidden_size
    assert smaller(config, 4)[0].hidden_size == config.hidden_size / 4


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("rwkv", "scaled: "),
        ("prophetnet", "no smaller copy of a prophetnet can be made"),
        ("blt", "no smaller copy of a blt can be made"),
        ("cohere", "plain: "),
        ("gemma3", "plain: "),
    ],
)
def test_what_models_are_by_default(kind, words, tmp_path):
    """A traceback, a family that two layers do not show, or a vocabulary of picture patches."""
    # The recurrence of RWKV is a loop over tokens and slow.
    sizes = {"hidden_size": 64, "attention_hidden_size": 64, "vocab_size": 500_000} if kind == "rwkv" else {}
    config = CONFIG_MAPPING[kind](**sizes)
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if kind != "gemma3" else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    config.architectures = [mapping[type(config)].__name__]
    config.save_pretrained(tmp_path)
    assert said(tmp_path)["family"].startswith(words)


def test_what_is_too_large_even_for_a_copy_is_said(tmp_path):
    """Gigabytes of memory for a question about names."""
    llama(tmp_path, num_hidden_layers=80, hidden_size=2**20)
    found = said(tmp_path)
    assert "too large to try out here; capture tries out and checks its residual" in found["family"]
    assert "its list 'model.layers' holds 80 LlamaDecoderLayer with self_attn (LlamaAttention), mlp" in found["family"]


def test_a_terabyte_is_not_read(tmp_path):
    """Weights that are read to say how large they are."""
    llama(tmp_path)
    size = 10**12
    header = json.dumps({"a.weight": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError as error:
            pytest.skip(f"no sparse files here: {error}")
    assert said(tmp_path)["weights"] == f"1 file, {8 + len(header) + size:,} bytes, 1 tensors: {size // 2:,} bfloat16"


def test_missing_and_damaged_shards_are_reported(tmp_path):
    """A checkpoint that is half there refused, or called whole."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama(tmp_path)).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    whole = said(tmp_path)
    assert "note" not in whole
    assert whole["weights"].endswith(f"{sum(v.numel() for v in model.state_dict().values()):,} bfloat16")
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-2])
    found = said(tmp_path)
    assert f"1 of {len(shards)} shards missing: {shards[0].name}" in found["note"]
    assert f"{shards[1].name} is cut off" in found["note"]
    assert found["family"] == whole["family"] == f"plain: {FAMILIES['plain'].scheme}"


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin"])
def test_pickled_weights_are_sized_without_their_data(name, tmp_path):
    """Prefixes that surprise only when the model is loaded, or tensors of an optimizer counted."""
    model = LlamaForCausalLM(llama(tmp_path))
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"model": state, "optimizer": {"state": torch.zeros(1000)}}, tmp_path / name)
    for path in (tmp_path, tmp_path / name) if name == "model.pt" else (tmp_path,):
        found = said(path)
        numbers = sum(value.numel() for value in state.values())
        assert found["weights"].endswith(f"{len(state)} tensors: {numbers:,} float32")
        assert f"_orig_mod. or module. before {len(state)} of {len(state)} names of tensors" in found["note"]
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=False)
    assert "old format of torch.save" in said(tmp_path)["note"]


def test_nanogpt_is_described(tmp_path):
    """A file without config.json that has to be loaded to be described."""
    from test_loading import nano_state

    torch.save({"model": nano_state(bias=False), "model_args": {"n_head": 4}}, tmp_path / "ckpt.pt")
    found = said(tmp_path / "ckpt.pt")
    assert found["checkpoint"].endswith("/ckpt.pt (GPT2LMHeadModel, model_type gpt2)")
    assert found["sizes"] == "layers 2, hidden size 16, vocabulary 31, context 12"
    assert found["family"].startswith("plain: ")
    assert "zeros for 13 biases" in found["note"]
    assert found["tokenizer"] == "none: token ids become labels"


def test_no_weights_at_all(tmp_path):
    """A configuration by itself refused."""
    llama(tmp_path)
    found = said(tmp_path)
    assert found["weights"] == "none"
    assert "has no weights" in found["note"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "not readable JSON"),
        (lambda f: (f / "config.json").write_text('{"model_type": "nonesuch"}'), "'nonesuch', unknown to transformers"),
        (lambda f: shutil.rmtree(f), "no folder"),
    ],
)
def test_what_cannot_be_described_is_refused(change, words, tmp_path):
    """A library's traceback."""
    llama(tmp_path / "a")
    change(tmp_path / "a")
    with pytest.raises(CheckpointError, match=words):
        inspect(tmp_path / "a")


def test_hub_ids_are_not_fetched(no_network):
    """A download for a look."""
    with pytest.raises(CheckpointError, match="on this machine"):
        inspect("no-such-org/no-such-model")


def test_a_class_that_cannot_be_built_is_still_described(tmp_path, monkeypatch):
    """All that is known kept back because one thing is not."""
    llama(tmp_path)

    def broken(*_):
        raise RuntimeError("needs a compiled kernel")

    monkeypatch.setattr(LlamaForCausalLM, "__init__", broken)
    found = said(tmp_path)
    assert "LlamaForCausalLM cannot be built" in found["family"]
    assert found["sizes"].startswith("layers 3, hidden size 32")


def test_a_residual_that_no_family_knows_says_what_its_layers_are(tmp_path, monkeypatch):
    """The name of a family that does not fit, rather than none."""
    llama(tmp_path)

    def unknown(_):
        raise UnknownFamilyError("a long message", "what 'a' gives is lost")

    monkeypatch.setattr(inspection, "find_layout", unknown)
    assert said(tmp_path)["family"].startswith(
        "none knows its residual: what 'a' gives is lost; its list 'model.layers' holds 3 LlamaDecoderL"
    )


def test_readme_shows_the_table_of_families():
    """A family, a class of W or an error in README that is not the one in code."""
    text = (Path(__file__).parent.parent / "README.md").read_text()
    shown = text.partition(START)[2].partition(END)[0].strip()
    assert shown == f"{markdown()}\n\n{CAPTION}", "run: resinspect families --write README.md"


def test_every_family_is_a_row():
    """A row left out, or columns in another order than their names."""
    table = {row[0]: row for row in family_rows()}
    assert [*table] == [*FAMILIES, "any module"]
    for name, family in FAMILIES.items():
        assert table[name][1:4] == (family.scheme, family.weight, family.readers)
        assert float(table[name][5]) == pytest.approx(family.error)
        assert ("solve" in table[name][4]) == (family.weight in ("static scalar", "scalar per token", "solved"))


def test_the_table_replaces_only_itself(tmp_path):
    """Text around the table lost, or a file without marks overwritten."""
    path = tmp_path / "a.md"
    path.write_text(f"before\n{START}\nold\n{END}\nafter é\n", encoding="utf-8")
    write_table(path)
    write_table(path)
    assert path.read_text(encoding="utf-8") == f"before\n{START}\n\n{markdown()}\n\n{CAPTION}\n\n{END}\nafter é\n"
    path.write_text("no marks")
    with pytest.raises(OptionError, match="does not hold the lines"):
        write_table(path)
    assert path.read_text() == "no marks"
    with pytest.raises(OptionError, match="cannot be read"):
        write_table(tmp_path / "none.md")

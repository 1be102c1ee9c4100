"""Training from a recipe: resumable, reproducible, stored small."""

import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import resinspect as ri
from resinspect.errors import OptionError
from resinspect.models.training import read_recipe, train

TINY = """
extends = "{base}"
[model]
connection = "attnres"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
[training]
tokens = {tokens}
context = 16
batch_size = 2
warmup_steps = 2
save_steps = 5
"""


@pytest.fixture
def recipe(tmp_path, pytestconfig):
    base = pytestconfig.rootpath / "data" / "recipes" / "base.toml"
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(base=base, tokens=32 * 40))
    return path


def test_a_killed_run_resumes_to_the_same_weights(recipe, tmp_path):
    """A resume that repeats or skips data, or restarts the optimizer."""
    train(read_recipe(recipe), tmp_path / "whole")
    command = [sys.executable, "-m", "resinspect.cli", "train", str(recipe), "--out", str(tmp_path / "killed")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not any((tmp_path / "killed").glob("unfinished/checkpoint-*/trainer_state.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None, "training ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "config.json").exists(), "nothing may look finished yet"
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"wrote {tmp_path / 'killed'}"
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == resumed.keys()
    for name in whole:
        torch.testing.assert_close(whole[name], resumed[name], rtol=0, atol=0)
    assert not (tmp_path / "killed" / "unfinished").exists()


def test_stored_model_loads_as_float32_with_exact_routing(recipe, tmp_path):
    """bfloat16 storage that comes back as a bfloat16 model, or routing parameters rounded away."""
    folder = train(read_recipe(recipe), tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    assert stored["connection.query"].dtype == torch.float32
    assert stored["embed_tokens.weight"].dtype == torch.bfloat16
    assert float(stored["connection.query"].abs().max()) > 0, "the queries were trained"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    loaded, tokenizer = ri.load(str(folder))
    for name, value in loaded.state_dict().items():
        if name in stored:
            torch.testing.assert_close(value, stored[name].float(), rtol=0, atol=0)
    assert tokenizer("text")["input_ids"]
    assert loaded.config.use_cache, "the Trainer turns the cache off; a stored model must have it"
    with pytest.raises(OptionError, match="already holds a model"):
        train(read_recipe(recipe), folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[training]\nstepps = 3\n", "unknown keys stepps; allowed are corpus"),
        ("[training]\ntokens = 3\n", r"needs corpus and tokenizer in its \[data\]"),
        ("tokens = ", "is not TOML"),
        ('extends = "nowhere.toml"', "nowhere.toml cannot be read"),
    ],
)
def test_bad_recipes_get_one_sentence(text, words, tmp_path):
    """A KeyError, or a misspelt setting ignored in silence."""
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=words):
        read_recipe(path)

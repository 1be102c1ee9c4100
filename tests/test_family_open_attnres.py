"""The open attention residual layout: our forward is the published one, and what is not that layout is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import PROMPTS
from tiny.depth import open_attnres

import resinspect as ri
from resinspect.errors import CaptureError, CheckpointError


def test_open_full_mode_with_zero_queries_averages_states():
    """States taken for writes: every write would get the same weight."""
    model = open_attnres("full")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_res_proj.weight", "_res_bias")):
                parameter.zero_()
    weight = ri.capture(model, PROMPTS[:1])["weight"].values
    # After n writes there are n + 1 states and the current one again; write i is in n - i + 1 of them and in that.
    for n in range(10):
        expected = [(n - i + 2) / (n + 2) for i in range(n + 1)]
        np.testing.assert_allclose(
            weight[:, n, : n + 1], np.broadcast_to(expected, (weight.shape[0], n + 1)), rtol=1e-6
        )
    np.testing.assert_array_equal(weight[:, -1], 1)


def test_open_recency_bias_leads_back_to_the_plain_residual():
    """A bias added to the score of the wrong state."""
    model = open_attnres("block")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_res_bias"):
                parameter.fill_(1e4)
    weight = ri.capture(model, PROMPTS)["weight"].values
    np.testing.assert_array_equal(weight[~np.isnan(weight)], 1)


@pytest.mark.parametrize(("mode", "gate"), [("block", "bias"), ("full", "sigmoid_scalar"), ("block", "sigmoid_vector")])
def test_open_reads_follow_the_published_algebra(mode, gate):
    """A forward of our own that trains fine and is another model than the checkpoints are of."""
    model = open_attnres(mode, gate).double()
    trace = ri.capture(model, PROMPTS[:1], keep=("hidden",))
    writes, reads = trace["source_hidden"].values, trace["reader_hidden"].values
    for layer in range(5):
        for half, name in enumerate(("attn", "mlp")):
            n = 2 * layer + half
            states = writes[:, : n + 1].cumsum(1)
            kept = range(n + 1) if mode == "full" else [i for i in (0, 4, 8) if i <= n]  # blocks of ceil(5 / 3) layers
            seen = np.concatenate([states[:, list(kept)], states[:, -1:]], axis=1)
            part = {key: value.detach().numpy() for key, value in model.model.layers[layer].named_parameters()}
            # transformers norms in float32 whatever the model's dtype.
            keys = seen / np.sqrt(np.square(seen).mean(-1, keepdims=True) + 1e-6) * part[f"{name}_res_norm.weight"]
            scores = keys @ part[f"{name}_res_proj.weight"][0]
            scores[:, -1] += part[f"{name}_res_bias"]
            alpha = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("ts,tsd->td", alpha / alpha.sum(-1, keepdims=True), seen)
            current = seen[:, -1]
            share = 1.0
            if gate == "sigmoid_scalar":
                share = 1 / (1 + np.exp(-part[f"{name}_res_gate_logit"]))
            elif gate == "sigmoid_vector":
                linear = current @ part[f"{name}_res_gate_proj.weight"].T + part[f"{name}_res_gate_proj.bias"]
                share = 1 / (1 + np.exp(-linear))
            np.testing.assert_allclose(reads[:, n], (1 - share) * current + share * mixed, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attnres_mode": None}, "attnres_mode is None"),
        ({"attnres_mode": "delta_block"}, "attnres_mode is 'delta_block'"),
        ({"attnres_gate_type": "other"}, "attnres_gate_type is 'other'"),
        ({"attnres_num_blocks": None}, "attnres_num_blocks is None"),
    ],
)
def test_open_checkpoints_of_unknown_modes_are_refused(changes, words, tmp_path):
    """A checkpoint of another scheme with the same weights, run as if it were this one."""
    open_attnres().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        ri.load(tmp_path)


@pytest.mark.parametrize("change", [{"attnres_mode": "delta"}, {"attnres_mode": "block", "attnres_num_blocks": None}])
def test_a_model_of_an_unknown_mode_is_refused_by_name(change):
    """A user's own class with the same modules, and the sentence for models that nobody knows."""
    model = open_attnres()
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(CaptureError, match=f"config.{list(change)[-1]} is {list(change.values())[-1]!r}"):
        ri.capture(model, [[1, 2, 3]])


@pytest.mark.parametrize("change", ["readout", "no bias"])
def test_open_checkpoints_of_other_layouts_are_refused(change, tmp_path):
    """Block sums that start anew and a routed readout, or no bias: later variants, under the same model_type."""
    open_attnres().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "readout":
        tensors["model.final_res_proj.weight"] = torch.zeros(1, 32)
    else:
        tensors = {name: value for name, value in tensors.items() if not name.endswith("_res_bias")}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="final_res_proj" if change == "readout" else "attn_res_bias"):
        ri.load(tmp_path)


def test_open_checkpoint_as_its_authors_write_it_loads(tmp_path):
    """A config with their class name, their own code beside it and keys that say nothing here."""
    model = open_attnres()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3AttnResForCausalLM"]
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_attnres.Qwen3AttnResForCausalLM"}
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, _ = ri.load(tmp_path)
    found, expected = ri.capture(loaded, PROMPTS), ri.capture(model, PROMPTS)
    np.testing.assert_allclose(found["weight"].values, expected["weight"].values, rtol=1e-5, atol=1e-6)

"""Other people's models of no file of their own: what a probe finds in them, and that mistakes in it are found."""

import copy

import numpy as np
import pytest
import torch
from tiny import plain, post_norm

import resinspect as ri
from resinspect.errors import CaptureError
from resinspect.families import find_layout

PROMPTS = [[3, 14, 15, 9, 2, 6], [27, 18, 28, 18]]
CASES = {case.name: case for case in (*plain.CASES, *post_norm.CASES)}


def test_a_multiplier_that_changes_after_the_layout_is_off(monkeypatch):
    """A fidelity check that would let a wrong multiplier pass."""
    model = CASES["granite"].build()
    layout = find_layout(model)
    monkeypatch.setattr("resinspect.hooks.capture.find_layout", lambda _: layout)
    model.model.layers[1].residual_multiplier = 0.2
    with pytest.raises(CaptureError, match=r"wrong from reader '1\.mlp'"):
        ri.capture(model, PROMPTS)


def test_what_granite_writes_is_what_it_adds():
    """The output of a module taken for the write where its layer multiplies it."""
    model, seen = CASES["granite"].build(), []
    model.model.layers[1].self_attn.register_forward_hook(lambda m, i, o: seen.append(o[0][0]))
    trace = ri.capture(model, PROMPTS[:1], keep=("hidden",))
    np.testing.assert_array_equal(trace["source_hidden"].sel(source="1.attn").values, 0.22 * seen[-1].numpy())


@pytest.mark.parametrize("name", ["granite", "minicpm3", "hyperclovax", "falcon_h1_multiplied", "rwkv"])
def test_half_precision_finds_the_same_numbers(name):
    """A multiplier measured in bfloat16 instead of read off the model: 0.2197 for 0.22."""
    layouts = [find_layout(CASES[name].build().to(dtype)) for dtype in (torch.float32, torch.bfloat16)]
    assert layouts[0].anatomy == layouts[1].anatomy
    assert layouts[0].write_definition == layouts[1].write_definition
    assert getattr(layouts[0].connection, "keep", {}) == getattr(layouts[1].connection, "keep", {})


def test_rwkv_halves_what_it_carries():
    """A rescale between layers, outside of every layer, overlooked."""
    weight = ri.capture(CASES["rwkv"].build(), PROMPTS)["weight"].sel(reader="final").values
    assert (weight == [0.5, 0.5, 0.5, 0.5, 0.5, 1, 1]).all()


@pytest.mark.parametrize(
    ("name", "readers", "sources"),
    [
        ("llama", ["attn", "mlp"], ["attn", "mlp"]),
        ("gemma2", ["attn", "mlp"], ["attn", "mlp"]),
        ("bloom", ["attn", "mlp"], ["attn", "mlp"]),
        ("opt", ["attn", "mlp"], ["attn", "mlp"]),
        ("cohere", ["attn+mlp"], ["attn", "mlp"]),
        ("gpt_neox_parallel", ["attn", "mlp"], ["attn", "mlp"]),
        ("falcon_two_norms", ["attn", "mlp"], ["attn", "mlp"]),
        ("granitemoeshared", ["attn", "mlp"], ["attn", "block_sparse_moe", "shared_mlp"]),
        ("falcon_h1", ["mamba+attn", "mlp"], ["mamba", "attn", "mlp"]),
        ("mamba", ["mixer"], ["mixer"]),
        ("bert", ["attn", "mlp"], ["attn", "attn.bias", "mlp", "mlp.bias"]),
    ],
)
def test_names_say_what_reads_and_writes(name, readers, sources):
    """One shared norm counted as two readers, two norms as one, or a write named after the norm behind it."""
    anatomy = find_layout(CASES[name].build()).anatomy
    assert [r.name for r in anatomy.readers if r.layer == 1] == [f"1.{reader}" for reader in readers]
    assert [s.name for s in anatomy.sources if s.layer == 1] == [f"1.{source}" for source in sources]


def test_parallel_branches_read_the_same_sources():
    """The second of two parallel norms credited with the first branch's write."""
    anatomy = find_layout(CASES["gpt_neox_parallel"].build()).anatomy
    assert [reader.prefix for reader in anatomy.readers] == [1, 1, 3, 3, 5, 5, 7]


def test_a_shared_norm_is_one_reader_whatever_it_feeds():
    """The number of readers taken from the number of modules fed."""
    assert len(find_layout(CASES["phi"].build()).anatomy.readers) == 4


@pytest.mark.parametrize("mistake", ["bias", "centre", "gain", "norm"])
def test_mistakes_in_a_norm_on_the_carry_are_found(mistake, monkeypatch):
    """A frozen norm whose parts the fidelity does not see."""
    model = CASES["bert"].build()
    layout = find_layout(model)
    norms = layout.connection.norms
    index = max(norms)
    if mistake == "norm":
        del norms[index]
    else:
        wrong = copy.copy(norms[index])
        value = {"bias": 0 * wrong.bias, "centre": False, "gain": wrong.gain.flip(0)}[mistake]
        object.__setattr__(wrong, mistake, value)
        norms[index] = wrong
        if mistake == "bias":
            right = layout.connection.write
            monkeypatch.setattr(layout.connection, "write", lambda *a: right(*a[:-1], 0 * a[-1]))
    monkeypatch.setattr("resinspect.hooks.capture.find_layout", lambda _: layout)
    with pytest.raises(CaptureError, match="map is wrong from reader"):
        ri.capture(model, PROMPTS)


def test_the_first_gpt_reads_what_its_norms_give():
    """A post-norm model mapped as if its sublayers read the sum before the norm."""
    model, seen = CASES["openai_gpt"].build(), []
    model.transformer.h[0].ln_1.register_forward_hook(lambda m, i, o: seen.append(o[0]))
    trace = ri.capture(model, PROMPTS[:1], keep=("hidden",))
    np.testing.assert_array_equal(trace["reader_hidden"].sel(reader="0.mlp").values, seen[-1].numpy())

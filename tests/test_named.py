"""Sublayers that a user names: calls of looped and shared modules, and writes that no one named."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import resinspect as ri
from resinspect.errors import CaptureError

PROMPTS = [[3, 14, 15, 9, 2, 6, 5, 35, 8], [27, 18, 28, 18]]


class Layers(nn.Module):
    """Three layers, or one that stands for three, run ``loops`` times with a carry of one half."""

    def __init__(self, *, loops=1, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.out, self.loops = nn.Embedding(50, 24), nn.LayerNorm(24), loops
        made = [nn.ModuleDict({"norm": nn.LayerNorm(24), "mix": nn.Linear(24, 24)}) for _ in range(3)]
        self.h = nn.ModuleList([made[0]] * 3 if shared else made)

    def forward(self, ids):
        x = self.wte(ids)
        for _ in range(self.loops):
            for layer in self.h:
                x = 0.5 * x + layer["mix"](torch.tanh(layer["norm"](x)))
        return self.out(x)


HALVES = [0.5**n for n in (6, 5, 4, 3, 2, 1, 0)]
EACH_LOOP = [("h.*.mix", "h.*.norm"), ("h.*.mix@1", "h.*.norm@1")]


def test_looped_layers_have_a_source_and_a_reader_for_each_call():
    """One record per module: the second loop overwrites the first."""
    trace = ri.capture(Layers(loops=2), [[1, 2, 3]], sublayers=EACH_LOOP, final="out")
    names = ["h.0.mix", "h.1.mix", "h.2.mix", "h.0.mix@1", "h.1.mix@1", "h.2.mix@1"]
    assert trace["reader"].values.tolist() == [*names, "final"]
    assert trace["source"].values.tolist() == ["embed", *names]
    assert trace["source_layer"].values.tolist() == [-1, 0, 1, 2, 0, 1, 2]
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    np.testing.assert_allclose(trace["weight"].sel(reader="final").values, [HALVES] * 3, rtol=1e-4)


def test_one_module_under_several_names_runs_once_for_each():
    """A layer that stands three times in a list, refused or recorded once."""
    trace = ri.capture(Layers(shared=True), [[1, 2, 3]], sublayers=EACH_LOOP[:1], final="out")
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    np.testing.assert_allclose(trace["weight"].sel(reader="final").values, [HALVES[3:]] * 3, rtol=1e-4)


@pytest.mark.parametrize(
    ("sublayers", "final", "words"),
    [
        (EACH_LOOP[:1], "out", r"'h\.0\.norm' ran a second time.*'h\.0\.norm@1' is this one"),
        ([*EACH_LOOP, ("h.*.mix@2", "h.*.norm@2")], "out", r"'final' ran out of order, reader 'h\.0\.mix@2' was due"),
        ([EACH_LOOP[0], ("h.*.mix@2", "h.*.norm@1")], "out", r"write 'h\.0\.mix@2' but not 'h\.0\.mix@1'"),
        ([EACH_LOOP[0], EACH_LOOP[0]], "out", r"write 'h\.0\.mix' twice.*'h\.0\.mix', 'h\.0\.mix@1', \.\.\."),
        (EACH_LOOP, "out@1", "'final' never ran"),
        ([("h.*.mix@first", "h.*.norm")], "out", r"'h\.\*\.mix@first', but after @ comes the number of a call"),
    ],
    ids=["too few", "too many", "gap", "twice", "final", "no number"],
)
def test_calls_named_wrongly_are_explained(sublayers, final, words):
    """A map of some of the calls, or an IndexError."""
    with pytest.raises(CaptureError, match=words):
        ri.capture(Layers(loops=2), [[1, 2]], sublayers=sublayers, final=final)


class SideBySide(nn.Module):
    """Two branches that read one norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.norm, self.out = nn.Embedding(50, 24), nn.LayerNorm(24), nn.LayerNorm(24)
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, ids):
        x = self.wte(ids)
        for scale in (1.0, 0.5):
            read = self.norm(x)
            x = x + scale * self.a(torch.tanh(read)) + self.b(torch.cos(read))
        return self.out(self.norm(x))


def test_branches_of_one_reader_are_parallel_and_a_reader_may_run_more_often_than_it_is_named():
    """The second branch refused, because the first has not written yet; or read as if it had."""
    pairs = [("a", "norm"), ("b", "norm"), ("a@1", "norm@1"), ("b@1", "norm@1")]
    trace = ri.capture(SideBySide(), [[1, 2, 3]], sublayers=pairs, final="norm@2")
    assert ri.fidelity_summary(trace)["verdict"] == "exact"
    assert trace["reader_prefix"].values.tolist() == [1, 1, 3, 3, 5]
    np.testing.assert_allclose(trace["weight"].sel(reader="final").values, [[1, 1, 1, 0.5, 1]] * 3, rtol=1e-4)


class Leaky(nn.Module):
    """Six plain layers, and one more write after sublayer ``where``."""

    def __init__(self, where, scale, width=32):
        super().__init__()
        torch.manual_seed(0)
        parts = {"n1": nn.LayerNorm, "attn": nn.Linear, "n2": nn.LayerNorm, "mlp": nn.Linear}
        self.wte, self.out, self.side = nn.Embedding(50, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.h = nn.ModuleList(
            nn.ModuleDict({n: make(*[width] * (1 + (make is nn.Linear))) for n, make in parts.items()})
            for _ in range(6)
        )
        self.where, self.scale = where, scale

    def forward(self, ids):
        x = self.wte(ids)
        pairs = [(layer[norm], layer[mix]) for layer in self.h for norm, mix in (("n1", "attn"), ("n2", "mlp"))]
        for i, (norm, mix) in enumerate(pairs):
            x = x + mix(torch.tanh(norm(x)))
            if i == self.where:
                x = x + self.scale * self.side(torch.cos(x))
        return self.out(x)


NAMES = {"sublayers": [("h.*.attn", "h.*.n1"), ("h.*.mlp", "h.*.n2")], "final": "out"}
READERS = [f"h.{i}.{kind}" for i in range(6) for kind in ("attn", "mlp")] + ["final"]


@pytest.mark.parametrize("width", [32, 16])
@pytest.mark.parametrize("scale", [1.0, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("where", [0, 3, 7, 10, 11])
def test_an_unlisted_write_is_reported_at_the_first_reader_that_has_it(where, scale, width):
    """A solve is fitted in-sample: a small source that is missing makes it unknown, and nobody is told where."""
    prompts = torch.randint(0, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    first, before = READERS[where + 1], READERS[where]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            words = ri.verdict(ri.capture(Leaky(where, scale, width), prompts, **NAMES)).values.tolist()
            said = str(caught[-1].message)
            assert words[: where + 2] == ["exact"] * (where + 1) + ["off"]
        except CaptureError as error:
            said = str(error)
            assert scale == 1.0
    assert f"missing before '{first}' and after '{before}'" in said
    assert f"from reader '{first}' on" in said or f"first '{first}'" in said


def test_a_model_without_it_is_exact():
    """A report that fires on everything."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trace = ri.capture(Leaky(-1, 0.0), PROMPTS, **NAMES)
    assert ri.fidelity_summary(trace)["verdict"] == "exact"


class Gated(nn.Module):
    """A residual that is multiplied, with more experts in a layer than there are layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.out = nn.Embedding(50, 16), nn.LayerNorm(16)
        experts = [nn.ModuleList(nn.Linear(16, 16) for _ in range(5)) for _ in range(2)]
        self.h = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(16, 16), "experts": e}) for e in experts)

    def forward(self, ids):
        x = self.wte(ids)
        for layer in self.h:
            x = x * layer["gate"](x).sigmoid() + sum(expert(x).tanh() for expert in layer["experts"])
        return self.out(x)


def test_an_unknown_model_is_one_sentence_about_its_layers():
    """Its experts shown as its layers, or a guess at its sublayers."""
    with pytest.raises(CaptureError, match="belongs to no known family") as error:
        ri.capture(Gated(), [[1, 2, 3, 4]])
    assert "its list 'h' holds 2 ModuleDict with gate (Linear), experts (ModuleList)" in str(error.value)
    assert 'method="solve", sublayers=[("layers.*.attn", "layers.*.norm1"), ...]' in str(error.value)

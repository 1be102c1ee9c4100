"""Checkpoints trained by other people, in modules resinspect has never seen: solved from named sublayers."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import resinspect as ri

SHARED = Path(__file__).resolve().parents[2] / "shared" / "checkpoints"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared checkpoints lie outside the repository")


class Norm(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Attention(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.c_attn(x).chunk(3, dim=-1))
        score = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed = score.masked_fill(future, -math.inf).softmax(-1) @ v
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.ln_1, self.ln_2 = Norm(width, bias), Norm(width, bias)
        self.attn, self.mlp = Attention(width, heads, bias), MLP(width, bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallGPT(nn.Module):
    """A plain nn.Module as found in many repositories: no config, no attention mask, logits as its output."""

    def __init__(self, vocab, context, width, *, heads, layers, bias):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias) for _ in range(layers))
        self.ln_f = Norm(width, bias)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def slm():
    """The model, and its training text in windows of its context."""
    checkpoint = torch.load(SHARED / "slm4096" / "ckpt.pt", map_location="cpu", weights_only=True)
    c = checkpoint["config"]
    model = SmallGPT(c["vocab_size"], c["block_size"], c["n_embd"], heads=c["n_head"], layers=c["n_layer"], bias=True)
    model.load_state_dict({k: v for k, v in checkpoint["model_state"].items() if not k.endswith("attn.mask")})
    text = (SHARED / "slm4096" / "corpus.txt").read_text()
    ids = [checkpoint["stoi"][character] for character in text]
    return model, [ids[i : i + 128] for i in range(0, 1024, 128)], 0.0719


def gpt_by_hand():
    """The model, and its validation data in windows of its context."""
    checkpoint = torch.load(SHARED / "gptbyhand" / "ckpt.pt", map_location="cpu", weights_only=True)
    model = SmallGPT(32, 8, 16, heads=2, layers=2, bias=False)
    rename = {"transformer.wte": "tok_emb", "transformer.wpe": "pos_emb", "transformer.h.": "blocks."}
    rename |= {"transformer.ln_f": "ln_f", "lm_head": "head", ".gamma": ".weight"}
    weights = {}
    for name, value in checkpoint["model"].items():
        for old, new in rename.items():
            name = name.replace(old, new)
        weights[name] = value
    model.load_state_dict(weights)
    ids = np.fromfile(SHARED / "gptbyhand" / "val.bin", dtype=np.uint16).tolist()
    return model, [ids[i : i + 8] for i in range(0, len(ids) - 8, 8)], 1.310


@needs_shared
@pytest.mark.parametrize("origin", [slm, gpt_by_hand])
def test_solve_finds_the_plain_residual(origin):
    """A solver that only works on models whose scheme it knows."""
    model, prompts, loss = origin()
    pairs = [("blocks.*.attn", "blocks.*.ln_1"), ("blocks.*.mlp", "blocks.*.ln_2")]
    trace = ri.capture(model, prompts, method="solve", sublayers=pairs, final="ln_f")
    summary = ri.fidelity_summary(trace)
    assert summary["verdict"] == "exact"
    assert summary["worst"] <= 1e-5
    weight, error = trace["weight"].values, trace["weight_error"].values
    known = ~np.isnan(weight)
    assert known.sum() > 0.9 * (~np.isnan(error)).sum()
    assert (np.abs(weight - 1)[known] <= error[known]).all()
    assert np.abs(weight - 1)[known].max() <= 1e-4
    assert float(np.nanmean(trace["loss"].values)) == pytest.approx(loss, rel=0.01), "the weights are in their places"

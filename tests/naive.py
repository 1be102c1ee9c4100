"""Independent forward passes, written from systems.md as plainly as possible, one function per residual scheme.

They share no code with ``resinspect.models`` or ``resinspect.program``: weights come from the state dict by name.
"""

import math

import torch

Weights = dict[str, torch.Tensor]


def rms_norm(x, gain, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def attention(w: Weights, layer: int, x, heads: int, base: float):
    tokens, width = x.shape[1:]
    size = width // heads
    x = rms_norm(x, w[f"layers.{layer}.attn.norms.0.weight"])
    q, k, v = (x @ w[f"layers.{layer}.attn.{p}.weight"].T for p in "qkv")
    out = torch.zeros_like(x)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        qh, kh, vh = turn(q[..., part], base), turn(k[..., part], base), v[..., part]
        score = qh @ kh.mT / math.sqrt(size)
        for t in range(tokens):
            score[:, t, t + 1 :] = -math.inf
        out[..., part] = score.softmax(-1) @ vh
    return out @ w[f"layers.{layer}.attn.o.weight"].T


def turn(x, base):
    """Rotary positions: channels i and i + size/2 form a complex number, turned by position * base^(-2i/size)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * base ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def mlp(w: Weights, layer: int, x):
    x = rms_norm(x, w[f"layers.{layer}.mlp.norms.0.weight"])
    gate, up, down = (w[f"layers.{layer}.mlp.{p}.weight"] for p in ("gate", "up", "down"))
    a = x @ gate.T
    return (a * torch.sigmoid(a) * (x @ up.T)) @ down.T


class Sublayers:
    """``f(l, x)``: the sublayer l = 1..L of systems.md, attention first."""

    def __init__(self, model):
        self.w = {name: value.detach() for name, value in model.state_dict().items()}
        self.config = model.config
        self.count = 2 * model.config.num_hidden_layers

    def embed(self, ids):
        return self.w["embed_tokens.weight"][ids]

    def __call__(self, number, x):
        layer = (number - 1) // 2
        if number % 2:
            return attention(self.w, layer, x, self.config.num_attention_heads, self.config.rope_theta)
        return mlp(self.w, layer, x)

    def logits(self, h):
        return rms_norm(h, self.w["final.norms.0.weight"]) @ self.w["embed_tokens.weight"].T


def pre_ln(f: Sublayers, ids):
    """systems.md 1.1: h_{l+1} = h_l + f_l(h_l)."""
    h = f.embed(ids)
    for number in range(1, f.count + 1):
        h = h + f(number, h)
    return f.logits(h)


def attnres(f: Sublayers, ids):
    """systems.md 3.1: h_l = sum_i softmax_i(w_l . RMSNorm(v_i)) v_i over the embedding and all earlier writes."""
    values = [f.embed(ids)]
    for number in range(1, f.count + 2):
        if number == 1:
            h = values[0]
        else:
            query = f.w["connection.query"][number - 2]
            stacked = torch.stack(values)
            logit = (query * rms_norm(stacked, 1.0)).sum(-1)
            h = (logit.softmax(0)[..., None] * stacked).sum(0)
        if number <= f.count:
            values.append(f(number, h))
    return f.logits(h)


def hyper_connections(f: Sublayers, ids):
    """systems.md 6.1: h = A_m^T H, H' = A_r^T H + B^T T(h), weights from norm(H) row by row; output sum of rows."""
    p = {name.removeprefix("connection."): value for name, value in f.w.items() if name.startswith("connection.")}
    n = p["pre"].shape[1]
    rows = [f.embed(ids)] * n
    for number in range(1, f.count + 1):
        k = number - 1
        a_m = [p["pre"][k, s] for s in range(n)]
        b = [p["post"][k, s] for s in range(n)]
        a_r = [[p["mix"][k, i, j] for j in range(n)] for i in range(n)]
        if "weight" in p:
            for s in range(n):
                bar = torch.tanh(rms_norm(rows[s], p["gain"][k]) @ p["weight"][k])
                a_m[s] = a_m[s] + p["scale_alpha"][k] * bar[..., 0]
                b[s] = b[s] + p["scale_beta"][k] * bar[..., 1]
                a_r[s] = [a_r[s][j] + p["scale_alpha"][k] * bar[..., 2 + j] for j in range(n)]
        h = sum(scaled(a_m[s], rows[s]) for s in range(n))
        out = f(number, h)
        rows = [sum(scaled(a_r[i][j], rows[i]) for i in range(n)) + scaled(b[j], out) for j in range(n)]
    return f.logits(sum(rows))


def scaled(weight, x):
    return weight[..., None] * x if weight.ndim else weight * x


FORWARD = {"pre_ln": pre_ln, "attnres": attnres, "hyper_connections": hyper_connections}

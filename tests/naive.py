"""Independent forward passes, written from the papers as plainly as possible, one function per residual scheme.

They share no code with ``resinspect.models`` or ``resinspect.program``: weights come from the state dict by name.
"""

import math

import torch

Weights = dict[str, torch.Tensor]


def rms_norm(x, gain, eps=1e-6):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def attention(f, layer, xs, kind="attn", window=None):
    """Softmax attention of three inputs (queries, keys, values), one head and one query position at a time."""
    w, heads, base = f.w, f.config.num_attention_heads, f.config.rope_theta
    name = f"layers.{layer}.{kind}"
    xs = [f.normed(x, f"{name}.norms.{i if len(xs) == 3 else 0}.weight") for i, x in enumerate(xs * (3 // len(xs)))]
    q, k, v = (x @ w[f"{name}.{p}.weight"].T for x, p in zip(xs, "qkv", strict=True))
    tokens, width = q.shape[1:]
    size = width // heads
    out = torch.zeros_like(q)
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        qh, kh, vh = turn(q[..., part], base), turn(k[..., part], base), v[..., part]
        score = qh @ kh.mT / math.sqrt(size)
        for t in range(tokens):
            score[:, t, t + 1 :] = -math.inf
            if window:
                score[:, t, : max(0, t - window + 1)] = -math.inf
        out[..., part] = score.softmax(-1) @ vh
    return f.written(out @ w[f"{name}.o.weight"].T, name)


def turn(x, base):
    """Rotary positions: channels i and i + size/2 form a complex number, turned by position * base^(-2i/size)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * base ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def mlp(f, layer, x):
    name = f"layers.{layer}.mlp"
    x = f.normed(x, f"{name}.norms.0.weight")
    gate, up, down = (f.w[f"{name}.{p}.weight"] for p in ("gate", "up", "down"))
    a = x @ gate.T
    return f.written((a * torch.sigmoid(a) * (x @ up.T)) @ down.T, name)


class Sublayers:
    """``f(l, x)``: the sublayer l = 1..L, attention first."""

    def __init__(self, model):
        self.w = {name: value.detach() for name, value in model.state_dict().items()}
        self.p = {n.removeprefix("connection."): v for n, v in self.w.items() if n.startswith("connection.")}
        self.config, self.options = model.config, model.config.connection_options
        self.count = 2 * model.config.num_hidden_layers

    def embed(self, ids):
        return self.w["embed_tokens.weight"][ids]

    def normed(self, x, name):
        return rms_norm(x, self.w[name]) if name in self.w else x

    def written(self, x, name):
        return self.normed(x, f"{name}.post_norm.weight")

    def __call__(self, number, *xs):
        layer = (number - 1) // 2
        return attention(self, layer, list(xs)) if number % 2 else mlp(self, layer, *xs)

    def logits(self, h):
        return self.normed(h, "final.norms.0.weight") @ self.w["embed_tokens.weight"].T


def pre_ln(f: Sublayers, ids):
    """plain residual: h_{l+1} = h_l + f_l(h_l)."""
    h = f.embed(ids)
    for number in range(1, f.count + 1):
        h = h + f(number, h)
    return f.logits(h)


def post_ln(f: Sublayers, ids):
    """Vaswani et al. 2017: h_{l+1} = LN_l(h_l + f_l(h_l)), no pre-norm, no final norm."""
    h = f.embed(ids)
    for number in range(1, f.count + 1):
        z = h + f(number, h)
        centred = z - z.mean(-1, keepdim=True)
        sigma = torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
        h = f.p["gain"][number - 1] * centred / sigma + f.p["bias"][number - 1]
    return f.logits(h)


def denseformer(f: Sublayers, ids):
    """arXiv 2402.02622: X_i = B_i(Y_{i-1}), Y_i = sum over j = i mod k of alpha_ij X_j where period divides i."""
    dilation, period = f.options.get("dilation", 1), f.options.get("period", 1)
    outputs = [f.embed(ids)]
    y = outputs[0]
    for i in range(1, f.count // 2 + 1):
        u = y + f(2 * i - 1, y)
        outputs.append(u + f(2 * i, u))
        y = outputs[i]
        if i % period == 0:
            chosen = [j for j in range(i + 1) if (i - j) % dilation == 0]
            y = sum(f.p[f"alpha.{i}"][n] * outputs[j] for n, j in enumerate(chosen))
    return f.logits(y)


def attnres(f: Sublayers, ids):
    """arXiv 2603.15031, section 3: h_l = sum_i softmax_i(score) v_i over the embedding and all earlier writes."""
    values = [f.embed(ids)]
    for number in range(1, f.count + 2):
        if number == 1:
            h = values[0]
        else:
            stacked = torch.stack(values)
            h = (depth_logits(f, number - 2, stacked).softmax(0)[..., None] * stacked).sum(0)
        if number <= f.count:
            values.append(f(number, h))
    return f.logits(h)


def depth_logits(f: Sublayers, reader, stacked):
    """The four cells of the 2 x 2: fixed or dynamic query, dynamic or static key."""
    newest = rms_norm(stacked[-1], 1.0)
    if f.options.get("key") == "static":
        logit = f.p[f"score.{reader}"][:, None, None].expand(stacked.shape[:3])
        if f.options.get("query") == "dynamic":
            query = newest @ f.p["project"][reader]
            keys = f.p[f"key.{reader}"]
            logit = logit + torch.stack([(query * key).sum(-1) for key in keys]) / math.sqrt(keys.shape[1])
        return logit
    if f.options.get("query") == "dynamic":
        query = newest @ f.p["project"][reader] / math.sqrt(stacked.shape[-1])
    else:
        query = f.p["query"][reader]
    return (query * rms_norm(stacked, 1.0)).sum(-1)


def block_attnres(f: Sublayers, ids):
    """arXiv 2603.15031, section 3.2: b_0 = emb, sums of completed blocks, and the partial sum once it has a write."""
    size = f.options.get("block_size", 4)
    writes = []
    embedding = f.embed(ids)
    for number in range(1, f.count + 2):
        done = (number - 1) // size
        blocks = [embedding, *(sum(writes[n * size : (n + 1) * size]) for n in range(done))]
        if partial := writes[done * size :]:
            blocks.append(sum(partial))
        stacked = torch.stack(blocks)
        if number == 1:
            h = embedding
        else:
            logit = (f.p["query"][number - 2] * rms_norm(stacked, 1.0)).sum(-1)
            h = (logit.softmax(0)[..., None] * stacked).sum(0)
        if number <= f.count:
            writes.append(f(number, h))
    return f.logits(h)


def dca(f: Sublayers, ids):
    """arXiv 2502.06785: g = sum_n (b_n + ReLU(w . s_n)) s_n over emb and layer outputs a + m; u = g^q + a."""
    window, layers = f.options.get("window", 0), f.count // 2
    stack = [f.embed(ids)]
    for layer in range(layers + 1):
        slots = stack
        if window and len(stack) > window + 1:
            slots = [stack[0], sum(stack[1:-window]), *stack[-window:]]
        bias = f.p[f"bias.{layer}"]
        sums = []
        for view in range(len(bias)):
            total = 0
            for n, s in enumerate(slots):
                gate = bias[view, n]
                if f"weight.{layer}" in f.p:
                    gate = gate + torch.relu((s * f.p[f"weight.{layer}"][view]).sum(-1))[..., None]
                total = total + gate * s
            sums.append(total)
        if layer == layers:
            return f.logits(sums[0])
        a = f(2 * layer + 1, *sums)
        stack.append(a + f(2 * layer + 2, sums[0] + a))
    raise AssertionError


def hyper_connections(f: Sublayers, ids):
    """arXiv 2409.19606: h = A_m^T H, H' = A_r^T H + B^T T(h), weights from norm(H) row by row; output sum of rows."""
    p = f.p
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


def mhc(f: Sublayers, ids):
    """arXiv 2512.24880: joint RMS over streams; pre sigmoid, post 2 sigmoid, res Sinkhorn, columns first, rows last."""
    n = 4
    rows = torch.stack([f.embed(ids)] * n, dim=-2)
    for number in range(1, f.count + 1):
        joint = rms_norm(torch.cat(rows.unbind(-2), dim=-1), 1.0, eps=1e-20)
        phi, bias, alpha = (f.p[name][number - 1] for name in ("weight", "bias", "scale"))
        raw = joint @ phi
        pre = torch.sigmoid(alpha[0] * raw[..., :n] + bias[:n])
        post = 2 * torch.sigmoid(alpha[1] * raw[..., n : 2 * n] + bias[n : 2 * n])
        res = torch.exp(alpha[2] * raw[..., 2 * n :] + bias[2 * n :]).unflatten(-1, (n, n))
        for _ in range(20):
            res = res / res.sum(-2, keepdim=True)
            res = res / res.sum(-1, keepdim=True)
        out = f(number, (pre[..., None] * rows).sum(-2))
        rows = torch.einsum("btij,btjd->btid", res, rows) + post[..., None] * out[..., None, :]
    return f.logits(rows.sum(-2))


def ddl(f: Sublayers, ids):
    """arXiv 2601.00417 with d_v = 1: x' = (I - beta k k^T) x + beta k v; beta 2 sigmoid, v 4 sigmoid of RMSNorm(x)."""
    x = f.embed(ids)
    for number in range(1, f.count + 1):
        out = f(number, x)
        context = rms_norm(x, 1.0)
        k = out / (out.norm(dim=-1, keepdim=True) + 1e-6)
        beta = 2 * torch.sigmoid(context @ f.p["beta"][number - 1] + f.p["beta_bias"][number - 1])[..., None]
        v = 4 * torch.sigmoid(context @ f.p["value"][number - 1])[..., None]
        erase = torch.eye(x.shape[-1], dtype=x.dtype) - beta[..., None] * k[..., :, None] * k[..., None, :]
        x = (erase @ x[..., None])[..., 0] + beta * v * k
    return f.logits(x)


def short_swa(f: Sublayers, ids):
    """arXiv 2603.16039: S = H + ShortSWA(Norm H) before attention."""
    h = f.embed(ids)
    for layer in range(f.count // 2):
        h = h + attention(f, layer, [h], "swa", window=4)
        h = h + f(2 * layer + 1, h)
        h = h + f(2 * layer + 2, h)
    return f.logits(h)


def scaled(weight, x):
    return weight[..., None] * x if weight.ndim else weight * x


FORWARD = {
    "pre_ln": pre_ln,
    "post_ln": post_ln,
    "sandwich": pre_ln,
    "denseformer": denseformer,
    "attnres": attnres,
    "block_attnres": block_attnres,
    "dca": dca,
    "hyper_connections": hyper_connections,
    "mhc": mhc,
    "ddl": ddl,
    "short_swa": short_swa,
}

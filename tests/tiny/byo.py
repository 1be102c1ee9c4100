"""Models as a user might write them, around modules of published packages."""

import importlib
import random

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from tiny.case import Tiny, randomised

WIDTH, LAYERS, STREAMS, VOCABULARY, LENGTH = 32, 3, 4, 97, 64


class Attention(nn.Module):
    """Causal, of one head; reads one input, or three for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = self.norm(x) if x.ndim == 4 else [self.norm(x)] * 3
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril() & mask[:, None, :].bool()
        return self.o(nn.functional.scaled_dot_product_attention(self.q(q), self.k(k), self.v(v), attn_mask=seen))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Hyper(nn.Module):
    """A trunk of hyper-connections of the package, with branches inside (``inside``) or called by the trunk."""

    def __init__(self, module="hyper_connections", *, inside=False, views=1, pool=False, embed=False, hand=False):
        super().__init__()
        package = importlib.import_module(module)
        kind = getattr(package, "HyperConnections", None) or package.ManifoldConstrainedHyperConnections
        self.inside, embedded = inside, {"add_stream_embed": True, "dim": WIDTH} if embed else {}
        self.expand, self.reduce = kind.get_expand_reduce_stream_functions(STREAMS, **embedded)
        if pool:
            inner = importlib.import_module("hyper_connections.hyper_connections")
            self.reduce = inner.AttentionPoolReduceStream(STREAMS, WIDTH)
        if hand:
            self.reduce = None
        self.attn, self.ff = nn.ModuleList(), nn.ModuleList()
        self.attn_hc, self.ff_hc = nn.ModuleList(), nn.ModuleList()
        for _ in range(LAYERS):
            attn, ff = Attention(), FeedForward()
            if inside:
                self.attn_hc.append(kind(STREAMS, dim=WIDTH, branch=attn))
                self.ff_hc.append(kind(STREAMS, dim=WIDTH, branch=ff))
            else:
                self.attn.append(attn)
                self.ff.append(ff)
                self.attn_hc.append(kind(STREAMS, dim=WIDTH, **({"num_input_views": views} if views > 1 else {})))
                self.ff_hc.append(kind(STREAMS, dim=WIDTH))

    def forward(self, x, mask):
        x = self.expand(x)
        for i, (attn, ff) in enumerate(zip(self.attn_hc, self.ff_hc, strict=True)):
            if self.inside:
                x = ff(attn(x, mask))
            else:
                read, add = attn(x)
                x = add(self.attn[i](read, mask))
                x = ff.decorate_branch(self.ff[i])(x)
        return x.unflatten(0, (-1, STREAMS)).sum(1) if self.reduce is None else self.reduce(x)


class DWAModules(nn.Module):
    """The weighted averages of the denseformer package as facts: attributes, weights and calls. The code is ours."""

    def __init__(self, n_blocks, dilation=1, period=1):
        super().__init__()
        self.n_blocks, self.dilation, self.period = n_blocks, dilation, period
        lengths = [len(range(block % dilation, block + 1, dilation)) for block in range(1, n_blocks + 1)]
        rows = [nn.Linear(n, 1, bias=False) if (i + 1) % period == 0 else None for i, n in enumerate(lengths)]
        self.alphas = nn.ModuleList(rows)
        self.accumulators = None

    def init_accumulators(self, x):
        self.accumulators = [x]

    def forward(self, x, block_idx):
        self.accumulators.append(x)
        if self.alphas[block_idx] is None:
            return x
        averaged = self.accumulators[(block_idx + 1) % self.dilation :: self.dilation]
        return torch.tensordot(self.alphas[block_idx].weight.view(-1), torch.stack(averaged), dims=1)


class Block(nn.Module):
    """A block with parts of GPT-2's names, or of names that no one knows."""

    def __init__(self, known):
        super().__init__()
        self.known = known
        if known:
            self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
            self.ln_2, self.mlp = nn.LayerNorm(WIDTH), FeedForward()
        else:
            self.look, self.think = Attention(), FeedForward()

    def forward(self, x, mask):
        if self.known:
            x = x + self.attn(self.ln_1(x), mask)
            return x + self.mlp(self.ln_2(x))
        return x + self.look(x, mask) + self.think(torch.tanh(x))


class Dense(nn.Module):
    def __init__(self, *, known=True, dilation=1, period=1, blocks=LAYERS):
        super().__init__()
        self.blocks = nn.ModuleList(Block(known) for _ in range(blocks))
        self.dwa = DWAModules(blocks, dilation, period)

    def forward(self, x, mask):
        self.dwa.init_accumulators(x)
        for i, block in enumerate(self.blocks):
            x = self.dwa(block(x, mask), block_idx=i)
        return x


MHC = "hyper_connections.manifold_constrained_hyper_connections"
TRUNKS = {
    "hc": lambda: Hyper(inside=True),
    "hc_views": lambda: Hyper(views=3, embed=True),
    "hc_pool": lambda: Hyper(pool=True),
    "hc_hand": lambda: Hyper(hand=True),
    "mhc": lambda: Hyper(MHC),
    "mhc_v2": lambda: Hyper("hyper_connections.mHCv2", inside=True),
    "dwa": lambda: Dense(),
    "dwa_2x3": lambda: Dense(dilation=2, period=3, blocks=7),
    "dwa_blocks": lambda: Dense(known=False, dilation=2, blocks=5),
}


class OwnConfig(PreTrainedConfig):
    model_type = "resinspect_test_own"

    def __init__(self, trunk="dwa", **options):
        self.trunk, self.hidden_size, self.num_hidden_layers = trunk, WIDTH, LAYERS
        self.vocab_size, self.max_position_embeddings = VOCABULARY, LENGTH
        super().__init__(**options)


class Own(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.trunk = TRUNKS[config.trunk]()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.embed(input_ids) + self.place.weight[: input_ids.shape[1]]
        return CausalLMOutput(logits=self.head(self.norm(self.trunk(x, mask))))


AutoConfig.register(OwnConfig.model_type, OwnConfig, exist_ok=True)
AutoModelForCausalLM.register(OwnConfig, Own, exist_ok=True)


def own(trunk):
    torch.manual_seed(0)
    random.seed(0)  # the package chooses a stream by it
    return randomised(Own(OwnConfig(trunk)))


def case(trunk, **options):
    family = "denseformer_modules" if trunk.startswith("dwa") else "hyper_connections_modules"
    return Tiny(family, f"own_{trunk}", lambda: own(trunk), **options)


CASES = [case(trunk, scalar=trunk != "hc_pool", cached=False) for trunk in TRUNKS]

"""The one table of connections that every contract test runs over. A new connection is one line."""

from dataclasses import dataclass, field
from typing import Any

import torch

from resinspect.bundle import bundled
from resinspect.checkpoint import load
from resinspect.models import ResidualConfig, ResidualLM


@dataclass(frozen=True)
class Case:
    """A connection with options, and the bundled checkpoint trained with them."""

    connection: str
    checkpoint: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        return self.checkpoint


CASES = [
    Case("pre_ln", "pre_ln"),
    Case("post_ln", "post_ln"),
    Case("sandwich", "sandwich"),
    Case("denseformer", "denseformer"),
    Case("denseformer", "denseformer_2x2", {"dilation": 2, "period": 2}),
    Case("attnres", "attnres"),
    Case("attnres", "attnres_fixed_static", {"key": "static"}),
    Case("attnres", "attnres_dynamic_dynamic", {"query": "dynamic"}),
    Case("attnres", "attnres_dynamic_static", {"query": "dynamic", "key": "static"}),
    Case("block_attnres", "block_attnres"),
    Case("dca", "dca"),
    Case("dca", "dca_grn_v1", {"grn": "v1", "views": 1}),
    Case("dca", "dca_grn_v2", {"grn": "v2", "views": 1}),
    Case("dca", "dca_grn_v3", {"grn": "v3", "views": 1}),
    Case("dca", "dca_window", {"window": 1}),
    Case("hyper_connections", "hyper_connections"),
    Case("hyper_connections", "hyper_connections_static", {"dynamic": False}),
    Case("mhc", "mhc"),
    Case("ddl", "ddl"),
    Case("ddl", "ddl_operator", {"view": "operator"}),
    Case("short_swa", "short_swa"),
]
NAMED = {case.checkpoint: case for case in CASES}
PAIRS = [(case, weights) for case in CASES for weights in ("init", "random", "trained")]
PAIRS = [(case, weights) for case, weights in PAIRS if weights != "trained" or case.checkpoint in bundled()]
"""Every case at fresh weights, at random weights, and as trained where its checkpoint is bundled."""


def build(case: Case, weights: str, dtype: torch.dtype = torch.float32) -> ResidualLM:
    """A model of a case: fresh, with every parameter (routing too) far from its start, or the trained checkpoint."""
    if weights == "trained":
        return load(bundled()[case.checkpoint], dtype=dtype)[0]
    torch.manual_seed(0)
    config = ResidualConfig(
        connection=case.connection,
        connection_options=case.options,
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = ResidualLM(config).eval()
    if weights == "random":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype)


def prompts_for(model: ResidualLM, lengths=(9, 4, 17, 1)) -> list[list[int]]:
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, model.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]

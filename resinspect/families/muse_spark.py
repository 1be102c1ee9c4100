"""Muse Spark: a static gate per channel on every residual addition."""

import torch
from torch import Tensor, nn

from resinspect.families.layout import Layout
from resinspect.families.stack import SANDWICH, find_stack, parts_of, sequence_of, sequence_taps
from resinspect.families.weighted import Weighted

GATES = {"attn": "post_attention_residual_gate", "mlp": "post_feedforward_residual_gate"}


def recognise(model: nn.Module) -> Layout | None:
    """The layout of sandwich layers whose additions go through ``residual_gate`` modules."""
    stack = find_stack(model, (*parts_of(SANDWICH), *GATES.values()))
    if stack is None or not all(_is_gate(getattr(layer, name)) for layer in stack.layers for name in GATES.values()):
        return None
    anatomy = sequence_of(stack, SANDWICH)
    sites = anatomy.sites[:-1]
    weights = {site.index: _weights(getattr(stack.layers[site.layer], GATES[site.kind])) for site in sites}
    return Layout(
        family="muse_spark",
        scheme="residual_gate",
        anatomy=anatomy,
        taps=tuple(sequence_taps(stack, anatomy, SANDWICH)),
        connection=Weighted(
            keep={site: keep for site, (keep, _) in weights.items()},
            add={site: add for site, (_, add) in weights.items()},
        ),
        write_definition="output of the norm after attention and after the MLP, before its gate",
        source_definition="source 0 is the normed token embedding",
        routing=tuple(stack.inside(site.layer, f"{GATES[site.kind]}.gate") for site in sites),
    )


def _is_gate(module: nn.Module) -> bool:
    gate = getattr(module, "gate", None)
    return isinstance(gate, Tensor) and gate.ndim == 1 and hasattr(module, "temperature") and hasattr(module, "eps")


def _weights(module: nn.Module) -> tuple[Tensor, Tensor]:
    """``alpha`` and ``beta`` of ``h' = alpha h + beta w``: ``alpha^2 + beta^2 = 1``, but for the floor under alpha."""
    with torch.no_grad():
        logit = module.gate / module.temperature
        beta = torch.sigmoid(logit)
        return torch.sqrt((torch.sigmoid(-logit) * (1 + beta)).clamp_min(module.eps)), beta

"""Beam: every addition shrinks the carry, so that all writes so far weigh the same."""

import torch
from torch import Tensor, nn

from resinspect.families.layout import Layout
from resinspect.families.stack import SANDWICH, find_stack, parts_of, sequence_of, sequence_taps
from resinspect.families.weighted import Weighted

COUNTS = {"attn": "attn_residual_add_idx", "mlp": "mlp_residual_add_idx"}


def recognise(model: nn.Module) -> Layout | None:
    """The layout of sandwich layers that count their additions: ``h' = sqrt((k - 1) / k) h + sqrt(1 / k) v``."""
    stack = find_stack(model, (*parts_of(SANDWICH), *COUNTS.values()))
    if stack is None:
        return None
    anatomy = sequence_of(stack, SANDWICH)
    counts = {site.index: _number(getattr(stack.layers[site.layer], COUNTS[site.kind])) for site in anatomy.sites[:-1]}
    return Layout(
        family="beam",
        scheme="depth_scaled",
        anatomy=anatomy,
        taps=tuple(sequence_taps(stack, anatomy, SANDWICH)),
        connection=Weighted(
            keep={site: ((k - 1) / k).sqrt() for site, k in counts.items()},
            add={site: (1 / k).sqrt() for site, k in counts.items()},
        ),
        write_definition="output of the norm after attention and after the MLP, before its factor",
        source_definition="source 0 is what enters the first layer",
    )


def _number(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)

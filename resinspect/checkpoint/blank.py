"""A model of a checkpoint's class without its weights: empty, with weights at random, or a smaller one of its kind."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from resinspect.checkpoint.classes import model_classes
from resinspect.checkpoint.refusals import explained
from resinspect.checkpoint.sources import Source
from resinspect.errors import CheckpointError

SMALLER = {
    "vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "pad_token_id": 0,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rescale_every": 1,
}
"""Sizes on which no residual depends, and periods that few layers must show."""
WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads")
FEWEST, MOST = 2, 8
"""Layers of a smaller model: as many as show every kind of layer, if these numbers allow it."""


def blank(config: PreTrainedConfig, source: Source, device: str) -> nn.Module:
    """A model as it is before training, or without memory for its weights on the meta device.

    Raises:
        CheckpointError: If its class cannot be built from its configuration.
    """
    refused: CheckpointError | None = None
    for kind in model_classes(config, source.where, trust_remote_code=source.arguments["trust_remote_code"]):
        try:
            return _built(kind, config, device)
        except CheckpointError as error:
            # The configuration of a model of text and more does not build the class for its text alone.
            refused = refused or error
    raise refused


def _built(kind: type[Any], config: PreTrainedConfig, device: str) -> nn.Module:
    what = f"{kind.__name__} cannot be built from its configuration"
    with explained(what, "check config.json"), torch.device(device):
        if issubclass(kind, PreTrainedModel):
            return kind(deepcopy(config)).eval()
        return kind.from_config(deepcopy(config), trust_remote_code=True).eval()


def at_random(config: PreTrainedConfig, source: Source) -> nn.Module:
    """A model in which no two modules are alike: two norms that are still the identity would be taken for one read.

    Raises:
        CheckpointError: If its class cannot be built from its configuration.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = blank(config, source, "cpu")
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def smaller(config: PreTrainedConfig, narrow: int = 1) -> tuple[PreTrainedConfig, int]:
    """A configuration of the same kind with few layers, few experts and small MLPs, and how many layers it has.

    Args:
        config: Of the model.
        narrow: Also divide its width and its heads by this number.

    Raises:
        CheckpointError: If it does not say its sizes under the usual names.
    """
    config = deepcopy(config)
    with explained(f"no smaller copy of a {config.model_type} can be made", "capture tries out the model itself"):
        text = config.get_text_config()
        whole = text.num_hidden_layers
        layers = min(whole, max(FEWEST, *map(_all_kinds, _lists(text, whole).values()), 0))
        for name, values in _lists(text, whole).items():
            setattr(text, name, values[:layers])
        text.num_hidden_layers = layers
        sizes = SMALLER | {name: getattr(text, name, None) for name in WIDTHS if narrow > 1}
        for name, size in sizes.items():
            if isinstance(getattr(text, name, None), int) and size is not None:
                at_most = -(-size // narrow) if name in WIDTHS else size
                setattr(text, name, min(getattr(text, name), at_most))
    return config, layers


def _lists(text: PreTrainedConfig, layers: int) -> dict[str, list[object]]:
    """Settings with one value for each layer."""
    return {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == layers}


def _all_kinds(values: list[object]) -> int:
    """How many leading layers show every kind, or the most that a smaller model may have."""
    return min(MOST, max(values.index(value) for value in values) + 1)

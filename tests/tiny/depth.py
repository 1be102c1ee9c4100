"""Depth attention: Inkling 2, its looped variant, and the open Qwen3 layout."""

from functools import partial

import torch

from tiny.case import Tiny, randomised

SIZES = {
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 4,
    "d_rel": 4,
    "rel_extent": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "unpadded_vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _sharpened(model):
    """Queries large enough for an uneven softmax over depth."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_input.query"):
                parameter.mul_(20)
    return model


def inkling2(first_layer="hybrid_sliding", **changes):
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    torch.manual_seed(0)
    types = [first_layer, "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"]
    settings = {"num_hidden_layers": 5, "layer_types": types, "n_layers_per_attn_res_block": 2}
    return _sharpened(randomised(Inkling2ForCausalLM(Inkling2TextConfig(**SIZES | settings | changes))))


def inkling2_full_first():
    """The first layer reads the embedding three times."""
    return inkling2("hybrid", n_layers_per_attn_res_block=3)


def inkling2_loop(passes=3, **changes):
    from transformers import Inkling2LoopForCausalLM, Inkling2LoopTextConfig

    torch.manual_seed(0)
    settings = {
        "num_hidden_layers": 6,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": passes,
        "loop_gate_rank": 4,
    }
    model = Inkling2LoopForCausalLM(Inkling2LoopTextConfig(**SIZES | settings | changes))
    return _sharpened(randomised(model))


def inkling2_loop_blocks():
    """Blocks of two layers, so that a pass finishes fewer blocks than it has layers."""
    return inkling2_loop(2, n_layers_per_attn_res_block=2)


def inkling2_loop_once():
    """A loop that runs once has no messages: again one scalar per source."""
    return inkling2_loop(1)


def open_attnres(mode="block", gate="bias"):
    from resinspect.models.open_attnres import OpenAttnResConfig, OpenAttnResForCausalLM

    torch.manual_seed(0)
    config = OpenAttnResConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        max_position_embeddings=64,
        attnres_mode=mode,
        attnres_num_blocks=3 if mode == "block" else None,
        attnres_gate_type=gate,
        attnres_recency_bias_init=0.5,
    )
    model = randomised(OpenAttnResForCausalLM(config), 0.3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_res_gate_logit", "_res_gate_proj.bias")):
                parameter.add_(2.0)  # opens gates that start at sigmoid(-2)
            elif name.endswith("_res_alpha"):
                parameter.add_(0.7)
    return model


CASES = [
    Tiny("inkling2", "inkling2", inkling2),
    Tiny("inkling2", "inkling2_full_first", inkling2_full_first),
    Tiny("inkling2_loop", "inkling2_loop", inkling2_loop, scalar=False),
    Tiny("inkling2_loop", "inkling2_loop_blocks", inkling2_loop_blocks, scalar=False),
    Tiny("inkling2_loop", "inkling2_loop_once", inkling2_loop_once),
    Tiny("open_attnres", "open_attnres_block", open_attnres),
    Tiny("open_attnres", "open_attnres_full", partial(open_attnres, "full")),
    Tiny("open_attnres", "open_attnres_scalar_gate", partial(open_attnres, gate="sigmoid_scalar")),
    Tiny("open_attnres", "open_attnres_alpha_gate", partial(open_attnres, "full", "learnable_alpha")),
    Tiny("open_attnres", "open_attnres_channel_gate", partial(open_attnres, gate="sigmoid_vector"), scalar=False),
]

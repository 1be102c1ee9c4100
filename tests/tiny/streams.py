"""Decoders with several parallel residual streams."""

import torch
import transformers
from torch import nn

from tiny.case import Tiny, randomised

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8}
INDEXER = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
HY_V4 = {
    **SIZES,
    **EXPERTS,
    **LATENT,
    **INDEXER,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 4,
    "hc_mult": 3,
    "hc_magnitude": 1.5,
}
QWEN4_EXP = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
    "hc_count": 3,
    "hc_lowrank": 6,
}
NGRAMS = {
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 16,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
}


def routed(model: nn.Module, name: str, factor: float) -> nn.Module:
    """``randomised``, and what feeds the gates enlarged, for families that shrink it."""
    model = randomised(model)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(name):
                parameter.mul_(factor)
    return model


def deepseek_v4():
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(
        **SIZES,
        **EXPERTS,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=16,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        partial_rotary_factor=0.5,
        sliding_window=8,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=2,
        attn_implementation="eager",
    )
    model = randomised(transformers.DeepseekV4ForCausalLM(config))
    table = model.model.layers[0].mlp.gate.tid2eid
    table.copy_(torch.rand(len(table), EXPERTS["n_routed_experts"]).argsort(-1)[:, : table.shape[1]])
    return model


def glm5_next():
    torch.manual_seed(0)
    text = {
        **SIZES,
        **EXPERTS,
        **LATENT,
        **INDEXER,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "index_kpool": 2,
        "hc_mult": 4,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 4,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "projection_intermediate_size": 32,
        "image_size": 28,
    }
    tokens = {f"{name}_token_id": 90 + i for i, name in enumerate(("image", "video", "image_start", "video_start"))}
    config = transformers.Glm5NextConfig(text_config=text, vision_config=vision, **tokens)
    return randomised(transformers.Glm5NextForConditionalGeneration(config))


def hy_v4():
    torch.manual_seed(0)
    config = transformers.HYV4Config(**HY_V4, attn_implementation="eager")
    return routed(transformers.HYV4ForCausalLM(config), "hc.fn", 8.0)


def hy_v4_vl():
    torch.manual_seed(0)
    text = HY_V4 | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "out_hidden_size": 32,
        "max_image_size": 64,
    }
    config = transformers.HYV4VLConfig(
        text_config=text, vision_config=vision, image_token_id=95, video_token_id=96, attn_implementation="eager"
    )
    return routed(transformers.HYV4VLForConditionalGeneration(config), "hc.fn", 8.0)


def qwen4_exp() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen4ExpTextConfig(**QWEN4_EXP)
    return routed(transformers.Qwen4ExpForCausalLM(config), "input_mix_weight_up.weight", 12.0)


def qwen4_exp_ngrams():
    torch.manual_seed(0)
    config = transformers.Qwen4ExpTextConfig(**QWEN4_EXP, **NGRAMS)
    return routed(transformers.Qwen4ExpForCausalLM(config), "input_mix_weight_up.weight", 12.0)


CASES = [
    Tiny("deepseek_v4", "deepseek_v4", deepseek_v4),
    Tiny("glm5_next", "glm5_next", glm5_next),
    Tiny("hy_v4", "hy_v4", hy_v4),
    Tiny("hy_v4", "hy_v4_vl", hy_v4_vl),
    Tiny("qwen4_exp", "qwen4_exp", qwen4_exp, scalar=False),
    Tiny("qwen4_exp", "qwen4_exp_ngrams", qwen4_exp_ngrams, scalar=False),
]

"""Models that add up what their modules give, with fixed weights: no file of ``families`` knows their names."""

from functools import partial

import torch
import transformers

from tiny.case import Tiny, randomised

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_HEADS = SIZES | {"head_dim": 8, "sliding_window": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
STATE_SPACE = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 97} | TOKENS

# Class of transformers, and what its configuration needs.
PLAIN = {
    "llama": ("LlamaForCausalLM", SIZES),
    "mistral": ("MistralForCausalLM", SMALL_HEADS),
    "mixtral": ("MixtralForCausalLM", SIZES | EXPERTS),
    "qwen2": ("Qwen2ForCausalLM", SIZES),
    "qwen2_moe": ("Qwen2MoeForCausalLM", SIZES | EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3ForCausalLM", SMALL_HEADS),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SMALL_HEADS | EXPERTS),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", GPT),
    "gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", GPT | {"rotary_dim": 4}),
    "gpt_neox_parallel": ("GPTNeoXForCausalLM", SIZES | {"use_parallel_residual": True}),
    "gpt_neox_sequential": ("GPTNeoXForCausalLM", SIZES | {"use_parallel_residual": False}),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 24}),
    "bloom": ("BloomForCausalLM", GPT | {"hidden_size": 32}),
    "mpt": ("MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 97, "max_seq_len": 64}),
    "falcon": ("FalconForCausalLM", SIZES | {"multi_query": True, "parallel_attn": True}),
    "falcon_two_norms": ("FalconForCausalLM", SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_sequential": ("FalconForCausalLM", SIZES | {"parallel_attn": False, "alibi": True}),
    "phi": ("PhiForCausalLM", SIZES),
    "phi3": ("Phi3ForCausalLM", SIZES),
    "stablelm": ("StableLmForCausalLM", SIZES),
    "stablelm_parallel": ("StableLmForCausalLM", SIZES | {"use_parallel_residual": True}),
    "starcoder2": ("Starcoder2ForCausalLM", SIZES),
    "nemotron": ("NemotronForCausalLM", SIZES),
    "smollm3": ("SmolLM3ForCausalLM", SIZES),
    "olmo": ("OlmoForCausalLM", SIZES),
    "olmo2": ("Olmo2ForCausalLM", SIZES),
    "olmo3": ("Olmo3ForCausalLM", SMALL_HEADS),
    "olmoe": ("OlmoeForCausalLM", SIZES | EXPERTS),
    "gemma": ("GemmaForCausalLM", SIZES | {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", SMALL_HEADS),
    "gemma3": ("Gemma3ForCausalLM", SMALL_HEADS),
    "cohere": ("CohereForCausalLM", SIZES),
    "cohere2": ("Cohere2ForCausalLM", SMALL_HEADS),
    "exaone4": ("Exaone4ForCausalLM", SMALL_HEADS),
    "glm4": ("Glm4ForCausalLM", SIZES | {"head_dim": 8}),
    "llama4": ("Llama4ForCausalLM", SMALL_HEADS | EXPERTS | {"intermediate_size_mlp": 48, "moe_layers": [1]}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        SIZES | EXPERTS | LATENT | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "gpt_oss": ("GptOssForCausalLM", SMALL_HEADS | EXPERTS),
    "persimmon": ("PersimmonForCausalLM", SIZES),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", SMALL_HEADS | {"attention_window_size": 8}),
    "mamba": ("MambaForCausalLM", SIZES | {"state_size": 8}),
    "jamba": (
        "JambaForCausalLM",
        SIZES | EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "bamba": ("BambaForCausalLM", SIZES | STATE_SPACE | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", SIZES | STATE_SPACE | {"mamba_d_ssm": 64}),
}
SCALED = {
    "granite": ("GraniteForCausalLM", SIZES | {"residual_multiplier": 0.22}),
    "granitemoe": ("GraniteMoeForCausalLM", SIZES | EXPERTS | {"residual_multiplier": 0.22}),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        SIZES | EXPERTS | {"residual_multiplier": 0.3, "shared_intermediate_size": 24},
    ),
    "minicpm3": ("MiniCPM3ForCausalLM", SIZES | LATENT),
    "hyperclovax": ("HyperCLOVAXForCausalLM", SIZES | {"residual_multiplier": 0.4, "use_post_norm": True}),
    "falcon_h1_multiplied": (
        "FalconH1ForCausalLM",
        SIZES | STATE_SPACE | {"mamba_d_ssm": 64, "ssm_out_multiplier": 0.6, "attention_out_multiplier": 1.7},
    ),
    "rwkv": ("RwkvForCausalLM", SIZES | {"attention_hidden_size": 32, "context_length": 64, "rescale_every": 2}),
}


def build(kind, settings):
    torch.manual_seed(0)
    model = getattr(transformers, kind)
    return randomised(model(model.config_class(**settings)))


# RWKV and RecurrentGemma give no cache, and a decode step of Bamba differs from its own full forward pass.
NOT_CACHED = ("rwkv", "recurrent_gemma", "bamba")

CASES = [
    *(
        Tiny(family, name, partial(build, *row), plain=name != "rwkv", cached=name not in NOT_CACHED)
        for family, rows in (("plain", PLAIN), ("scaled", SCALED))
        for name, row in rows.items()
    ),
]

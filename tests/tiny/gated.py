"""Models with static gates, scalars and norms on the carry, or with alternating updates over streams."""

import torch
from torch import nn

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


def gemma3n(active=0):
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        **SIZES,
        head_dim=8,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=8,
        laurel_rank=4,
        altup_active_idx=active,
    )
    model = randomised(Gemma3nForCausalLM(config))
    with torch.no_grad():
        for layer in model.model.layers:
            # The router's input is divided by the width, so that small weights would route all tokens alike.
            layer.altup.modality_router.weight.normal_(std=20)
    return model


def muse_spark():
    from transformers.models.muse_spark import MuseSparkTextConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextModel

    torch.manual_seed(0)
    config = MuseSparkTextConfig(
        **SIZES,
        head_dim=8,
        moe_hidden_size=16,
        moe_intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "sparse", "sparse"],
        sliding_window=8,
    )
    return randomised(MuseSparkTextModel(config))


def zaya():
    from transformers import ZayaConfig, ZayaForCausalLM

    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    config = ZayaConfig(**sizes, head_dim=8, moe_intermediate_size=16, num_experts=3, router_hidden_size=8)
    return randomised(ZayaForCausalLM(config))


def gemma4(ple=8, moe=False, shared=0):
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        **SIZES,
        head_dim=8,
        global_head_dim=16,
        vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=ple,
        num_kv_shared_layers=shared,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=8,
        enable_moe_block=moe,
        num_experts=4 if moe else None,
        top_k_experts=2 if moe else None,
        moe_intermediate_size=16 if moe else None,
    )
    return with_layer_scalars(randomised(Gemma4ForCausalLM(config)))


def gemma4_unified():
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    torch.manual_seed(0)
    config = Gemma4UnifiedTextConfig(
        **SIZES,
        head_dim=8,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=8,
    )
    return with_layer_scalars(randomised(Gemma4UnifiedForCausalLM(config)))


def embedding_gemma2():
    from transformers import EmbeddingGemma2TextConfig
    from transformers.models.embedding_gemma2.modeling_embedding_gemma2 import EmbeddingGemma2TextModel

    torch.manual_seed(0)
    config = EmbeddingGemma2TextConfig(
        **SIZES,
        head_dim=8,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        embedding_dim=24,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        sliding_window=8,
    )
    return with_layer_scalars(randomised(EmbeddingGemma2TextModel(config)))


def with_layer_scalars(model: nn.Module) -> nn.Module:
    """They are buffers, so that ``randomised`` leaves them at 1; one is negative."""
    layers = [module for module in model.modules() if hasattr(module, "layer_scalar")]
    for i, layer in enumerate(layers):
        layer.layer_scalar.fill_((0.6, -1.3, 0.8)[i % 3])
    return model


def minimax():
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    torch.manual_seed(0)
    config = MiniMaxConfig(
        **SIZES,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=4,
        full_attn_alpha_factor=1.3,
        full_attn_beta_factor=0.6,
        linear_attn_alpha_factor=0.8,
        linear_attn_beta_factor=-1.2,
        mlp_alpha_factor=0.9,
        mlp_beta_factor=1.7,
    )
    return randomised(MiniMaxForCausalLM(config))


def nanochat():
    from transformers import NanoChatConfig, NanoChatForCausalLM

    torch.manual_seed(0)
    return randomised(NanoChatForCausalLM(NanoChatConfig(**SIZES)))


def beam():
    from transformers import BeamConfig, BeamForCausalLM

    torch.manual_seed(0)
    config = BeamConfig(
        **SIZES,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        sliding_window=8,
        mlp_layer_types=["dense", "sparse", "sparse"],
    )
    return randomised(BeamForCausalLM(config))


def doge(moe=False):
    from transformers import DogeConfig, DogeForCausalLM

    torch.manual_seed(0)
    config = DogeConfig(**SIZES, keep_window_size=8, is_moe=moe, num_experts=16, num_experts_per_tok=2)
    return randomised(DogeForCausalLM(config))


def longcat_flash():
    from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name not in ("intermediate_size", "num_hidden_layers")}
    config = LongcatFlashConfig(
        **sizes | {"num_key_value_heads": 4},
        num_layers=2,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    )
    return randomised(LongcatFlashForCausalLM(config))


def neomme():
    from transformers.models.neomme import NeoMMEConfig
    from transformers.models.neomme.modeling_neomme import NeoMMEForMaskedLM

    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if not name.endswith("token_id")}
    config = NeoMMEConfig(**sizes, head_dim=16, embedding_rank=8, patch_size=2, embedding_dim=8)
    model = randomised(NeoMMEForMaskedLM(config))
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            layer.lambdas.copy_(torch.tensor([0.7, -0.9 + i]))
    return model


def dory():
    from transformers import DoryConfig, DoryForCausalLM

    torch.manual_seed(0)
    config = DoryConfig(
        **SIZES | {"num_hidden_layers": 4},
        head_dim=8,
        n_input_layers=1,
        n_recurrent_layers=2,
        n_output_layers=1,
        n_recurrent_loops=3,
        sliding_window=8,
    )
    model = randomised(DoryForCausalLM(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sqk", "s_gate")):
                # Squared after a scale of over 100: moved as far as the others, attention would be a chaotic argmax.
                parameter.copy_(config.initializer_range * (1 + 0.3 * torch.randn(parameter.shape)))
    return model


def hrm_text():
    from transformers import HrmTextConfig, HrmTextForCausalLM

    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    config = HrmTextConfig(**sizes | {"num_hidden_layers": 2}, head_dim=8, H_cycles=2, L_cycles=2)
    return randomised(HrmTextForCausalLM(config))


CASES = [
    Tiny("gemma3n", "gemma3n", gemma3n, scalar=False),
    Tiny("gemma3n", "gemma3n_active2", lambda: gemma3n(active=2), scalar=False),
    Tiny("muse_spark", "muse_spark", muse_spark, scalar=False, causal=False),
    Tiny("zaya", "zaya", zaya, scalar=False),
    Tiny("gemma4", "gemma4", lambda: gemma4(shared=1)),
    Tiny("gemma4", "gemma4_moe", lambda: gemma4(ple=0, moe=True)),
    Tiny("gemma4", "gemma4_unified", gemma4_unified),
    Tiny("gemma4", "embedding_gemma2", embedding_gemma2, causal=False),
    Tiny("minimax", "minimax", minimax, scalar=False),
    Tiny("beam", "beam", beam),
    Tiny("doge", "doge", doge, scalar=False),
    Tiny("longcat_flash", "longcat_flash", longcat_flash),
    Tiny("neomme", "neomme", neomme, causal=False),
    Tiny("dory", "dory", dory, scalar=False),
    Tiny("hrm_text", "hrm_text", hrm_text),
    Tiny("nanochat", "nanochat", nanochat, plain=True),
]

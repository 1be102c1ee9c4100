"""Models that norm the residual itself."""

from functools import partial

from tiny.case import Tiny
from tiny.plain import GPT, SIZES, TOKENS, build

BART = TOKENS | {
    "d_model": 32,
    "decoder_layers": 3,
    "encoder_layers": 3,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
DISTIL = TOKENS | {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 48,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}

DECODERS = {
    "bart_decoder": ("BartForCausalLM", BART),
    "openai_gpt": ("OpenAIGPTLMHeadModel", GPT),
    "bloom_post_norm_residual": (
        "BloomForCausalLM",
        GPT | {"hidden_size": 32, "apply_residual_connection_post_layernorm": True},
    ),
}
ENCODERS = {
    "bert": ("BertForMaskedLM", SIZES),
    "bert_bare": ("BertModel", SIZES),
    "roberta": ("RobertaForMaskedLM", SIZES | {"max_position_embeddings": 66}),
    "distilbert": ("DistilBertForMaskedLM", DISTIL),
}

CASES = [
    *(
        Tiny("post_norm", name, partial(build, *row), scalar=False, cached=name != "openai_gpt")
        for name, row in DECODERS.items()
    ),
    *(Tiny("post_norm", name, partial(build, *row), scalar=False, causal=False) for name, row in ENCODERS.items()),
]

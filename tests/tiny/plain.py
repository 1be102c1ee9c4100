"""Plain pre-norm decoders."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tiny.case import Tiny, randomised

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


def llama():
    torch.manual_seed(0)
    return randomised(LlamaForCausalLM(LlamaConfig(**SIZES)))


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=97, bos_token_id=0, eos_token_id=0)
    return randomised(GPT2LMHeadModel(config))


CASES = [
    Tiny("plain", "llama", llama, plain=True),
    Tiny("plain", "gpt2", gpt2, plain=True),
]

"""Checkpoints of nanoGPT and its kin, which come without config.json, as GPT-2 of transformers.

They hold ``{"model": state dict, "model_args": sizes}`` in the names of GPT-2, with the weights of plain linear layers
where GPT-2 of transformers has their transposes. All sizes are read off the tensors, except the number of heads.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config

from resinspect.checkpoint.refusals import some
from resinspect.checkpoint.tensors import read_pickle, stripped, unwrap
from resinspect.errors import CheckpointError

SETTINGS = ("model_args", "config")
"""Where the sizes stand beside the state dict."""
HEADS = ("n_head", "num_heads")
ALIASES = {"tok_emb": "wte", "pos_emb": "wpe", "blocks": "h", "head": "lm_head", "gamma": "weight", "beta": "bias"}
"""Parts of names in kindred training code -> GPT-2's."""
HEAD, TOKENS, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
QKV, UP = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"
LAYER = re.compile(r"transformer\.h\.(\d+)\.")
LINEAR = re.compile(r"transformer\.h\.\d+\.(attn|mlp)\.c_(attn|fc|proj)\.weight")
BIASED = re.compile(r"transformer\.(h\.\d+\.\w+(\.\w+)?|ln_f)\.weight")
MASK = re.compile(r"transformer\.h\.\d+\.attn\.(bias|mask)")


def read_nanogpt(path: Path, device: str = "cpu") -> tuple[GPT2Config, dict[str, Tensor], list[str]]:
    """Configuration and tensors of GPT-2 from one file, and notes on what had to be supposed.

    Args:
        path: The file.
        device: As in ``read_pickle``.

    Raises:
        CheckpointError: If the file holds anything else.
    """
    payload = read_pickle(path, device)
    found, notes = stripped(unwrap(payload, path))
    tensors = {_rename(name): tensor for name, tensor in found.items()}
    if not {TOKENS, POSITIONS, QKV, UP} <= tensors.keys():
        raise CheckpointError(
            f"{path} has no config.json beside it, and its tensors ({some(found)}) are not those of nanoGPT; "
            "put the config.json of its model into its folder."
        )
    tensors = {name: tensor for name, tensor in tensors.items() if not _is_mask(name, tensor, path)}
    if tensors[QKV].shape[0] == 3 * tensors[QKV].shape[-1]:
        tensors = {
            name: tensor.T.contiguous() if LINEAR.fullmatch(name) else tensor for name, tensor in tensors.items()
        }
    config = _config(tensors, _settings(payload), path)
    zeros = _zero_biases(tensors)
    tensors.setdefault(HEAD, tensors[TOKENS])
    notes.append(
        "read as nanoGPT into GPT-2, with the exact GELU and a LayerNorm eps of 1e-5, which it does not state"
        + (f", and zeros for {len(zeros)} biases that it does not have" if zeros else "")
    )
    return config, tensors | zeros, notes


def _rename(name: str) -> str:
    parts = [ALIASES.get(part, part) for part in name.split(".")]
    return ".".join(parts if parts[0] in ("transformer", "lm_head") else ["transformer", *parts])


def _is_mask(name: str, tensor: Tensor, path: Path) -> bool:
    """Whether a tensor is the causal mask that training code stores as a buffer; GPT-2 knows no other mask."""
    if not MASK.fullmatch(name) or tensor.ndim != 4:
        return False
    if not tensor.is_meta and not torch.equal(tensor != 0, torch.ones_like(tensor).tril() != 0):
        raise CheckpointError(f"{path} has an attention mask, {name}, that is not causal; GPT-2 cannot follow it.")
    return True


def _settings(payload: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in reversed(SETTINGS):
        if isinstance(payload.get(name), Mapping):
            found |= payload[name]
    return found


def _config(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], path: Path) -> GPT2Config:
    vocabulary, width = tensors[TOKENS].shape
    heads = next((settings[name] for name in HEADS if name in settings), None)
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise CheckpointError(
            f"{path} says {heads!r} where its number of attention heads should stand (n_head under {SETTINGS[0]}); "
            f"it must be a divisor of the width {width}."
        )
    head = tensors.get(HEAD)
    return GPT2Config(
        vocab_size=vocabulary,
        n_positions=tensors[POSITIONS].shape[0],
        n_embd=width,
        n_inner=tensors[UP].shape[-1],
        n_layer=1 + max(int(match[1]) for match in map(LAYER.match, tensors) if match),
        n_head=heads,
        activation_function="gelu",
        layer_norm_epsilon=1e-5,
        tie_word_embeddings=head is None or head.is_meta or torch.equal(head, tensors[TOKENS]),
        bos_token_id=None,
        eos_token_id=None,
        architectures=["GPT2LMHeadModel"],
    )


def _zero_biases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for every bias that GPT-2 has and the tensors lack: the same function."""
    weights = {name: tensor for name, tensor in tensors.items() if BIASED.fullmatch(name)}
    biases = {name.removesuffix("weight") + "bias": tensor for name, tensor in weights.items()}
    return {name: like.new_zeros(like.shape[-1]) for name, like in biases.items() if name not in tensors}

"""Prompts as a user gives them, turned into batches of token ids."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from resinspect.errors import PromptError

SPACE, BYTE = "▁", re.compile("<0x([0-9A-F]{2})>")
"""How SentencePiece writes a space, and a byte that no other piece covers."""
Prompts = str | Iterable[str] | Iterable[int] | Iterable[Sequence[int]] | np.ndarray | Tensor | Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """Prompts of one forward pass.

    Attributes:
        ids: ``(batch, token)``.
        mask: ``(batch, token)``, True for real tokens.
        first_sample: Number of the first prompt among all.
        past: Tokens of each prompt that ran before, where the model goes on from its cache.
    """

    ids: Tensor
    mask: Tensor
    first_sample: int
    past: int = 0

    @property
    def positions(self) -> Tensor:
        """Position of each token within its own prompt, ``(batch, token)``; 0 at padding."""
        return (self.mask.long().cumsum(-1) - 1).clamp(min=0) + self.past

    def next_ids(self, following: Tensor | None = None) -> Tensor:
        """The token after each, ``(batch, token)``: -1 where there is none; ``following`` comes after the last."""
        ids = self.ids.roll(-1, dims=1).masked_fill(~self.mask.roll(-1, dims=1), -1)
        ids[:, -1] = -1 if following is None else following
        return ids

    def followed_by(self, ids: Tensor) -> "Batch":
        """The next token ``(batch,)`` of each prompt as a batch of its own; this batch must not be padded."""
        past = self.past + self.ids.shape[1]
        return Batch(ids[:, None], torch.ones_like(ids[:, None], dtype=torch.bool), self.first_sample, past)

    @property
    def padded(self) -> bool:
        """Whether any place is padding."""
        return not bool(self.mask.all())

    def real(self, values: Tensor) -> Tensor:
        """The real tokens of ``(batch, token, ...)`` packed to ``(n, ...)``: a copy if padded, else maybe a view."""
        return values[self.mask.to(values.device)] if self.padded else values.flatten(0, 1)


def encode_prompts(
    prompts: Prompts,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int | None = None,
    vocab_size: int | None = None,
    truncate: bool = False,
) -> list[list[int]]:
    """Token ids of every prompt.

    Args:
        prompts: A text, texts, lists of ids, or a batch ``{"input_ids", "attention_mask"}`` padded on either side.
        tokenizer: Needed for texts.
        max_length: Longest context of the model, if it has one.
        vocab_size: Number of ids the model knows, if it says so.
        truncate: Keep the first ``max_length`` tokens of a longer prompt, with a warning that names it.

    Raises:
        PromptError: If there is nothing to run, or a prompt is empty, too long, or has ids the model does not know.
    """
    encoded = [_ids(i, prompt, tokenizer) for i, prompt in enumerate(_split(prompts))]
    if not encoded:
        raise PromptError("there are no prompts; give at least one text or list of token ids.")
    for i, ids in enumerate(encoded):
        if not ids:
            raise PromptError(f"prompt {i} is empty; give at least one token.")
        if vocab_size is not None and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise PromptError(f"prompt {i} has token ids outside 0..{vocab_size - 1}; the model knows no others.")
        if max_length is not None and len(ids) > max_length:
            if not truncate:
                raise PromptError(
                    f"prompt {i} has {len(ids)} tokens but the model's context is {max_length}; "
                    "shorten it, or keep only its beginning (truncate=True in Python, --truncate on the command line)."
                )
            warnings.warn(f"prompt {i} was cut to its first {max_length} of {len(ids)} tokens.", stacklevel=2)
            encoded[i] = ids[:max_length]
    return encoded


def batches(encoded: Sequence[list[int]], size: int, *, pad: bool, device: torch.device) -> Iterator[Batch]:
    """Consecutive prompts, padded on the right; without ``pad`` only prompts of equal length share a batch."""
    start = 0
    while start < len(encoded):
        stop = start + 1
        while stop < min(start + size, len(encoded)) and (pad or len(encoded[stop]) == len(encoded[start])):
            stop += 1
        if stop - start == max(map(len, encoded[start:stop])) > 1:
            stop -= 1  # a square batch could not be told from its transpose
        rows = encoded[start:stop]
        width = max(map(len, rows))
        ids = torch.tensor([row + [row[-1]] * (width - len(row)) for row in rows], device=device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        yield Batch(ids, torch.arange(width, device=device) < lengths[:, None], start)
        start = stop


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """The literal text of each token; its bytes where it is part of a character, its id where there is no text."""
    unique = {i: str(i) if tokenizer is None else _token_text(i, tokenizer) for i in set(ids)}
    return [unique[i] for i in ids]


def _token_text(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        # Embeddings are often padded beyond the vocabulary.
        return text or str(token)
    if (spaced := piece.replace(SPACE, " ")) != piece and spaced.strip() == text.strip():
        # Decoded by itself, a piece loses the space before it.
        return spaced
    # A tokenizer that came without its decoder gives the name of a byte.
    return _piece_text(piece) if "�" in text or not text or BYTE.fullmatch(text) else text


def _piece_text(piece: str) -> str:
    """A piece of bytes as text, what is no whole character as ``\\xe2``; other pieces as they are."""
    if byte := BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1]).decode("utf-8", errors="backslashreplace")
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    if not all(character in byte_of for character in piece):
        return piece
    return bytes(byte_of[character] for character in piece).decode("utf-8", errors="backslashreplace")


def _split(prompts: Prompts) -> list[Any]:
    """One item per prompt: a text, or ids."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        return _rows(prompts)
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise PromptError(f"prompts are a {type(prompts).__name__}; give a text, texts, or lists of token ids.")
    items = _plain(prompts)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def _rows(batch: Mapping[str, Any]) -> list[list[int]]:
    """The real tokens of each row of ``input_ids``, padded on either side or ragged."""
    if batch.get("input_ids") is None:
        raise PromptError(f"a batch needs input_ids; it has {', '.join(map(str, batch)) or 'nothing'}.")
    rows = _plain(batch["input_ids"])
    if rows and all(isinstance(item, Integral) for item in rows):
        rows = [rows]
    masks = batch.get("attention_mask")
    masks = [[1] * len(row) for row in rows] if masks is None else _plain(masks)
    masks = [masks] if len(rows) == 1 and masks and all(isinstance(item, int | float) for item in masks) else masks
    return [_unpadded(i, _plain(row), _plain(mask)) for i, (row, mask) in enumerate(_aligned(rows, masks))]


def _aligned(rows: list[Any], masks: list[Any]) -> list[tuple[Any, Any]]:
    if len(rows) != len(masks):
        raise PromptError(f"a batch has {len(rows)} rows of input_ids but {len(masks)} of attention_mask.")
    return list(zip(rows, masks, strict=True))


def _unpadded(index: int, row: list[int], mask: list[Any]) -> list[int]:
    if len(row) != len(mask):
        raise PromptError(f"prompt {index} has {len(row)} ids but an attention_mask of {len(mask)}.")
    if not {*mask} <= {0, 1}:
        raise PromptError(
            f"the attention_mask of prompt {index} has values other than 0 and 1; give 1 for real tokens."
        )
    kept = [i for i, real in enumerate(mask) if real]
    if kept and kept[-1] - kept[0] + 1 != len(kept):
        raise PromptError(f"the attention_mask of prompt {index} has holes; pad on the left or the right only.")
    return [row[i] for i in kept]


def _ids(index: int, prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError(f"prompt {index} is text but there is no tokenizer; give one, or token ids (--ids).")
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise PromptError(f"prompt {index} is a {type(prompt).__name__}; give a text or a list of token ids.")
    ids = _plain(prompt)
    if wrong := [item for item in ids if isinstance(item, bool) or not isinstance(item, Integral)]:
        raise PromptError(f"prompt {index} holds {wrong[0]!r}, which is no token id; give a text or a list of ids.")
    return [int(item) for item in ids]


def _plain(values: Any) -> list[Any]:
    """Tensors and arrays as lists; anything else item by item."""
    return values.tolist() if isinstance(values, Tensor | np.ndarray) else list(values)

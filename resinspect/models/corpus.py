"""Reading a corpus of documents and packing it into training sequences."""

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from resinspect.errors import OptionError


def read_documents(path: Path) -> Iterator[dict[str, str]]:
    """Documents ``{"id", "source", "text"}`` of an xz-compressed JSON-lines file.

    Raises:
        OptionError: If the file is missing or is not such a file.
    """
    try:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, lzma.LZMAError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise OptionError(f"corpus {path} cannot be read as xz-compressed JSON lines: {error}.") from error


def pack_documents(path: Path, tokenizer: PreTrainedTokenizerBase, length: int, *, seed: int) -> Tensor:
    """All documents in a random order, each closed by the end-of-text token, cut into sequences.

    Args:
        path: Corpus file.
        tokenizer: Needs ``eos_token_id``.
        length: Tokens per sequence; a shorter rest at the end is dropped.
        seed: Of the order of documents.

    Returns:
        Ids ``(sequence, length)``.
    """
    texts = [document["text"] for document in read_documents(path)]
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    encoded = tokenizer([texts[i] for i in order], verbose=False)["input_ids"]
    stream = [token for ids in encoded for token in (*ids, tokenizer.eos_token_id)]
    count = len(stream) // length
    if count == 0:
        raise OptionError(f"corpus {path} has {len(stream)} tokens, fewer than one sequence of {length}.")
    return torch.tensor(stream[: count * length]).view(count, length)


def training_order(sequences: Tensor, count: int, *, seed: int) -> Tensor:
    """``count`` sequences: as many passes over the data as needed, each in its own random order."""
    generator = torch.Generator().manual_seed(seed)
    passes = -(-count // len(sequences))
    order = torch.cat([torch.randperm(len(sequences), generator=generator) for _ in range(passes)])
    return sequences[order[:count]]

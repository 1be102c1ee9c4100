"""Validation loss of every bundled checkpoint, from its stored file: the table of data/README.md.

Each document is cut into windows of the model's context and each window is scored by itself. The interval is a
bootstrap over documents. Usage: python data/evaluate_checkpoints.py [FOLDER ...], with folders of further checkpoints
that are not bundled, such as second seeds. About half a minute for each checkpoint.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import xarray as xr

import resinspect as ri
from resinspect.models.corpus import read_documents

CORPUS = Path(__file__).parent / "corpus" / "validation.jsonl.xz"
BATCH = 16
RESAMPLES = 2000


def windows(texts: list[str], tokenizer, length: int) -> list[tuple[int, list[int]]]:
    """``(document, ids)`` of every window with at least one prediction, shortest first."""
    encoded = tokenizer(texts, verbose=False)["input_ids"]
    cut = [(d, ids[i : i + length]) for d, ids in enumerate(encoded) for i in range(0, len(ids), length)]
    return sorted((pair for pair in cut if len(pair[1]) > 1), key=lambda pair: len(pair[1]))


def losses(model, cut: list[tuple[int, list[int]]]) -> xr.DataArray:
    """Loss in nats of every prediction, at the token that makes it, with its document, position and id."""
    found = []
    for start in range(0, len(cut), BATCH):
        rows = cut[start : start + BATCH]
        width = max(len(ids) for _, ids in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for _, row in rows])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        for (document, row), values in zip(rows, loss, strict=True):
            count = len(row) - 1
            found.append(np.stack([np.full(count, document), np.arange(count), row[:-1], values[:count].double()]))
    *labels, values = np.concatenate(found, axis=1)
    names = ("sample", "position", "token_id")
    coords = {name: ("token", label.astype(int)) for name, label in zip(names, labels, strict=True)}
    return xr.DataArray(values, coords, ("token",), "loss")


def difference(loss: xr.DataArray, base: xr.DataArray) -> str:
    """Mean difference of two losses paired by document, with its interval."""
    row = ri.paired_difference(loss, base, resamples=RESAMPLES).iloc[0]
    return f"{row['mean']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"


def describe(folder: str) -> tuple[str, int]:
    """Connection with its options, and the seed of the recipe."""
    files = Path(ri.bundled().get(folder, folder))
    config = json.loads((files / "config.json").read_text())
    options = ", ".join(f"{key} {value}" for key, value in config["connection_options"].items())
    name = f"`{config['connection']}`" + (f" ({options})" if options else "")
    return name, json.loads((files / "training.json").read_text())["recipe"]["seed"]


def main() -> None:
    """Print one table row per connection, its seeds side by side."""
    texts = [document["text"] for document in read_documents(CORPUS)]
    scored: dict[str, dict[int, xr.DataArray]] = defaultdict(dict)
    size = {}
    healthy = [name for name in ri.bundled() if not name.startswith("faulty-")]
    for folder in [*healthy, *sys.argv[1:]]:
        model, tokenizer = ri.load(folder)
        name, seed = describe(folder)
        cut = windows(texts, tokenizer, model.config.max_position_embeddings)
        scored[name][seed] = losses(model, cut)
        size[name] = sum(p.numel() for p in model.parameters())
    print(
        "| connection | extra parameters | validation loss, seed 0 | 95 % interval | minus `pre_ln`, paired | seed 1 |"
    )
    print("|---|---:|---:|---|---|---:|")
    base = scored["`pre_ln`"][0]
    for name, seeds in sorted(scored.items(), key=lambda item: float(item[1][0].mean())):
        low, high = ri.summarise(seeds[0], resamples=RESAMPLES)[["low", "high"]].iloc[0]
        loss = {seed: f"{float(values.mean()):.4f}" for seed, values in seeds.items()}
        gap = "" if name == "`pre_ln`" else difference(seeds[0], base)
        extra = size[name] - size["`pre_ln`"]
        print(f"| {name} | {extra:,} | {loss[0]} | {low:.3f} to {high:.3f} | {gap} | {loss.get(1, '')} |")
    for name, seeds in scored.items():
        if 1 in seeds:
            print(f"{name}: seed 1 minus seed 0 {difference(seeds[1], seeds[0])}")
    print(f"\n{len(texts)} documents, {base.size:,} predicted tokens, nats per token.")


if __name__ == "__main__":
    main()

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


def losses(model, cut: list[tuple[int, list[int]]], documents: int) -> np.ndarray:
    """Summed loss in nats and number of predictions per document, ``(document, 2)``."""
    total = np.zeros((documents, 2))
    for start in range(0, len(cut), BATCH):
        rows = cut[start : start + BATCH]
        width = max(len(ids) for _, ids in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for _, row in rows])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
        for (document, row), values in zip(rows, loss, strict=True):
            total[document] += float(values[: len(row) - 1].double().sum()), len(row) - 1
    return total


def interval(total: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval over documents of the mean loss per token."""
    picks = np.random.default_rng(0).integers(0, len(total), (RESAMPLES, len(total)))
    sums = total[picks].sum(1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return float(low), float(high)


def difference(total: np.ndarray, base: np.ndarray) -> str:
    """Mean difference of two losses paired by document, with its interval."""
    gap = np.stack([total[:, 0] - base[:, 0], total[:, 1]], axis=1)
    low, high = interval(gap)
    return f"{gap[:, 0].sum() / gap[:, 1].sum():+.4f} ({low:+.4f} to {high:+.4f})"


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
    scored: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    size = {}
    healthy = [name for name in ri.bundled() if not name.startswith("faulty-")]
    for folder in [*healthy, *sys.argv[1:]]:
        model, tokenizer = ri.load(folder)
        name, seed = describe(folder)
        cut = windows(texts, tokenizer, model.config.max_position_embeddings)
        scored[name][seed] = losses(model, cut, len(texts))
        size[name] = sum(p.numel() for n, p in model.named_parameters() if n.startswith("connection."))
    print(
        "| connection | extra parameters | validation loss, seed 0 | 95 % interval | minus `pre_ln`, paired | seed 1 |"
    )
    print("|---|---:|---:|---|---|---:|")
    base = scored["`pre_ln`"][0]
    for name, seeds in sorted(scored.items(), key=lambda item: item[1][0][:, 0].sum()):
        low, high = interval(seeds[0])
        loss = {seed: f"{total[:, 0].sum() / total[:, 1].sum():.4f}" for seed, total in seeds.items()}
        gap = "" if name == "`pre_ln`" else difference(seeds[0], base)
        print(f"| {name} | {size[name]:,} | {loss[0]} | {low:.3f} to {high:.3f} | {gap} | {loss.get(1, '')} |")
    for name, seeds in scored.items():
        if 1 in seeds:
            print(f"{name}: seed 1 minus seed 0 {difference(seeds[1], seeds[0])}")
    print(f"\n{len(texts)} documents, {int(base[:, 1].sum()):,} predicted tokens, nats per token.")


if __name__ == "__main__":
    main()

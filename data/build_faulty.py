"""Two sick checkpoints, made of a healthy one's weights alone, for tools that should notice.

``faulty-attnres-untrained`` is ``attnres`` with all queries zero, so that every layer still averages all earlier ones
as at initialisation. ``faulty-mhc-frozen`` is ``mhc`` with the logits of its stream mixing pushed so far towards the
diagonal that Sinkhorn-Knopp returns the identity and passes no gradient. Everything else is unchanged.
Usage: python data/build_faulty.py [NAME ...]
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CHECKPOINTS = Path(__file__).parent / "checkpoints"
SATURATED = 400.0
"""Logit of each stream's own weight: far above the dynamic part, whose logits reach some tens at single tokens."""

Weights = dict[str, torch.Tensor]


def without_queries(weights: Weights) -> str:
    """Set every query to zero; says what was done."""
    weights["connection.query"].zero_()
    return "connection.query set to zero"


def frozen_mixing(weights: Weights) -> str:
    """Saturate the mixing of every sublayer at the identity; says what was done."""
    bias = weights["connection.bias"]
    n = round((bias.shape[-1] + 1) ** 0.5) - 1
    bias[:, 2 * n :] = SATURATED * torch.eye(n).flatten()
    return f"mixing logits in connection.bias set to {SATURATED} on the diagonal and 0 elsewhere"


FAULTS = {"faulty-attnres-untrained": ("attnres", without_queries), "faulty-mhc-frozen": ("mhc", frozen_mixing)}


def main() -> None:
    """Write faulty checkpoints beside the healthy ones."""
    for name in sys.argv[1:] or FAULTS:
        healthy, damage = FAULTS[name]
        folder = CHECKPOINTS / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(CHECKPOINTS / healthy, folder)
        weights = load_file(folder / "model.safetensors")
        done = damage(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        record = json.loads((folder / "training.json").read_text())
        (folder / "training.json").write_text(json.dumps(record | {"damaged": f"{healthy}: {done}"}) + "\n")
        print(f"wrote {folder}")


if __name__ == "__main__":
    main()

"""Training a reference model from a recipe with the Hugging Face Trainer, resumable."""

import hashlib
import json
import shutil
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from resinspect.errors import OptionError
from resinspect.models.config import ResidualConfig
from resinspect.models.corpus import pack_documents, training_order
from resinspect.models.decoder import ResidualLM


@dataclass(frozen=True)
class Recipe:
    """What a training run needs; the sections ``[data]``, ``[model]`` and ``[training]`` of a TOML file.

    Attributes:
        corpus: Compressed JSON lines.
        tokenizer: Hugging Face folder.
        model: Keyword arguments of ``ResidualConfig``.
        tokens: Tokens to train on.
        context: Tokens per sequence.
        batch_size: Sequences per step.
        learning_rate: Peak; linear warm-up, then cosine to zero.
        warmup_steps: Steps of warm-up.
        weight_decay: On matrices outside the connection; routing parameters and norms are not decayed.
        save_steps: Steps between resumable checkpoints.
        seed: Of the initial weights.
        data_seed: Of the order of documents and sequences; the same for every model to be compared.
    """

    corpus: Path
    tokenizer: Path
    model: dict[str, Any] = field(default_factory=dict)
    tokens: int = 6_000_000
    context: int = 256
    batch_size: int = 8
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    save_steps: int = 200
    seed: int = 0
    data_seed: int = 0


def read_recipe(path: Path) -> Recipe:
    """A recipe from a TOML file; ``extends`` names another one whose values it overrides.

    Paths are relative to the file that holds them.

    Raises:
        OptionError: If the file is missing, is not TOML, or has a key that is not allowed.
    """
    sections = _read_sections(path)
    values = {**sections.get("data", {}), "model": sections.get("model", {}), **sections.get("training", {})}
    allowed = [f.name for f in fields(Recipe)]
    if unknown := sorted(set(values) - set(allowed)):
        raise OptionError(f"recipe {path} has unknown keys {', '.join(unknown)}; allowed are {', '.join(allowed)}.")
    if missing := [name for name in ("corpus", "tokenizer") if name not in values]:
        raise OptionError(f"recipe {path} needs {' and '.join(missing)} in its [data] section.")
    return Recipe(**values)


def train(recipe: Recipe, out: Path) -> Path:
    """Train and store a model; an interrupted run goes on from its last checkpoint.

    Args:
        recipe: What to train.
        out: Folder for the model, its tokenizer and ``training.json``; ``out/unfinished`` while training.

    Returns:
        ``out``.

    Raises:
        OptionError: If ``out`` already holds a model, or the recipe cannot be built.
    """
    if (out / "config.json").exists():
        raise OptionError(f"{out} already holds a model; choose another folder or delete it first.")
    tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer, local_files_only=True)
    set_seed(recipe.seed)
    model = ResidualLM(ResidualConfig(vocab_size=len(tokenizer), **recipe.model))
    sequences = pack_documents(recipe.corpus, tokenizer, recipe.context, seed=recipe.data_seed)
    steps = -(-recipe.tokens // (recipe.context * recipe.batch_size))
    ordered = training_order(sequences, steps * recipe.batch_size, seed=recipe.data_seed)
    trainer = _Trainer(model, _arguments(recipe, steps, out / "unfinished"), train_dataset=_Sequences(ordered))
    trainer.train(resume_from_checkpoint=_last_checkpoint(out / "unfinished"))
    store(model, out)
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(_record(recipe, trainer)) + "\n")
    shutil.rmtree(out / "unfinished")
    return out


def store(model: ResidualLM, out: Path) -> None:
    """Save a model with its weights in bfloat16 and its routing parameters in float32.

    The stored configuration asks for float32, so that loading gives a float32 model, and for the key-value cache, which
    the Trainer turns off.
    """
    model.config.dtype, model.config.use_cache = torch.float32, True
    weights = {
        name: value if name.startswith("connection.") else value.to(torch.bfloat16)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    model.save_pretrained(out, state_dict=weights)


class _Trainer(Trainer):
    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return [n for n, p in model.named_parameters() if p.ndim >= 2 and not n.startswith("connection.")]


class _Sequences(torch.utils.data.Dataset):
    def __init__(self, sequences: Tensor) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.sequences[index], "labels": self.sequences[index]}


def _arguments(recipe: Recipe, steps: int, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=recipe.batch_size,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=recipe.warmup_steps,
        weight_decay=recipe.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=50,
        save_steps=recipe.save_steps,
        save_total_limit=1,
        seed=recipe.seed,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        report_to=[],
    )


def _record(recipe: Recipe, trainer: Trainer) -> dict[str, Any]:
    """What was trained, how long, and its loss over time."""
    paths = {"corpus": recipe.corpus.name, "tokenizer": recipe.tokenizer.name}
    files = (recipe.corpus, recipe.tokenizer / "tokenizer.json")
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    losses = [(e["step"], round(e["loss"], 4)) for e in trainer.state.log_history if "loss" in e]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"recipe": asdict(recipe) | paths, "sha256": hashes, "versions": versions, "loss": losses}


def _last_checkpoint(folder: Path) -> str | None:
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


def _read_sections(path: Path) -> dict[str, Any]:
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"recipe {path} cannot be read: {error.strerror}.") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionError(f"recipe {path} is not TOML: {error}.") from error
    for name, value in sections.get("data", {}).items():
        sections["data"][name] = (path.parent / value).resolve()
    if "extends" not in sections:
        return sections
    base = _read_sections(path.parent / sections.pop("extends"))
    return base | {name: base.get(name, {}) | section for name, section in sections.items()}

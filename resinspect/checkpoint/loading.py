"""From a Hugging Face folder, a bundled name or a Hub id to a model that is sure to be the one that was stored."""

import os
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, logging

import resinspect.models  # noqa: F401 - registers the reference model
from resinspect.bundle import bundled
from resinspect.checkpoint.files import VOCABULARIES, check_folder
from resinspect.errors import CheckpointError, OptionError, ResinspectError

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SHOWN = 3
"""Tensors named in a message before "and n more"."""
CAUSE = 200
"""Characters of a library's own message that are passed on."""
# What transformers, safetensors and torch.load raise on a file or a value that they cannot use.
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    ResinspectError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
_LOADING = threading.RLock()


def load(
    path: str | os.PathLike[str], *, dtype: str | torch.dtype = "float32", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a causal language model and its tokenizer, ready to capture.

    Args:
        path: A Hugging Face folder, which is read without network; else the name of a bundled checkpoint; else an id
            on the Hugging Face Hub.
        dtype: ``"float32"``, ``"float64"``, ``"bfloat16"``, ``"float16"`` or the torch dtype, whatever is stored.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Returns:
        The model in evaluation mode, named by its folder in ``config.name_or_path``, and its tokenizer, None if the
        checkpoint has none.

    Raises:
        CheckpointError: If anything is missing, damaged, or does not fit together.
        OptionError: If there is no such dtype.
    """
    kind = _dtype(dtype)
    source = _find(path, trust_remote_code)
    with _LOADING, _quiet():
        config = _load_config(source)
        model = _load_model(source, config, kind)
        tokenizer = _load_tokenizer(source)
    for named in (model.config, model) if tokenizer is None else (model.config, model, tokenizer):
        named.name_or_path = source.name
    return model, tokenizer


@dataclass(frozen=True)
class _Source:
    """Where a checkpoint comes from.

    Attributes:
        where: Folder or Hub id, for transformers and for messages.
        name: What traces call the model.
        weights: File that holds or names the weights.
        has_tokenizer: None if the Hub has to be asked.
        arguments: For every ``from_pretrained``.
    """

    where: str
    name: str
    weights: str
    has_tokenizer: bool | None
    arguments: dict[str, Any]


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind not in DTYPES.values():
        raise OptionError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    return kind


def _find(path: str | os.PathLike[str], trust_remote_code: bool) -> _Source:
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    folder, known = Path(path).expanduser(), bundled()
    if not str(path).strip():
        raise CheckpointError(f"the model has no name; {_spelling()}.")
    if not folder.exists():
        if path in known:
            folder = known[path]
        elif "/" not in str(path) and (near := get_close_matches(str(path), known)):
            raise CheckpointError(f"there is no folder or bundled checkpoint {path}; did you mean {near[0]}?")
        elif isinstance(path, str) and HUB_ID.fullmatch(path) and not ("/" in path and folder.parent.is_dir()):
            return _Source(path, path, "its weights", None, arguments)
        else:
            raise CheckpointError(f"there is no folder {folder}; {_spelling()}.")
    contents = check_folder(folder)
    kind = contents.config["model_type"]
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        own_code = "auto_map" in contents.config
        remedy = "pass trust_remote_code=True if you trust its own code" if own_code else "update transformers"
        raise CheckpointError(
            f"{folder / 'config.json'} has model_type {kind!r}, unknown to transformers; correct it, or {remedy}."
        )
    name = folder.resolve().name
    return _Source(str(folder), name, contents.weights, contents.has_tokenizer, arguments | {"local_files_only": True})


def _load_config(source: _Source) -> PreTrainedConfig:
    if source.has_tokenizer is None:
        what, remedy = f"{source.where} is no folder here, and the Hub does not give it", _spelling()
    else:
        what, remedy = f"the config.json of {source.where} cannot be used", "check config.json"
    with _explained(what, remedy):
        config = AutoConfig.from_pretrained(source.where, **source.arguments)
        config.validate_architecture()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not source.arguments["trust_remote_code"]:
        raise CheckpointError(
            f"the config.json of {source.where} has model_type {config.model_type!r}, which is no causal language "
            "model; choose a decoder."
        )
    return config


def _load_model(source: _Source, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    remedy = "use config.json and weights of one model, and fetch them again if they should fit"
    with _explained(f"config.json and {source.weights} of {source.where} cannot be loaded", remedy):
        model, report = AutoModelForCausalLM.from_pretrained(
            source.where,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            # So that they are in the report, to be refused with their names.
            ignore_mismatched_sizes=True,
            **source.arguments,
        )
    shapes = [f"{name} {tuple(stored)} instead of {tuple(ours)}" for name, stored, ours in report["mismatched_keys"]]
    misfits = {
        "lacks": report["missing_keys"],
        "also holds": report["unexpected_keys"],
        "has the wrong shape of": shapes,
    }
    if found := [f"{verb} {_some(names)}" for verb, names in misfits.items() if names]:
        raise CheckpointError(
            f"{source.weights} of {source.where} does not hold the model of its config.json: it {', it '.join(found)}; "
            "use config.json and weights of one and the same model."
        )
    return model.eval()


def _load_tokenizer(source: _Source) -> PreTrainedTokenizerBase | None:
    remedy = f"fetch {VOCABULARIES[0]} and tokenizer_config.json of that model again"
    with _explained(f"the tokenizer of {source.where} cannot be used", remedy, (Exception,)):
        if source.has_tokenizer is False or not (source.has_tokenizer or _hub_has_tokenizer(source)):
            return None
        tokenizer = AutoTokenizer.from_pretrained(source.where, **source.arguments)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            # transformers builds some tokenizers without their vocabulary, and they turn all text into nothing.
            raise ValueError("it has no vocabulary")
    return tokenizer


def _hub_has_tokenizer(source: _Source) -> bool:
    return any(
        cached_file(source.where, name, _raise_exceptions_for_missing_entries=False) is not None
        for name in (*VOCABULARIES, "tokenizer_config.json")
    )


def _some(names: Any) -> str:
    names = sorted(names)
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


def _spelling() -> str:
    known = f" ({', '.join(bundled())})" if bundled() else ""
    return f"give an existing folder, a bundled name{known}, or an id that the Hugging Face Hub has"


@contextmanager
def _explained(what: str, remedy: str, refusals: tuple[type[Exception], ...] = _REFUSALS) -> Iterator[None]:
    """Turn what the libraries raise into one sentence; the library tokenizers raises plain Exception."""
    try:
        yield
    except refusals as error:
        raise CheckpointError(f"{what} ({_cause(error)}); {remedy}.") from error


def _cause(error: Exception) -> str:
    """The one sentence of a library's message that says what is wrong."""
    if isinstance(error, pickle.UnpicklingError):
        # torch.load answers with advice on how to run the code in the file.
        return "it holds more than tensors, or is damaged"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, StrictDataclassError) and len(lines) > 1:
        # The first line names the validator, the second has the error.
        return lines[1].rstrip(".")
    return shorten(f"{type(error).__name__}: {' '.join(lines)}".split(". ")[0], CAUSE, placeholder=" ...").rstrip(".: ")


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or notes of transformers on stderr meanwhile: every misfit is refused here with its name."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub = hub_logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub)
        if bars:
            logging.enable_progress_bar()

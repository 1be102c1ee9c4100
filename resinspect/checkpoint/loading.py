"""From a Hugging Face folder, a file, a bundled name or a Hub id to the model that was stored, and no other."""

import os
import threading
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from resinspect.checkpoint.classes import model_classes
from resinspect.checkpoint.files import VOCABULARIES
from resinspect.checkpoint.nanogpt import read_nanogpt
from resinspect.checkpoint.refusals import explained, quiet, some
from resinspect.checkpoint.sources import Source, find, spelling
from resinspect.checkpoint.tensors import has_prefix, read_tensors, stripped
from resinspect.errors import CheckpointError, OptionError

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
_LOADING = threading.RLock()


def load(
    path: str | os.PathLike[str], *, dtype: str | torch.dtype = "float32", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model of text and its tokenizer, ready to capture.

    Args:
        path: A Hugging Face folder, which is read without network; or a ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` file
            of ``torch.save``, either a state dict with its ``config.json`` beside it or a checkpoint of nanoGPT; else
            the name of a bundled checkpoint; else an id on the Hugging Face Hub.
        dtype: ``"float32"``, ``"float64"``, ``"bfloat16"``, ``"float16"`` or the torch dtype, whatever is stored.
        trust_remote_code: Run Python code that comes with the checkpoint.

    Returns:
        The model in evaluation mode, named by its folder in ``config.name_or_path``, and its tokenizer, None if the
        checkpoint has none. Its class is the one that ``config.architectures`` names, if transformers has it.

    Raises:
        CheckpointError: If anything is missing, damaged, or does not fit together.
        OptionError: If there is no such dtype.
    """
    kind = _dtype(dtype)
    source = find(path, trust_remote_code=trust_remote_code)
    with _LOADING, quiet():
        config, tensors, notes = _read(source)
        model = _load_model(source, config, tensors, kind)
        tokenizer = _load_tokenizer(source)
    for named in (model.config, model) if tokenizer is None else (model.config, model, tokenizer):
        named.name_or_path = source.name
    kind, named = type(model).__name__, config.architectures or []
    if named and kind not in named:
        notes = [*notes, f"config.json names {', '.join(named)}, but its weights make a {kind}"]
    for note in notes:
        warnings.warn(f"{source.name}: {note}.", stacklevel=2)
    return model, tokenizer


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    kind = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if kind not in DTYPES.values():
        raise OptionError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    return kind


def _read(source: Source) -> tuple[PreTrainedConfig, dict[str, Tensor] | None, list[str]]:
    """Configuration, tensors and notes; no tensors where transformers reads the files as they are."""
    contents = source.contents
    if contents is None:
        return load_config(source), None, []
    if contents.config is None:
        return read_nanogpt(contents.files[0])
    config = load_config(source)
    if contents.pickled or any(has_prefix(name) for name in contents.kinds):
        return config, *stripped(read_tensors(contents.files))
    return config, None, []


def load_config(source: Source) -> PreTrainedConfig:
    """The configuration of a folder or Hub id.

    Raises:
        CheckpointError: If transformers cannot use it.
    """
    if source.contents is None:
        what, remedy = f"{source.where} is no folder here, and the Hub does not give it", spelling()
    else:
        what, remedy = f"the config.json of {source.where} cannot be used", "check config.json"
    with explained(what, remedy):
        config = AutoConfig.from_pretrained(source.where, **source.arguments)
        config.validate_architecture()
    return config


def _load_model(
    source: Source, config: PreTrainedConfig, tensors: dict[str, Tensor] | None, dtype: torch.dtype
) -> PreTrainedModel:
    refusal = ""
    for kind in model_classes(config, source.where, trust_remote_code=source.arguments["trust_remote_code"]):
        model, misfits = _fill(kind, source, config, tensors, dtype)
        if not misfits:
            return model.eval()
        refusal = refusal or f"it {', it '.join(misfits)}"
    if source.contents and source.contents.config is None:
        raise CheckpointError(
            f"{source.where}, read as nanoGPT, does not hold a GPT-2: {refusal}; put the config.json of its model "
            "into its folder."
        )
    raise CheckpointError(
        f"{source.weights} of {source.where} does not hold the model of its config.json: {refusal}; "
        "use config.json and weights of one and the same model."
    )


def _fill(
    kind: type[Any], source: Source, config: PreTrainedConfig, tensors: dict[str, Tensor] | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, list[str]]:
    """A model of one class with the stored weights in it, and what does not fit."""
    remedy = "use config.json and weights of one model, and fetch them again if they should fit"
    with explained(f"config.json and {source.weights} of {source.where} cannot be loaded", remedy):
        model, report = kind.from_pretrained(
            source.where if tensors is None else None,
            config=config,
            state_dict=tensors,
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
        "holds other numbers than floats for": _not_floats(model, source, tensors),
    }
    return model, [f"{verb} {some(names)}" for verb, names in misfits.items() if names]


def _not_floats(model: PreTrainedModel, source: Source, tensors: dict[str, Tensor] | None) -> list[str]:
    """Names of parameters stored as integers, truth values or complex numbers, which loading would silently convert."""
    if getattr(model.config, "quantization_config", None) is not None:
        return []
    if tensors is not None:
        others = {name for name, tensor in tensors.items() if not tensor.is_floating_point()}
    else:
        kinds = source.contents.kinds if source.contents else {}
        others = {name for name, kind in kinds.items() if not kind.startswith(("F", "BF"))}
    return sorted(others & {name for name, parameter in model.named_parameters() if parameter.is_floating_point()})


def _load_tokenizer(source: Source) -> PreTrainedTokenizerBase | None:
    remedy = f"fetch {VOCABULARIES[0]} and tokenizer_config.json of that model again"
    with explained(f"the tokenizer of {source.where} cannot be used", remedy, (Exception,)):
        there = source.contents.has_tokenizer if source.contents else _hub_has_tokenizer(source)
        if not there:
            return None
        tokenizer = AutoTokenizer.from_pretrained(source.where, **source.arguments)
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            # transformers builds some tokenizers without their vocabulary, and they turn all text into nothing.
            raise ValueError("it has no vocabulary")
    return tokenizer


def _hub_has_tokenizer(source: Source) -> bool:
    return any(
        cached_file(source.where, name, _raise_exceptions_for_missing_entries=False) is not None
        for name in (*VOCABULARIES, "tokenizer_config.json")
    )

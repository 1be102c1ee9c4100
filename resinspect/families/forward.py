"""Running someone else's model as it is, and leaving nothing behind."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from resinspect.errors import CaptureError, ResinspectError

CAUSE = 200
"""Characters of a model's own message that are passed on."""
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run eagerly, without gradients and dropout; each module's training flag is restored afterwards.

    One at a time: the hooks of two captures on one model would see each other's forward.
    """
    with _ONE_AT_A_TIME:
        flags = {module: module.training for module in model.modules()}
        try:
            model.eval()
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for module, training in flags.items():
                module.training = training


def call(model: nn.Module, ids: Tensor, **arguments: Any) -> Any:
    """The model's output for token ids; arguments that its ``forward`` does not name are left out.

    Raises:
        CaptureError: If the model itself fails on them.
    """
    parameters = inspect.signature(model.forward).parameters
    accepted = {name: value for name, value in arguments.items() if name in parameters}
    first = next(iter(parameters.values()), None)
    named = "input_ids" if "input_ids" in parameters else None
    if first is not None and first.kind is inspect.Parameter.KEYWORD_ONLY:
        named = named or first.name
    try:
        return model(**{named: ids}, **accepted) if named else model(ids, **accepted)
    except ResinspectError:
        raise
    except Exception as error:
        # Someone else's code: it may raise anything, and the user needs to know that it was the model.
        cause = " ".join(str(error).split()) or "no message"
        raise CaptureError(
            f"the forward pass of {type(model).__name__} failed on token ids of shape {tuple(ids.shape)} "
            f"({type(error).__name__}: {shorten(cause, CAUSE, placeholder=' ...').rstrip('.')}); see that it runs on "
            "them without resinspect."
        ) from error


def context_of(model: nn.Module) -> int | None:
    """Tokens of the longest prompt that the model takes, if it says so."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and its like count positions from the one after that of padding.
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return longest


def vocabulary(model: nn.Module) -> int | None:
    """Number of token ids that the model knows, if its configuration or first embedding says so."""
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    return known or next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)

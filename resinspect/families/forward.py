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
    longest = getattr(_text_config(model), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and its like count positions from the one after that of padding.
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return longest


def vocabulary(model: nn.Module) -> int | None:
    """Number of token ids that the model knows, if its configuration or the embedding that takes them says so."""
    return getattr(_text_config(model), "vocab_size", None) or _rows_of_embedding(model)


def _text_config(model: nn.Module) -> Any:
    """Of a model of text and more, the part for text; None without a configuration."""
    config = getattr(model, "config", None)
    parts = [getattr(config, name, None) for name in ("text_config", "decoder")]
    return next((part for part in parts if hasattr(part, "vocab_size")), config)


def _rows_of_embedding(model: nn.Module) -> int | None:
    """Rows of the embedding that gets the ids: a model may have others, of positions or pictures."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if len(tables) < 2:
        return next((table.num_embeddings for table in tables), None)
    # No positions: these never go down.
    ids = torch.tensor([[1, 0, 1, 1]], device=tables[0].weight.device)
    found: list[int] = []

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and torch.equal(args[0].flatten(), ids.flatten()):
            found.append(module.num_embeddings)

    handles = [table.register_forward_pre_hook(see) for table in tables]
    try:
        with evaluating(model):
            call(model, ids, use_cache=False, return_dict=True)
    except CaptureError:
        # It takes other arguments, or another number of tokens. Which ids it knows is still told if these came so far.
        pass
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None

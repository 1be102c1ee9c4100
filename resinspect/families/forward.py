"""Running someone else's model as it is, and leaving nothing behind."""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
    """The model's output for token ids; arguments that its ``forward`` does not name are left out."""
    parameters = inspect.signature(model.forward).parameters
    accepted = {name: value for name, value in arguments.items() if name in parameters}
    if "input_ids" in parameters:
        return model(input_ids=ids, **accepted)
    first = next(iter(parameters.values()), None)
    if first is not None and first.kind is inspect.Parameter.KEYWORD_ONLY:
        return model(**{first.name: ids}, **accepted)
    return model(ids, **accepted)


def vocabulary(model: nn.Module) -> int | None:
    """Number of token ids that the model knows, if its configuration or first embedding says so."""
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    return known or next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)

"""One sentence for whatever the libraries underneath raise, and silence while they work."""

import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import shorten

from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers.utils import logging

from resinspect.errors import CheckpointError, ResinspectError

SHOWN = 3
"""Names in a message before "and n more"."""
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


@contextmanager
def explained(what: str, remedy: str, refusals: tuple[type[Exception], ...] = _REFUSALS) -> Iterator[None]:
    """Turn what the libraries raise into one sentence; the library tokenizers raises plain Exception."""
    try:
        yield
    except refusals as error:
        raise CheckpointError(f"{what} ({_cause(error)}); {remedy}.") from error


def some(names: Iterable[str]) -> str:
    """The first names of many in alphabetical order, and how many more there are."""
    names = sorted(names)
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


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
def quiet() -> Iterator[None]:
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

"""What the commands share on a terminal: where they print, their common options, prompts, loading and notes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from resinspect.errors import PromptError

MANIFEST = "manifest.json"

out = Console()
err = Console(stderr=True)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder or .pt file of a checkpoint, or a bundled name.")]
Text = Annotated[str | None, typer.Option("--text", help="One prompt.")]
Ids = Annotated[str | None, typer.Option("--ids", help="One prompt as token ids, such as '3 14 15'.")]
Method = Annotated[str, typer.Option(help="auto, replay or solve.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut prompts longer than the context instead of refusing.")]


def read_texts(text: str | None, ids: str | None, prompts: Path | None) -> list[str] | list[list[int]]:
    """The prompts of a command.

    Raises:
        PromptError: If not exactly one way to give them was used, or the file holds none.
    """
    if [text, ids, prompts].count(None) != 2:
        raise PromptError("give exactly one of --text, --ids and --prompts.")
    if text is not None:
        return [text]
    if ids is not None:
        words = ids.replace(",", " ").split()
        if wrong := [word for word in words if not word.isdecimal()]:
            raise PromptError(f"--ids holds {wrong[0]!r}, which is no token id; give numbers such as '3 14 15'.")
        return [[int(word) for word in words]]
    try:
        lines = prompts.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"{prompts} is not UTF-8 (byte {error.start}); save it as UTF-8.") from error
    except OSError as error:
        raise PromptError(
            f"{prompts} cannot be read: {error.strerror}; give a text file, one prompt per line."
        ) from error
    if texts := [line for line in lines if line.strip()]:
        return texts
    raise PromptError(f"{prompts} has no prompts; write one per line.")


def load_model(model: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """A model and its tokenizer, with a spinner meanwhile."""
    from resinspect.checkpoint import load

    with notes(), err.status(escape(f"loading {model}")):
        return load(model, trust_remote_code=trust_remote_code)


def progress_bar() -> Progress:
    """A bar on stderr that leaves nothing behind."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True, redirect_stdout=False, redirect_stderr=False)


@contextmanager
def notes() -> Iterator[None]:
    """Show the library's warnings as one line each, after the work."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        err.print(f"note: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def is_trace(path: str) -> bool:
    """Whether a path is that of a stored trace."""
    return (Path(path) / MANIFEST).is_file() or (path.endswith(".zip") and Path(path).is_file())

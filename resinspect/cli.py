"""The command line of resinspect: exact maps of how information moves through depth in transformers."""

import json
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from resinspect.bundle import app_folder, bundled
from resinspect.errors import OptionError, PromptError, ResinspectError

MANIFEST = "manifest.json"

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
out = Console()
err = Console(stderr=True)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or the name of a bundled one.")]
Text = Annotated[str | None, typer.Option("--text", help="One prompt.")]
Method = Annotated[str, typer.Option(help="auto, replay or solve.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut prompts longer than the context instead of refusing.")]


@cli.command()
def capture(
    model: Model,
    *,
    trace: Annotated[Path, typer.Option("--out", help="Folder of the trace.")],
    text: Text = None,
    prompts: Annotated[Path | None, typer.Option(help="UTF-8 text file, one prompt per line.")] = None,
    method: Method = "auto",
    batch_size: Annotated[int, typer.Option(help="Prompts per forward pass.")] = 8,
    keep: Annotated[
        str, typer.Option(help="Optional parts, of gram,cross,natives,hidden,logits.")
    ] = "gram,cross,natives",
    truncate: Truncate = False,
) -> None:
    """Run a model on prompts and store its routing maps as a trace."""
    texts = _texts(text, prompts)
    kept = [name for name in keep.split(",") if name]
    options = {"method": method, "batch_size": batch_size, "keep": kept, "truncate": truncate}
    out.print(_capture_to(trace, model, texts, options), highlight=False, markup=False, soft_wrap=True)


@cli.command("map")
def draw_map(
    source: Annotated[str, typer.Argument(metavar="TRACE_OR_MODEL", help="A stored trace, or a model with --text.")],
    *,
    figure: Annotated[Path, typer.Option("--out", help="File to write: .html, .png, .svg or .pdf.")],
    text: Text = None,
    token: Annotated[int | None, typer.Option(help="One token of the trace; default the mean over all.")] = None,
    limit: Annotated[float | None, typer.Option(help="Weight at which colours end; default the largest.")] = None,
    method: Method = "auto",
    truncate: Truncate = False,
) -> None:
    """Draw the source x reader routing map of a trace, or of a model on a text."""
    from resinspect.figures import routing_map, save_figure
    from resinspect.trace import describe, open_trace

    if _is_trace(source):
        if text is not None:
            raise OptionError(f"{source} is a trace, which has its own text; --text goes with a model.")
        trace = open_trace(source)
    else:
        from resinspect.hooks.capture import capture as run

        if text is None:
            raise OptionError(f"{source} is not a trace, so it is taken as a model, which needs --text.")
        loaded, tokenizer = _load(source)
        with _notes():
            trace = run(loaded, [text], tokenizer=tokenizer, method=method, truncate=truncate)
    limits = None if limit is None else (-limit if float(trace["weight"].min()) < 0 else 0.0, limit)
    save_figure(routing_map(trace, token=token, limits=limits), figure)
    out.print(f"{describe(trace)}\nwrote {figure}", highlight=False, markup=False, soft_wrap=True)


@cli.command()
def models() -> None:
    """List bundled checkpoints and the connections of the reference model."""
    from resinspect.models.connections import CONNECTIONS

    name = Column("checkpoint", no_wrap=True)
    table = Table(name, "connection and options", "layers", "hidden", "tokens", title="Bundled checkpoints")
    for name, folder in bundled().items():
        table.add_row(name, *_checkpoint_row(folder))
    out.print(table)
    table = Table(Column("connection", no_wrap=True), "what", title="Connections")
    for name, connection in CONNECTIONS.items():
        table.add_row(name, (connection.__doc__ or "").partition("\n")[0].replace("``", ""))
    out.print(table)


@cli.command()
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML recipe, such as data/recipes/attnres.toml.")],
    *,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the model; run again to resume.")],
    threads: Annotated[int | None, typer.Option(help="CPU threads; default all.")] = None,
) -> None:
    """Train a reference model; an interrupted run goes on where it stopped."""
    if find_spec("accelerate") is None:
        raise OptionError('training needs accelerate: pip install "resinspect[train]".')
    import torch

    from resinspect.models.training import read_recipe
    from resinspect.models.training import train as run

    if threads is not None:
        torch.set_num_threads(threads)
    out.print(f"wrote {run(read_recipe(config), folder)}", highlight=False, markup=False, soft_wrap=True)


@cli.command()
def app(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Checkpoints to offer first.")
    ] = None,
    *,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port; default the first free one from 8501.")
    ] = None,
) -> None:
    """Open the app in the browser, on this machine only."""
    if find_spec("streamlit") is None:
        raise OptionError('the app needs streamlit: pip install "resinspect[app]".')
    known = bundled()
    if missing := [f for f in folders or [] if f not in known and not Path(f).is_dir()]:
        raise OptionError(f"there is no folder or bundled checkpoint {missing[0]}; give existing ones.")
    if port is not None and not _is_free(port):
        raise OptionError(f"port {port} is in use; choose another one with --port, or leave it out.")
    command = [sys.executable, "-m", "streamlit", "run", str(app_folder() / "main.py"), "--server.address=localhost"]
    command += ["--browser.gatherUsageStats=false", "--server.showEmailPrompt=false"]
    command += [f"--server.port={port}"] if port is not None else []
    raise typer.Exit(subprocess.call([*command, "--", *(str(known.get(f, f)) for f in folders or [])]))


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 2."""
    try:
        cli()
    except ResinspectError as error:
        err.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)


def _texts(text: str | None, prompts: Path | None) -> list[str]:
    if (text is None) == (prompts is None):
        raise PromptError("give exactly one of --text and --prompts.")
    if text is not None:
        return [text]
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


def _capture_to(folder: Path, model: str, texts: list[str], options: dict[str, Any]) -> str:
    """Stream traces to ``folder`` batch by batch; the line that describes the whole."""
    from resinspect.hooks.capture import capture_batches
    from resinspect.trace import TraceWriter, describe, open_trace

    loaded, tokenizer = _load(model)
    with _notes(), TraceWriter(folder) as writer, _progress() as progress:
        bar = progress.add_task("capture", total=len(texts))
        for trace in capture_batches(loaded, texts, tokenizer=tokenizer, **options):
            writer.append(trace)
            progress.advance(bar, len(set(trace["sample"].values.tolist())))
    return describe(open_trace(folder))


def _load(model: str) -> tuple[Any, Any]:
    from resinspect.checkpoint import load

    with err.status(f"loading {model}"):
        return load(model)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True, redirect_stdout=False, redirect_stderr=False)


@contextmanager
def _notes() -> Iterator[None]:
    """Show the library's warnings as one line each, after the work."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning)):
        err.print(f"note: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _is_trace(path: str) -> bool:
    return (Path(path) / MANIFEST).is_file() or (path.endswith(".zip") and Path(path).is_file())


def _checkpoint_row(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    record = folder / "training.json"
    tokens = json.loads(record.read_text())["recipe"]["tokens"] if record.exists() else None
    options = [f"{key}={value}" for key, value in config.get("connection_options", {}).items()]
    sizes = [str(config.get(key, "")) for key in ("num_hidden_layers", "hidden_size")]
    return [", ".join([config.get("connection", ""), *options]), *sizes, f"{tokens:,}" if tokens else ""]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) != 0


if __name__ == "__main__":
    main()

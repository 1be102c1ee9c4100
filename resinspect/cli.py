"""The command line of resinspect: exact maps of how information moves through depth in transformers."""

import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from resinspect.bundle import app_folder, bundled
from resinspect.errors import OptionError, ResinspectError
from resinspect.terminal import (
    Ids,
    Method,
    Model,
    Text,
    Truncate,
    Trust,
    err,
    is_trace,
    load_model,
    notes,
    out,
    progress_bar,
    read_texts,
)

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@cli.command()
def capture(
    model: Model,
    *,
    trace: Annotated[Path, typer.Option("--out", help="Folder of the trace.")],
    text: Text = None,
    ids: Ids = None,
    prompts: Annotated[Path | None, typer.Option(help="UTF-8 text file, one prompt per line.")] = None,
    method: Method = "auto",
    batch_size: Annotated[int, typer.Option(help="Prompts per forward pass.")] = 8,
    keep: Annotated[
        str, typer.Option(help="Optional parts, of gram,cross,natives,hidden,logits,lens,attribution,gradient.")
    ] = "gram,cross,natives",
    truncate: Truncate = False,
    trust_remote_code: Trust = False,
) -> None:
    """Run a model on prompts and store its routing maps as a trace."""
    texts = read_texts(text, ids, prompts)
    kept = [name for name in keep.split(",") if name]
    options = {"method": method, "batch_size": batch_size, "keep": kept, "truncate": truncate}
    out.print(
        _capture_to(trace, load_model(model, trust_remote_code), texts, options),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@cli.command("map")
def draw_map(
    source: Annotated[str, typer.Argument(metavar="TRACE_OR_MODEL", help="A stored trace, or a model with --text.")],
    *,
    figure: Annotated[Path, typer.Option("--out", help="File to write: .html, .png, .svg or .pdf.")],
    text: Text = None,
    ids: Ids = None,
    token: Annotated[int | None, typer.Option(help="One token of the trace; default the mean over all.")] = None,
    limit: Annotated[float | None, typer.Option(help="Weight at which colours end; default the largest.")] = None,
    method: Method = "auto",
    truncate: Truncate = False,
    trust_remote_code: Trust = False,
) -> None:
    """Draw the source x reader routing map of a trace, or of a model on a text."""
    from resinspect.figures import routing_map, save_figure
    from resinspect.trace import describe, open_trace

    if is_trace(source):
        if (text, ids) != (None, None):
            raise OptionError(f"{source} is a trace, which has its own text; --text and --ids go with a model.")
        trace = open_trace(source)
    else:
        from resinspect.hooks.capture import capture as run

        if (text, ids) == (None, None):
            raise OptionError(f"{source} is not a trace, so it is taken as a model, which needs --text or --ids.")
        texts = read_texts(text, ids, None)
        loaded, tokenizer = load_model(source, trust_remote_code)
        with notes():
            trace = run(loaded, texts, tokenizer=tokenizer, method=method, truncate=truncate)
    limits = None if limit is None else (-limit if float(trace["weight"].min()) < 0 else 0.0, limit)
    save_figure(routing_map(trace, token=token, limits=limits), figure)
    out.print(f"{describe(trace)}\nwrote {figure}", highlight=False, markup=False, soft_wrap=True)


@cli.command("inspect")
def inspect_checkpoint(
    model: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder, .pt file, or name of a bundled one.")],
    *,
    trust_remote_code: Trust = False,
) -> None:
    """Say what a checkpoint is and how its residual will be read, without loading its weights."""
    from resinspect.listings import inspection_table

    with notes(), err.status(escape(f"reading {model}")):
        table = inspection_table(model, trust_remote_code=trust_remote_code)
    out.print(table, highlight=False)


@cli.command()
def families(
    *,
    write: Annotated[Path | None, typer.Option(help="Markdown file to write the table into, as in README.md.")] = None,
) -> None:
    """List the families of models, how their W is found, and the error that tests reach."""
    from resinspect.families.table import write_table
    from resinspect.listings import family_table

    if write is None:
        out.print(family_table(), highlight=False)
        return
    write_table(write)
    out.print(f"wrote {write}", highlight=False, markup=False, soft_wrap=True)


@cli.command()
def analyze(
    source: Annotated[str, typer.Argument(metavar="TRACE", help="Folder or zip of a stored trace.")],
    *,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder for one CSV file per measure.")] = None,
    drop_first: Annotated[int, typer.Option(min=0, help="Leading tokens of each document to leave out.")] = 0,
) -> None:
    """Measure a trace: dilution, specialization, drift, streams; intervals are over documents."""
    from resinspect.analysis.export import write_tables
    from resinspect.analysis.table import MEASURES, headlines
    from resinspect.analysis.table import analyze as run
    from resinspect.listings import headline_table
    from resinspect.trace import describe, open_trace

    trace = open_trace(source)
    with notes(), err.status(f"measuring {source}"):
        tables, left_out = run(trace.load(), drop_first=drop_first)
    if folder is not None:
        write_tables(tables, left_out, folder)
    out.print(describe(trace), highlight=False, markup=False, soft_wrap=True)
    rows = headlines(tables)
    out.print(headline_table(rows))
    empty = [name for name in tables if MEASURES[name].headline is not None and name not in set(rows["measure"])]
    lines = [f"without a value, as for this they need more documents or tokens: {', '.join(empty)}"] if empty else []
    lines += [f"left out, as the trace holds too little for them: {', '.join(left_out)}"] if left_out else []
    lines += [f"wrote {len(tables)} tables to {folder}"] if folder is not None else []
    for line in lines:
        out.print(line, highlight=False, markup=False, soft_wrap=True)


@cli.command()
def doctor(
    source: Annotated[str, typer.Argument(metavar="MODEL_OR_TRACE", help="A checkpoint as for capture, or a trace.")],
    *,
    text: Text = None,
    ids: Ids = None,
    prompts: Annotated[Path | None, typer.Option(help="UTF-8 text file, one prompt per line.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="File for one row per statement.")] = None,
    method: Method = "auto",
    truncate: Truncate = False,
    trust_remote_code: Trust = False,
) -> None:
    """Say what is broken, untrained or wrong; exit code 1 if anything is. A model without prompts reads some prose."""
    from resinspect.checkup import describe_report, exit_code, write_report
    from resinspect.checkup import doctor as examine
    from resinspect.trace import open_trace

    given = [text, ids, prompts].count(None) < 3
    if is_trace(source):
        if given:
            raise OptionError(f"{source} is a trace, which has its own text; --text, --ids, --prompts go with a model.")
        report = examine(open_trace(source))
    else:
        texts = read_texts(text, ids, prompts) if given else None
        model, tokenizer = load_model(source, trust_remote_code)
        with notes(), err.status(escape(f"examining {source}")):
            report = examine(model, texts, tokenizer=tokenizer, method=method, truncate=truncate)
    colours = {"finding": "red", "note": "yellow"}
    for severity, line in describe_report(report):
        out.print(line, style=colours.get(severity), highlight=False, markup=False, soft_wrap=True)
    if csv is not None:
        write_report(report, csv)
    raise typer.Exit(exit_code(report))


@cli.command()
def models() -> None:
    """List bundled checkpoints and the connections of the reference model."""
    from resinspect.listings import checkpoint_table, connection_table

    out.print(checkpoint_table())
    out.print(connection_table())


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
    if missing := [f for f in folders or [] if f not in known and not Path(f).exists()]:
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


def _capture_to(folder: Path, model: tuple[Any, Any], texts: list[Any], options: dict[str, Any]) -> str:
    """Stream traces to ``folder`` batch by batch; the line that describes the whole."""
    from resinspect.hooks.capture import capture_batches
    from resinspect.trace import TraceWriter, describe, open_trace

    loaded, tokenizer = model
    with notes(), TraceWriter(folder) as writer, progress_bar() as progress:
        bar = progress.add_task("capture", total=len(texts))
        for trace in capture_batches(loaded, texts, tokenizer=tokenizer, **options):
            writer.append(trace)
            progress.advance(bar, len(set(trace["sample"].values.tolist())))
    return describe(open_trace(folder))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) != 0


if __name__ == "__main__":
    main()

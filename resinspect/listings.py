"""What the command line lists, as tables for a terminal."""

import json
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Column, Table

from resinspect.bundle import bundled

if TYPE_CHECKING:
    import pandas as pd

HEADLINES = ("measure", "value", "95 % interval", "null", "docs")
HEADLINE_CAPTION = (
    "Values are means over tokens; intervals are bootstraps over documents; null is the value without the effect, or "
    "what permutations give. Definitions: the docstring of the function of that name."
)


def checkpoint_table() -> Table:
    """Bundled checkpoints."""
    name = Column("checkpoint", no_wrap=True)
    table = Table(name, "connection and options", "layers", "hidden", "tokens", title="Bundled checkpoints")
    for name, folder in bundled().items():
        table.add_row(*map(escape, (name, *_checkpoint_row(folder))))
    return table


def connection_table() -> Table:
    """Connections of the reference model."""
    from resinspect.models.connections import CONNECTIONS

    table = Table(Column("connection", no_wrap=True), "what", title="Connections")
    for name, connection in CONNECTIONS.items():
        table.add_row(name, escape((connection.__doc__ or "").partition("\n")[0].replace("``", "")))
    return table


def family_table() -> Table:
    """Families of models."""
    from resinspect.families.table import CAPTION, COLUMNS, family_rows

    # At 80 columns every word still fits.
    widths = {"residual": 10, "W": 9, "readers": 7, "method": 7}
    whole = {"family": 25, "error": 5}
    least = widths | whole
    columns = [Column(n, no_wrap=n in whole, min_width=least[n], overflow="fold") for n in COLUMNS]
    look = {"box": SIMPLE, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(*columns, title="Families of models", caption=CAPTION, **look)
    for row in family_rows():
        table.add_row(*map(escape, row))
    return table


def headline_table(rows: "pd.DataFrame") -> Table:
    """The few numbers of an analysis that say most, each with its interval and null."""
    columns = [Column(name, justify="right" if i else "left", no_wrap=True) for i, name in enumerate(HEADLINES)]
    table = Table(*columns, box=SIMPLE, pad_edge=False, caption=HEADLINE_CAPTION, caption_justify="left")
    shown = ""
    for row in rows.itertuples():
        if row.of and row.measure != shown:
            table.add_row(escape(row.measure))
        shown = row.measure
        interval = "no interval" if isnan(row.low) else f"{row.low:.3f} to {row.high:.3f}"
        name = f"  {row.of}" if row.of else row.measure
        table.add_row(*map(escape, (name, f"{row.value:.3f}", interval, _null(row), f"{row.documents:.0f}")))
    return table


def _null(row: Any) -> str:
    """One value, a band, or the upper end of what permutations give."""
    if isnan(row.null_high):
        return ""
    if isnan(row.null_low):
        return f"to {row.null_high:.3f}"
    return f"{row.null_high:.3f}" if row.null_low == row.null_high else f"{row.null_low:.3f} to {row.null_high:.3f}"


def inspection_table(model: str, *, trust_remote_code: bool) -> Table:
    """What a checkpoint is, without its weights."""
    from resinspect.inspection import inspect, rows

    lines = rows(inspect(model, trust_remote_code=trust_remote_code))
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for i, (name, value) in enumerate(lines):
        table.add_row("" if i and lines[i - 1][0] == name else name, escape(value))
    return table


def _checkpoint_row(folder: Path) -> list[str]:
    config = json.loads((folder / "config.json").read_text())
    record = folder / "training.json"
    training = json.loads(record.read_text()) if record.exists() else {}
    tokens = training.get("recipe", {}).get("tokens")
    options = [f"{key}={value}" for key, value in config.get("connection_options", {}).items()]
    options += ["damaged on purpose"] if "damaged" in training else []
    sizes = [str(config.get(key, "")) for key in ("num_hidden_layers", "hidden_size")]
    return [", ".join([config.get("connection", ""), *options]), *sizes, f"{tokens:,}" if tokens else ""]

"""Chart descriptions as interactive plotly figures."""

from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from resinspect.figures.colours import GRID, SCALES, UNKNOWN
from resinspect.figures.description import Heatmap
from resinspect.figures.labels import plotly_text

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_FONT = 12
_LINE = 17
_LETTER = 5.9
"""Pixels of an average letter of the caption and the labels."""


def to_plotly(description: Heatmap, *, width: int = 760) -> "Figure":
    """Draw a description with plotly, for the screen.

    Args:
        description: What to draw.
        width: Pixels; the caption is wrapped to fit.

    Returns:
        The figure.
    """
    from plotly.graph_objects import Figure

    lines = _wrap(description.caption, width)
    figure = Figure([_grid(description), _cells(description), *_crosses(description)])
    figure.update_layout(**_layout(description, lines, width))
    return figure


def _wrap(text: str, width: int) -> list[str]:
    letters = int((width - 30) / _LETTER)
    return [plotly_text(part) for line in text.split("\n") for part in wrap(line, letters)]


def _cells(description: Heatmap) -> dict:
    low, high = description.limits
    colours = SCALES[description.scale]
    return {
        "type": "heatmap",
        "z": description.values,
        "zmin": low,
        "zmax": high,
        "colorscale": [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)],
        "xgap": 1,
        "ygap": 1,
        "hoverongaps": False,
        "hoverinfo": "text",
        "text": _hover(description),
        "colorbar": {
            "title": {"text": plotly_text(description.label), "side": "right"},
            "thickness": 14,
            "outlinewidth": 0,
        },
    }


def _grid(description: Heatmap) -> dict:
    """Grey squares under the cells; what shows of them between two cells is the grid."""
    there = ~np.isnan(description.values)
    return {
        "type": "heatmap",
        "z": np.where(there, 0.0, np.nan),
        "colorscale": [[0, GRID], [1, GRID]],
        "showscale": False,
        "hoverinfo": "skip",
    }


def _crosses(description: Heatmap) -> list[dict]:
    if description.unknown is None or not description.unknown.any():
        return []
    rows, columns = np.nonzero(description.unknown)
    labels = description.rows
    return [
        {
            "type": "scatter",
            "x": columns,
            "y": rows,
            "mode": "markers",
            "marker": {"symbol": "x-thin", "size": 7, "line": {"width": 1, "color": UNKNOWN}},
            "hoverinfo": "text",
            "text": [
                plotly_text(f"{labels[r]} ← {description.x[c]}: not identifiable")
                for r, c in zip(rows, columns, strict=True)
            ],
            "showlegend": False,
        }
    ]


def _hover(description: Heatmap) -> np.ndarray:
    text = np.empty(description.values.shape, dtype=object)
    for row, column in np.ndindex(text.shape):
        parts = [
            f"{description.y_title} {description.rows[row]}",
            f"{description.x_title} {description.x[column]}",
            f"{description.label} {description.values[row, column]:.4g}",
            *(str(description.notes[row, column]).split("\n") if description.notes is not None else []),
        ]
        text[row, column] = "<br>".join(map(plotly_text, parts))
    return text


def _layout(description: Heatmap, lines: list[str], width: int) -> dict:
    rows = len(description.y)
    cell = 22 if rows <= 20 else 17
    top = 46 + _LINE * len(lines)
    bottom = 34 + int(_LETTER * max(map(len, description.x), default=0))
    title = {
        "text": plotly_text(description.title),
        "font": {"size": 14},
        "x": 0,
        "xref": "container",
        "xanchor": "left",
        "y": 1,
        "yref": "container",
        "yanchor": "top",
        "pad": {"l": 10, "t": 12},
        "subtitle": {"text": "<br>".join(lines), "font": {"size": _FONT}},
    }
    axis = {"showgrid": False, "zeroline": False, "tickfont": {"size": _FONT - 1}, "ticks": ""}
    return {
        "title": title,
        "width": width,
        "height": top + bottom + cell * max(rows, 6),
        "margin": {"t": top, "b": bottom, "l": 20, "r": 10},
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": axis | _labels(description.x, description.x_title) | {"tickangle": -90},
        "yaxis": axis | _labels(description.rows, description.y_title) | {"range": [rows - 0.5, -0.5]},
    }


def _labels(names: tuple[str, ...], title: str) -> dict:
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [plotly_text(name) for name in names],
        "title": {"text": plotly_text(title), "standoff": 8},
        "range": [-0.5, len(names) - 0.5],
        "automargin": True,
    }

"""Chart descriptions as matplotlib figures for paper, without pyplot and its global state."""

from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from resinspect.figures.colours import GRID, SCALES, UNKNOWN
from resinspect.figures.description import Heatmap
from resinspect.figures.fonts import drawable_text, families

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def to_matplotlib(description: Heatmap) -> "Figure":
    """Draw a description with matplotlib, for paper.

    Args:
        description: What to draw.

    Returns:
        A figure that belongs to no window and no pyplot; its size fits the map.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = _size(description)
    figure = Figure(figsize=size, layout="constrained")
    # So that a caption keeps off the axis above it.
    figure.get_layout_engine().set(h_pad=0.07)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    mesh = _draw(axes, description)
    bar = figure.colorbar(mesh, ax=axes, shrink=0.8, aspect=30, pad=0.02, extend=_beyond(description))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.set_label(drawable_text(description.label), fontsize=8, **_literal())
    _write(figure, description, size[0])
    return figure


def _size(description: Heatmap) -> tuple[float, float]:
    """Inches: cells of 0.22 (0.15 in a large map), and room for labels, title, caption and colour bar."""
    rows, columns = description.values.shape
    cell = 0.22 if max(rows, columns) <= 20 else 0.15
    letter = 0.065
    width = cell * columns + letter * max(map(len, description.rows), default=0) + 1.3
    width = max(width, 5.6)
    height = cell * rows + letter * max(map(len, description.x), default=0) + 0.75
    return width, max(height, 2.4) + 0.13 * len(_caption(description, width))


def _draw(axes: "Axes", description: Heatmap) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns = description.values.shape
    low, high = description.limits
    mesh = axes.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(description.values),
        cmap=LinearSegmentedColormap.from_list(description.scale, SCALES[description.scale]),
        vmin=low,
        vmax=high,
        linewidth=0.4,
    )
    # Only cells that are there have an edge.
    mesh.set_edgecolor([GRID if there else "none" for there in ~np.isnan(description.values).ravel()])
    if description.unknown is not None and description.unknown.any():
        y, x = np.nonzero(description.unknown)
        axes.scatter(x, y, marker="x", s=9, linewidths=0.6, color=UNKNOWN)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_aspect("equal")
    axes.set_xticks(
        range(columns), [drawable_text(name) for name in description.x], rotation=90, fontsize=7, **_literal()
    )
    axes.set_yticks(range(rows), [drawable_text(name) for name in description.rows], fontsize=7, **_literal())
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(drawable_text(description.x_title), fontsize=8, **_literal())
    axes.set_ylabel(drawable_text(description.y_title), fontsize=8, **_literal())
    return mesh


def _beyond(description: Heatmap) -> str:
    """At which ends of the colour bar an arrow says that values lie beyond it."""
    known = description.values[~np.isnan(description.values)]
    low, high = description.limits
    below = description.diverging and bool((known < low).any())
    above = bool((known > high).any())
    return {(False, False): "neither", (True, False): "min", (False, True): "max"}.get((below, above), "both")


def _write(figure: "Figure", description: Heatmap, width: float) -> None:
    left = {"x": 0.05 / width, "ha": "left", **_literal()}
    figure.suptitle("\n".join(_fold(description.title, width, 10)), fontsize=10, **left)
    figure.supxlabel("\n".join(_caption(description, width)), fontsize=7, color="#404040", **left)


def _caption(description: Heatmap, width: float) -> list[str]:
    return [part for line in description.caption.split("\n") for part in _fold(line, width, 7)]


def _literal() -> dict[str, Any]:
    """Properties of every text: matplotlib reads ``$...$`` as a formula unless told not to."""
    return {"parse_math": False, "usetex": False, "family": families()}


def _fold(text: str, width: float, size: float) -> list[str]:
    """Lines of at most ``width`` inches at a font size in points, of which an average letter takes 0.54."""
    return wrap(drawable_text(text), max(20, int(width * 72 / (0.54 * size))))

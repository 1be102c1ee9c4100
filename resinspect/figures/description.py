"""What a chart shows, before any plotting library."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from resinspect.errors import OptionError
from resinspect.figures.colours import DIVERGING, SEQUENTIAL

_MARKED = ("off", "unknown")


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap:
    """A matrix with named rows and columns.

    All text is literal: what a plotting library would read as markup is the renderer's concern.

    Attributes:
        values: ``(row, column)``; NaN where there is nothing to show.
        x: Labels of the columns, left to right.
        y: Labels of the rows, top to bottom.
        title: One line.
        label: What the colours mean, with units.
        caption: What must be known to trust the map; lines end in a newline, renderers wrap long ones.
        limits: Where the colour scale starts and ends: at 0 and above, or at equal distances from 0.
        marks: Per row its verdict; rows that are "off" or "unknown" are marked on their label.
        unknown: ``(row, column)``, True where a value exists but is not known; drawn as a cross.
        notes: ``(row, column)`` of text that is shown beside a value on screen.
        x_title: What the columns are.
        y_title: What the rows are.
    """

    values: np.ndarray
    x: tuple[str, ...]
    y: tuple[str, ...]
    title: str
    label: str
    caption: str
    limits: tuple[float, float]
    marks: tuple[str, ...] = ()
    unknown: np.ndarray | None = None
    notes: np.ndarray | None = None
    x_title: str = "source"
    y_title: str = "reader"

    def __post_init__(self) -> None:
        shape = (len(self.y), len(self.x))
        for name in ("values", "unknown", "notes"):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise OptionError(f"{name} has shape {array.shape}; the labels need {shape} (rows, columns).")
        low, high = self.limits
        if not (0 < high < np.inf and low in (0, -high)):
            raise OptionError(f"limits are {self.limits}; give (0, a number above 0), or (-x, x) for colours around 0.")
        if self.marks and len(self.marks) != len(self.y):
            raise OptionError(f"there are {len(self.marks)} marks for {len(self.y)} rows; give one for each.")

    @property
    def rows(self) -> tuple[str, ...]:
        """Labels of the rows with their marks, such as ``"⚠ 3.mlp (off)"``."""
        marks = self.marks or ("",) * len(self.y)
        return tuple(
            f"⚠ {name} ({mark})" if mark in _MARKED else name for name, mark in zip(self.y, marks, strict=True)
        )

    @property
    def diverging(self) -> bool:
        """Whether the colours part at zero."""
        return self.limits[0] < 0

    @property
    def scale(self) -> str:
        """Name of the colour scale in ``resinspect.figures.colours.SCALES``."""
        return DIVERGING if self.diverging else SEQUENTIAL

    def __repr__(self) -> str:
        return f"<Heatmap {self.title!r}, {len(self.y)} × {len(self.x)}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        """Show the plotly figure in a notebook."""
        from resinspect.figures.plotly_renderer import to_plotly

        return to_plotly(self)._repr_mimebundle_(include, exclude)


def colour_range(lowest: float, highest: float) -> tuple[float, float]:
    """Limits of a colour scale that shows these values.

    Values from 0 up get a scale that starts at 0; with values below 0 the scale is symmetric, so that its middle is
    0. A value below 0 by less than one of 255 steps of the scale is taken for 0.
    """
    if not np.isfinite([lowest, highest]).all():
        return 0.0, 1.0
    reach = float(max(-lowest, highest)) or 1.0
    return (-reach if lowest < -max(highest, 0.0) / 255 else 0.0), reach

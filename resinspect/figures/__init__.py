"""Figures: a trace becomes a chart description, and a description becomes a picture for screen or paper."""

from collections.abc import Callable

from resinspect.figures.description import Heatmap
from resinspect.figures.labels import visible_text
from resinspect.figures.matplotlib_renderer import to_matplotlib
from resinspect.figures.plotly_renderer import to_plotly
from resinspect.figures.routing import routing_map
from resinspect.figures.save import save_figure

FIGURES: dict[str, Callable[..., Heatmap]] = {
    "routing_map": routing_map,
}
"""Every figure by name: adding one takes a function and a line here."""

__all__ = ["FIGURES", "Heatmap", "routing_map", "save_figure", "to_matplotlib", "to_plotly", "visible_text"]

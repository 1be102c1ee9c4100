"""Saving a figure: the suffix says how, the bytes depend on nothing but the description."""

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

from resinspect.errors import OptionError
from resinspect.figures.description import Heatmap
from resinspect.figures.matplotlib_renderer import to_matplotlib
from resinspect.figures.plotly_renderer import to_plotly


def save_figure(description: Heatmap, path: str | Path) -> Path:
    """Save a figure as a page that needs no network (.html) or for paper (.pdf, .svg, .png).

    The same description gives the same bytes, and a failure leaves an earlier file as it was.

    Args:
        description: What to draw, such as the result of ``routing_map``.
        path: File; its suffix chooses the format.

    Returns:
        The path.

    Raises:
        OptionError: If the suffix is not one of these, or the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise OptionError(f"{path.name!r} ends in {path.suffix!r}; a figure can be saved as {', '.join(FORMATS)}.")
    if not path.parent.is_dir():
        raise OptionError(f"folder {path.parent} does not exist; create it first or choose another.")
    _replace(path, FORMATS[path.suffix.lower()](description))
    return path


def _html(description: Heatmap) -> bytes:
    figure = to_plotly(description)
    name = hashlib.sha256(figure.to_json().encode()).hexdigest()[:12]
    page = figure.to_html(
        include_plotlyjs=True, include_mathjax=False, div_id=f"figure-{name}", config={"displaylogo": False}
    )
    return page.encode()


def _png(description: Heatmap) -> bytes:
    return _paper(description, "png", dpi=200, metadata={"Software": None})


def _svg(description: Heatmap) -> bytes:
    return _paper(description, "svg", metadata={"Date": None})


def _pdf(description: Heatmap) -> bytes:
    return _paper(description, "pdf", metadata={"CreationDate": None, "ModDate": None})


FORMATS: dict[str, Callable[[Heatmap], bytes]] = {".html": _html, ".png": _png, ".svg": _svg, ".pdf": _pdf}
"""How each suffix is drawn."""


def _paper(description: Heatmap, form: str, **options: object) -> bytes:
    from matplotlib import rc_context

    buffer = io.BytesIO()
    # A fixed salt gives SVG elements the same ids each time; type 42 keeps the text of a PDF searchable.
    with rc_context({"svg.hashsalt": "resinspect", "pdf.fonttype": 42}):
        to_matplotlib(description).savefig(buffer, format=form, **options)
    return buffer.getvalue()


def _replace(path: Path, data: bytes) -> None:
    """Write beside the file, then take its place in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror or error}.") from error

"""The colours of all figures: one table."""

SEQUENTIAL = "sequential"
DIVERGING = "diverging"

SCALES: dict[str, tuple[str, ...]] = {
    SEQUENTIAL: ("#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84"),
    DIVERGING: (
        "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b",
    ),
}  # fmt: skip
"""ColorBrewer YlGnBu and RdBu: even steps of lightness, safe for colour-blind readers, light at zero."""

GRID = "#b4b4b4"
"""Between cells, so that a light cell is told from no cell on white and on black."""

UNKNOWN = "#8a8a8a"
"""Marks of cells whose value is not known."""

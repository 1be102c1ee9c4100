"""Fonts for paper: which to use, and what to write for a character that none of them can draw."""

from functools import cache

from resinspect.figures.labels import visible_text

_ALWAYS = "DejaVu Sans"
"""Comes with matplotlib, so that a figure does not depend on the machine unless its text needs another font."""

_MORE = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "PingFang SC", "Hiragino Sans", "Microsoft YaHei",
    "WenQuanYi Zen Hei", "Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji", "Segoe UI Symbol", "Arial Unicode MS",
)  # fmt: skip
"""Asked in this order for what it lacks, where they are installed."""


@cache
def families() -> list[str]:
    """Names of the fonts to draw with."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [_ALWAYS, *(name for name in _MORE if name in installed)]


@cache
def _covered() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset().union(*(get_font(findfont(name)).get_charmap() for name in families()))


def drawable_text(text: str) -> str:
    """Visible text, with the code of each character that no font has, such as ``\\u4e2d``, in its place."""
    covered = _covered()
    return "".join(c if ord(c) in covered else c.encode("unicode_escape").decode() for c in visible_text(text))

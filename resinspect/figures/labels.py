"""Text of tokens and names as labels: always literal, always visible."""

import unicodedata

_MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
_JOINERS = "\u200c\u200d"
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def visible_text(text: str) -> str:
    """Text on one line with nothing hidden in it.

    A newline becomes ⏎, a tab ⇥, and what has no picture of its own (control characters, switches of the writing
    direction, half characters) its code, such as ``\\x1b``. Joiners stay: emoji and some scripts need them.
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    if character not in _JOINERS and unicodedata.category(character) in _HIDDEN:
        return character.encode("unicode_escape").decode()
    return character


def plotly_text(text: str) -> str:
    """Text for plotly, which reads tags, entities and ``$...$`` in every label: all written as entities."""
    escaped = visible_text(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("$", "&#36;")

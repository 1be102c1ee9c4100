"""What every page needs: choosing a model, capturing a text, and showing text that others wrote."""

import re
import string
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import streamlit as st

import resinspect as ri

_ALONE = threading.RLock()
OTHER = "Another folder …"
BADGES = {
    "exact": ":green-badge[:material/check: exact]",
    "off": ":red-badge[:material/warning: off]",
    "unknown": ":orange-badge[:material/help: unknown]",
}
FIDELITY_HELP = (
    "Relative error of rebuilding what each reader really read from the map, over all tokens and readers shown. "
    "**exact**: no more than rounding. **off**: do not trust the marked readers. **unknown**: it cannot be told."
)


def literal(text: str) -> str:
    """Any text as Markdown that shows it as it is."""
    # An invisible joiner keeps ":smile:" from becoming an emoji, which a backslash does not.
    text = re.sub(r":(?=[\w+-]+:)", ":\u2060", ri.visible_text(text))
    return "".join(f"\\{c}" if c in string.punctuation else c for c in text)


def code(text: str) -> str:
    """A token as Markdown code that shows it as it is, spaces included."""
    text = ri.visible_text(text).replace(" ", "␣")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def choose_checkpoint() -> str | None:
    """A bundled checkpoint, one given on the command line, or a folder that is typed; None until there is one."""
    offered = [*dict.fromkeys([*sys.argv[1:], *ri.bundled()])]
    chosen = st.selectbox("Checkpoint", [*offered, OTHER], help="Bundled with resinspect, or a folder of your own.")
    if chosen != OTHER:
        return chosen
    folder = st.text_input(
        "Folder or file", placeholder="/path/to/checkpoint", help="A Hugging Face folder or .pt file on this machine."
    )
    # As file managers copy it.
    folder = folder.strip().strip("\"'")
    if folder in ri.bundled() or not folder:
        return folder or None
    # An absolute path, so that a mistyped folder is not looked up on the Hugging Face Hub.
    return str(Path(folder).expanduser().absolute())


def trace_of(checkpoint: str, text: str) -> tuple[Any, list[str]]:
    """The trace of one text and what there is to warn of, remembered for as long as the checkpoint's files stay.

    Raises:
        ri.ResinspectError: If the checkpoint cannot be loaded or the text cannot be run.
    """
    return _trace(checkpoint, _stamp(checkpoint), text)


@st.cache_resource(show_spinner=False, max_entries=16)
def _trace(checkpoint: str, stamp: int, text: str) -> tuple[Any, list[str]]:
    model, tokenizer, notes = _model(checkpoint, stamp)
    with st.spinner("Capturing the routing map …"), _warned() as more:
        trace = ri.capture(model, text if tokenizer else [token_ids(text)], tokenizer=tokenizer, keep=())
    return trace, [*notes, *more]


@st.cache_resource(show_spinner="Loading the checkpoint …", max_entries=2)
def _model(checkpoint: str, stamp: int) -> tuple[Any, Any, list[str]]:
    """A model, its tokenizer, and what there is to warn of."""
    with _warned() as notes:
        model, tokenizer = ri.load(checkpoint)
    return model, tokenizer, notes


@contextmanager
def _warned() -> Iterator[list[str]]:
    """Fills a list with what is warned of inside; one session at a time, as warnings and hooks are everyone's."""
    notes: list[str] = []
    with _ALONE, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield notes
    notes += dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, UserWarning))


def token_ids(text: str) -> list[int]:
    """Token ids as typed for a model without a tokenizer.

    Raises:
        ri.ResinspectError: If there is anything else.
    """
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise ri.ResinspectError("this checkpoint has no tokenizer; type token ids instead of text, such as 3 14 15.")
    return [int(word) for word in words]


def _stamp(checkpoint: str) -> int:
    """When a file of the checkpoint last changed."""
    place = ri.bundled().get(checkpoint, Path(checkpoint).expanduser())
    try:
        files = [*(place if place.is_dir() else place.parent).iterdir()]
        return max((file.stat().st_mtime_ns for file in files), default=0)
    except (OSError, ValueError):
        return 0


def show_notes(notes: list[str]) -> None:
    """What was warned of, a box for each."""
    for note in notes:
        st.warning(literal(note), icon=":material/info:")


def show_error(error: ri.ResinspectError) -> None:
    """What went wrong, as one sentence."""
    message = str(error)
    st.error(literal(message[:1].upper() + message[1:]), icon=":material/error:")


def show_fidelity(trace: Any) -> None:
    """Fidelity of a trace in words."""
    summary = ri.fidelity_summary(trace)
    figures = f"fidelity worst **{summary['worst']:.1e}**, median **{summary['median']:.1e}**"
    st.markdown(f"{BADGES[summary['verdict']]} {figures}", help=FIDELITY_HELP)
    if summary["off"]:
        names = ", ".join(code(name) for name in summary["off"])
        st.warning(f"The map does not rebuild what these readers read: {names}.", icon=":material/warning:")

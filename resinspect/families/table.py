"""The table of families as people read it: on the command line and in README."""

from collections.abc import Iterator
from pathlib import Path

from resinspect.errors import OptionError
from resinspect.families import FAMILIES

COLUMNS = ("family", "residual", "W", "readers", "method", "error")
CAPTION = (
    "Tried in this order, by structure, never by class name alone. Method: how W is found; then what tests check it "
    "by, where W is one scalar. Error: the largest of float32 maps in tests, relative, on tiny random models."
)
START = "<!-- families, written by: resinspect families --write README.md -->"
END = "<!-- end of families -->"
ANY = ("any module", "whatever you name the sublayers of", "scalar per token", "as named", "solve", "-")
"""What needs no family; solve bounds the error of each weight by itself."""


def family_rows() -> Iterator[tuple[str, ...]]:
    """One row for each family, in the order in which they are tried, then what works without one."""
    for name, family in FAMILIES.items():
        yield name, family.scheme, family.weight, family.readers, family.method, f"{family.error:.0e}"
    yield ANY


def markdown() -> str:
    """The table in Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *family_rows()]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def write_table(path: Path) -> None:
    """Replace what stands between the two marks in a Markdown file by the table.

    Raises:
        OptionError: If the file cannot be read or has no such marks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read ({error}); give a Markdown file.") from error
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise OptionError(f"{path} does not hold the lines {START} and {END}; put them where the table shall stand.")
    path.write_text(f"{before}{start}\n\n{markdown()}\n\n{CAPTION}\n\n{end}{after}", encoding="utf-8")

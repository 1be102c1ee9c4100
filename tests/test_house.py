"""The rules of the house: who may import whom, and what ``import resinspect`` costs."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import resinspect

ROOT = Path(resinspect.__file__).parent
# The street of CONTRIBUTING.md: each room and the rooms of resinspect it may import. errors is open to all.
MAY_IMPORT = {
    "anatomy": set(),
    "bundle": set(),
    "trace": {"anatomy"},
    "program": {"anatomy"},
    "models": {"anatomy", "program"},
    "families": {"anatomy", "program", "models"},
    "hooks": {"anatomy", "trace", "program", "families", "models"},
    "checkpoint": {"bundle", "models"},
    "analysis": {"anatomy", "trace"},
    "interventions": {"anatomy", "trace", "program", "families", "hooks", "analysis"},
    "checkup": {"anatomy", "trace", "families", "hooks", "analysis"},
    "figures": {"trace", "anatomy"},
    "inspection": {"anatomy", "checkpoint", "families", "program"},
    "listings": {"bundle", "families", "inspection", "models"},
    "terminal": {"checkpoint"},
    "cli": {
        "analysis",
        "bundle",
        "checkup",
        "families",
        "figures",
        "hooks",
        "listings",
        "models",
        "terminal",
        "trace",
    },
}
HEAVY = ("torch", "transformers", "transformer_lens", "plotly", "matplotlib", "xarray", "pandas", "sklearn")


def room(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
        yield from (n.split(".")[1] for n in names if n.startswith("resinspect."))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_street_is_one_way(path):
    """A lower room that imports a higher one: the street would no longer have one direction."""
    here = room(path)
    if here in ("__init__", "errors"):
        return
    assert here in MAY_IMPORT, f"{here} is not in the table of rooms"
    assert set(imported_rooms(path)) <= MAY_IMPORT[here] | {here, "errors"}


def test_import_is_light():
    """An eager import that makes every command and notebook wait for torch."""
    code = f"import resinspect, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    # 0.3 s is the promise for the import itself; the rest is the interpreter's own start on a busy machine.
    assert time.perf_counter() - start < 3


def test_every_public_name_resolves():
    """A table line of the lazy package that points nowhere."""
    for name in resinspect.__all__:
        assert getattr(resinspect, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'captur'"):
        resinspect.captur  # noqa: B018

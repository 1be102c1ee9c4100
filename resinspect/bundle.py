"""Where the checkpoints and the app that come with resinspect lie, in a source tree and in an installed wheel."""

from pathlib import Path

from resinspect.errors import ResinspectError

_PACKAGE = Path(__file__).resolve().parent


def bundled(kind: str = "checkpoints") -> dict[str, Path]:
    """Bundled checkpoints: name -> folder, in the order of their names; empty where none are bundled.

    Args:
        kind: Folder inside ``data/``.
    """
    folder = _locate(f"data/{kind}", f"_data/{kind}")
    if folder is None:
        return {}
    return {path.name: path for path in sorted(folder.iterdir()) if (path / "config.json").is_file()}


def app_folder() -> Path:
    """Folder of the Streamlit app.

    Raises:
        ResinspectError: If this installation lacks it.
    """
    folder = _locate("app", "_app")
    if folder is None:
        raise ResinspectError(f"the app is missing beside {_PACKAGE}; install resinspect again.")
    return folder


def _locate(in_source: str, in_wheel: str) -> Path | None:
    """The wheel's copy if there is one, else the source tree's, told from any other parent by its pyproject.toml."""
    root = _PACKAGE.parent
    candidates = [_PACKAGE / in_wheel] + ([root / in_source] if (root / "pyproject.toml").is_file() else [])
    return next((folder for folder in candidates if folder.is_dir()), None)

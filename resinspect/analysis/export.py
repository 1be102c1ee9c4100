"""Tables of measures as CSV files, all of them or none."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from resinspect.errors import OptionError


def write_tables(tables: Mapping[str, pd.DataFrame], left_out: Mapping[str, str], folder: Path) -> None:
    """Write ``<measure>.csv`` for each table, and ``left_out.csv`` with the reasons of the others.

    Args:
        tables: From ``analyze``.
        left_out: From ``analyze``.
        folder: Must not exist, or be empty.

    Raises:
        OptionError: If the folder cannot be used.
    """
    there = folder.exists()
    if there and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} exists and is not empty; choose another folder or delete it first.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished.", dir=folder))
    except OSError as error:
        raise OptionError(f"{folder} cannot be written: {error.strerror}.") from error
    try:
        for name, table in tables.items():
            table.to_csv(unfinished / f"{name}.csv", index=False, lineterminator="\n")
        reasons = pd.DataFrame(list(left_out.items()), columns=["measure", "reason"])
        reasons.to_csv(unfinished / "left_out.csv", index=False, lineterminator="\n")
        for file in unfinished.iterdir():
            file.replace(folder / file.name)
        unfinished.rmdir()
    except BaseException:
        shutil.rmtree(unfinished if there else folder, ignore_errors=True)
        raise

"""The report in words, a line for each statement."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from resinspect.checkup.rows import SEVERITIES
from resinspect.errors import OptionError

_SHOWN = 4
_WIDTH = max(map(len, SEVERITIES))


def describe_report(report: pd.DataFrame) -> list[tuple[str, str]]:
    """What the doctor found, worst first, as ``(severity, line)``; the first line, without severity, says of what.

    Args:
        report: Of ``ri.doctor``.
    """
    counts = {severity: int((report["severity"] == severity).sum()) for severity in SEVERITIES}
    total = ", ".join(
        f"{count} {severity}{'s' * (count != 1 and severity in SEVERITIES[:2])}" for severity, count in counts.items()
    )
    head = f"{report.attrs['model']} · {report.attrs['scheme']} · {report.attrs['examined']} · {total}"
    return [("", head), *_lines(report)]


def write_report(report: pd.DataFrame, file: str | Path) -> None:
    """Write a report as CSV, one row per statement.

    Raises:
        OptionError: If it cannot be written there.
    """
    try:
        report.to_csv(file, index=False)
    except OSError as error:
        raise OptionError(f"{file} cannot be written: {error.strerror or error}; choose another file.") from error


def _lines(report: pd.DataFrame) -> Iterator[tuple[str, str]]:
    for severity in SEVERITIES:
        for row in report[report["severity"] == severity].itertuples():
            where = f" at {_short(row.where)}" if row.where and severity in SEVERITIES[:2] else ""
            limit = f" [{row.threshold}]" if row.threshold and severity in SEVERITIES[:2] else ""
            text = f"{row.check}{where}: {row.evidence}{limit}"
            yield severity, f"{severity:<{_WIDTH}}  {text}{'. ' + row.consequence if row.consequence else ''}"


def _short(where: str) -> str:
    names = where.split(", ")
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

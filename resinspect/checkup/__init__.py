"""The doctor: a table of checks over a model and its trace, each with evidence, threshold and consequence.

The room is not called ``doctor``, since its module would take the place of the function ``ri.doctor``.
"""

from resinspect.checkup.examination import CHECKS, doctor, exit_code
from resinspect.checkup.report import describe_report, write_report

__all__ = ["CHECKS", "describe_report", "doctor", "exit_code", "write_report"]

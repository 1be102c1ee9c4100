"""The doctor: a table of checks over a model and its trace, each with evidence, threshold and consequence."""

from resinspect.doctor.examination import CHECKS, doctor, exit_code
from resinspect.doctor.report import describe_report

__all__ = ["CHECKS", "describe_report", "doctor", "exit_code"]

"""The trace: what every analysis, figure and surface of resinspect starts from, in memory and on disk."""

from resinspect.trace.build import build_trace
from resinspect.trace.check import check_trace, require_trace
from resinspect.trace.combine import concat, select
from resinspect.trace.export import export_zip
from resinspect.trace.reader import open_trace
from resinspect.trace.schema import ATTRIBUTES, CONVENTION, COORDINATES, EPS, METHODS, VARIABLES
from resinspect.trace.verdict import FidelitySummary, describe, discarded_share, fidelity_summary, verdict
from resinspect.trace.writer import TraceWriter, save_trace

__all__ = [
    "ATTRIBUTES",
    "CONVENTION",
    "COORDINATES",
    "EPS",
    "METHODS",
    "VARIABLES",
    "FidelitySummary",
    "TraceWriter",
    "build_trace",
    "check_trace",
    "concat",
    "describe",
    "discarded_share",
    "export_zip",
    "fidelity_summary",
    "open_trace",
    "require_trace",
    "save_trace",
    "select",
    "verdict",
]

"""resinspect: exact maps of how information moves through depth in transformers.

Names load what they need on first use; ``import resinspect`` itself loads neither torch nor transformers.
"""

from importlib import import_module
from typing import Any

from resinspect.analysis.table import MEASURES

__version__ = "0.1.0"

_WHERE = {
    "capture": "resinspect.hooks.capture",
    "capture_batches": "resinspect.hooks.capture",
    "load": "resinspect.checkpoint",
    "bundled": "resinspect.bundle",
    "build_trace": "resinspect.trace",
    "check_trace": "resinspect.trace",
    "concat": "resinspect.trace",
    "describe": "resinspect.trace",
    "discarded_share": "resinspect.trace",
    "export_zip": "resinspect.trace",
    "fidelity_summary": "resinspect.trace",
    "open_trace": "resinspect.trace",
    "save_trace": "resinspect.trace",
    "select": "resinspect.trace",
    "TraceWriter": "resinspect.trace",
    "verdict": "resinspect.trace",
    "routing_map": "resinspect.figures",
    "save_figure": "resinspect.figures",
    "to_matplotlib": "resinspect.figures",
    "to_plotly": "resinspect.figures",
    "visible_text": "resinspect.figures",
    "analyze": "resinspect.analysis.table",
    "compare": "resinspect.analysis.similarity",
    "paired_difference": "resinspect.analysis.paired",
    "summarise": "resinspect.analysis.summary",
    "doctor": "resinspect.checkup",
    "ablate_edge": "resinspect.interventions",
    "ablate_source": "resinspect.interventions",
    "effects": "resinspect.interventions",
    "freeze_to": "resinspect.interventions",
    "intervene": "resinspect.interventions",
    "mean_routing": "resinspect.interventions",
    "recency_only": "resinspect.interventions",
    "routing_vs_causal": "resinspect.interventions",
    "shuffle_tokens": "resinspect.interventions",
    "skip_effects": "resinspect.interventions",
    "uniform_routing": "resinspect.interventions",
    "ResinspectError": "resinspect.errors",
} | {name: f"resinspect.analysis.{measure.module}" for name, measure in MEASURES.items()}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'resinspect' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})

"""Interventions: W as a handle. Edits of what readers get, and what they do to predictions."""

from resinspect.interventions.agreement import RoutingVsCausal, routing_vs_causal
from resinspect.interventions.edits import Edit, ablate_edge, ablate_source, recency_only
from resinspect.interventions.effects import effects, intervene
from resinspect.interventions.routing import freeze_to, mean_routing, shuffle_tokens, uniform_routing
from resinspect.interventions.skip import skip_effects

__all__ = [
    "Edit",
    "RoutingVsCausal",
    "ablate_edge",
    "ablate_source",
    "effects",
    "freeze_to",
    "intervene",
    "mean_routing",
    "recency_only",
    "routing_vs_causal",
    "shuffle_tokens",
    "skip_effects",
    "uniform_routing",
]

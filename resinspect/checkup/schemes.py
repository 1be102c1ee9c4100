"""What schemes promise about their natives: which are a softmax over depth, and which are gates between two ends."""

from collections.abc import Iterator

import numpy as np

from resinspect.checkup.patient import Patient
from resinspect.checkup.rows import NotApplicable

SOFTMAX: dict[tuple[str, str], tuple[str, ...]] = {
    ("reference", "attnres"): ("alpha",),
    ("reference", "block_attnres"): ("alpha",),
    ("open_attnres", "state_attention_full"): ("alpha",),
    ("open_attnres", "state_attention_block"): ("alpha",),
    ("inkling2", "block_attention_residuals"): ("alpha",),
    ("inkling2_loop", "looped_block_attention_residuals"): ("alpha", "message_alpha"),
}
"""(family, scheme): the natives whose last dimension is a softmax over what is read."""

GATES: dict[tuple[str, str], dict[str, tuple[float, float]]] = {
    ("reference", "mhc"): {"pre": (0, 1), "post": (0, 2)},
    ("reference", "ddl"): {"beta": (0, 2)},
    ("deepseek_v4", "mhc"): {"pre": (0, 1), "post": (0, 2)},
    ("glm5_next", "mhc"): {"pre": (0, 1), "post": (0, 2)},
    ("hy_v4", "ihc"): {"pre": (0, 1)},
    ("hyper_connections_modules", "mhc"): {"pre": (0, 1), "post": (0, 2)},
    ("qwen4_exp", "gated_streams"): {"gate": (0, 1), "post": (0, 2)},
    ("open_attnres", "state_attention_full"): {"gate": (0, 1)},
    ("open_attnres", "state_attention_block"): {"gate": (0, 1)},
    ("inkling2_loop", "looped_block_attention_residuals"): {
        **{f"keep_{name}": (0, 2) for name in ("q", "k", "v", "mlp")},
        **{f"take_{name}": (-1, 1) for name in ("q", "k", "v", "mlp")},
    },
}
"""(family, scheme): natives that are a sigmoid or a tanh, and the ends that they cannot reach."""


def softmaxes(patient: Patient) -> Iterator[tuple[str, np.ndarray]]:
    """Every softmax over depth: where, and its weights ``(token, slot)`` on tokens where all are finite.

    Slots that do not exist there are left out.

    Raises:
        NotApplicable: If the scheme has none that is known, or the trace holds no natives.
    """
    names = SOFTMAX.get(patient.scheme)
    if names is None:
        raise NotApplicable(f"no softmax over depth is known of scheme {patient.scheme[1]!r}")
    for name in names:
        values = patient.native(name)
        views = values.reshape(*values.shape[:2], -1, values.shape[-1])
        for site, place in enumerate(patient.sites):
            for view in range(views.shape[2]):
                weights = views[:, site, view]
                known = weights[:, ~np.isnan(weights).all(0)]
                if known.size:
                    label = f"{place}[{view}]" if views.shape[2] > 1 else place
                    yield label if name == "alpha" else f"{label} {name}", known[np.isfinite(known).all(1)]

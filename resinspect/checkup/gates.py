"""The check of gates: sigmoids, tanhs and softmaxes that training hardly can move any more."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from resinspect.checkup.patient import Patient
from resinspect.checkup.rows import NotApplicable, Row, listed, tokens_of
from resinspect.checkup.schemes import GATES, SOFTMAX, softmaxes
from resinspect.checkup.values import FEWEST

if TYPE_CHECKING:
    from torch import Tensor

SATURATED = 1e-3
Groups = Iterator[tuple[str, np.ndarray]]


def saturated_gates(patient: Patient) -> Iterator[Row]:
    """Gates at one end of a sigmoid, tanh or softmax on all tokens, where they pass hardly any gradient.

    Value: the largest distance from that end over tokens, as a share of the range. Threshold: 0.001 on all tokens, all
    at the same end: the slope is then below 1/250 of that in the middle (a logit beyond 6.9). For a softmax: on every
    token some slot has at least 0.999. Needs 20 tokens. That a gate is closed may be what was learned; that it hardly
    can open again is what the slope says.

    Covered, from a trace with natives: every softmax over depth (AttnRes, Block AttnRes, open AttnRes, Inkling 2,
    also its messages) and over streams (the attention pool of the hyper-connections package); the sigmoids ``pre`` and
    ``post`` of mHC (reference, DeepSeek-V4, GLM-5-Next, the package), ``pre`` of HY-V4, ``gate`` and ``post`` of
    Qwen4-Exp, ``beta`` of Deep Delta Learning, gates per channel of open AttnRes; the keep and take gates
    of looped Inkling 2. With the model as well: the tanh inside dynamic hyper-connections (reference and package), the
    scalar sigmoid of open AttnRes, the static gates of Muse Spark.

    Not covered: Sinkhorn mixing (``frozen mixing`` asks for its gradient); the value of Deep Delta
    Learning, which a trace holds only within products; the tanh of Gemma 3n's router, of which natives are linear
    combinations; ReLUs of DCA, which have one end; weights between no ends (DenseFormer, static hyper-connections,
    scales of a carry); gates inside sublayers; schemes without a family, such as MUDDFormer or highway networks.
    """
    found, count, nearest = [], 0, (np.inf, "")
    for place, far in _gates(patient):
        count += far.size
        nearest = min(nearest, (float(far.min()), place))
        found += [f"{place}[{i}]" if far.size > 1 else place for i in np.flatnonzero(far < SATURATED)]
    tokens = patient.trace.sizes["token"]
    if tokens < FEWEST:
        raise NotApplicable(f"{tokens} tokens are too few; it needs {FEWEST}")
    if not count:
        raise NotApplicable("no gate is known at more than one slot")
    evidence = f"{len(found)} of {count} gates; nearest to its end is {nearest[1]}, within {nearest[0]:.2g}"
    evidence = f"{evidence}; {tokens_of(patient.trace)}"
    limit = f"within {SATURATED} of one end on all tokens"
    row = Row("ok", evidence, "", nearest[0], tokens, limit)
    why = "On these tokens these gates hardly pass a gradient, so training hardly moves them."
    yield row.found(listed(found, of=count, what="gates"), why) if found else row


def _gates(patient: Patient) -> Groups:
    """Every group of gates: where, and for each gate its largest distance over tokens from the nearer end."""
    scheme = patient.scheme
    if scheme not in SOFTMAX and scheme not in GATES and scheme not in COMPUTED:
        raise NotApplicable(f"no gate between two ends is known of scheme {scheme[1]!r}")
    if scheme in SOFTMAX:
        for place, alpha in softmaxes(patient):
            if alpha.shape[1] > 1 and len(alpha):
                # One gate per softmax: the most that the largest slot of a token leaves to the others.
                yield f"softmax {place}", (1 - alpha.max(1)).max(keepdims=True)
    if "native_pool" in patient.trace:
        yield from _pool(patient)
    if scheme in COMPUTED:
        yield from COMPUTED[scheme](patient)
    for name, (low, high) in GATES.get(scheme, {}).items():
        if scheme not in SOFTMAX or (f"native_{name}" in patient.trace and _is_gate(patient, name)):
            values = (patient.native(name) - low) / (high - low)
            for site, place in enumerate(patient.sites):
                yield from _group(f"{place} {name}", values[:, site])


def _group(label: str, values: np.ndarray) -> Groups:
    """Gates ``(token, ...)`` between 0 and 1 of one place, those that exist there."""
    flat = values.reshape(len(values), -1)
    known = flat[:, ~np.isnan(flat).all(0)]
    known = known[~np.isnan(known).any(1)]
    if known.size:
        yield label, np.minimum(known.max(0), (1 - known).max(0))


def _is_gate(patient: Patient, name: str) -> bool:
    """The scalar of open AttnRes may also be a free number: which it is, only the model says."""
    if patient.scheme[0] != "open_attnres" or name != "gate" or patient.native(name).ndim > 2:
        return True
    return patient.layout is not None and any(key.endswith("_res_gate_logit") for key in patient.layout.routing)


def _pool(patient: Patient) -> Groups:
    """A softmax over streams for each channel of the readout."""
    pool = patient.native("pool")
    for site, place in enumerate(patient.sites):
        known = pool[:, site][~np.isnan(pool[:, site]).any((1, 2))]
        if len(known):
            yield f"softmax {place} pool", (1 - known.max(1)).max(0)


def _tanh_of_reference(patient: Patient) -> Groups:
    """The dynamic part of the reference model's hyper-connections: (native - static) / scale, between -1 and 1."""
    patient.need_model()
    connection = patient.model.connection
    if not connection.dynamic:
        raise NotApplicable("these hyper-connections are static: no gate")
    for name, scale in (("pre", "alpha"), ("post", "beta"), ("mix", "alpha")):
        static, factor = (_array(getattr(connection, key)) for key in (name, f"scale_{scale}"))
        native = patient.native(name)
        for site, fixed in enumerate(static):
            fixed = fixed.T if name == "mix" else fixed
            yield from _tanh(f"{patient.sites[site]} tanh {name}", native[:, site], fixed, factor[site])


def _tanh_of_package(patient: Patient) -> Groups:
    """The same of modules of the hyper-connections package, which may also do without the tanh."""
    patient.need_model()
    from torch import nn

    for tap in patient.layout.taps:
        event = tap.event
        if event is None or event.what != "native" or event.name == "pool":
            continue
        module = patient.model.get_submodule(tap.path.removesuffix(".norm"))
        if not isinstance(module.act, nn.Tanh):
            continue
        alpha = _array(module.static_alpha)
        views = alpha.shape[1] - len(alpha)
        fixed = {"pre": alpha[:, :views].T, "mix": alpha[:, views:].T, "post": _array(module.static_beta).ravel()}
        factor = _array(module.dynamic_beta_scale if event.name == "post" else module.dynamic_alpha_scale)
        label = f"{patient.sites[event.index]} tanh {event.name}"
        yield from _tanh(label, patient.native(event.name)[:, event.index], fixed[event.name], factor)


def _tanh(label: str, native: np.ndarray, fixed: np.ndarray, factor: np.ndarray) -> Groups:
    """Of a scale of 0 nothing can be said."""
    return _group(label, ((native - fixed) / factor + 1) / 2) if factor else iter(())


def _static_sigmoids(patient: Patient) -> Groups:
    """The weight of a write, one per channel and the same for all tokens."""
    patient.need_model()
    for site, weight in patient.layout.connection.add.items():
        yield from _group(f"{patient.layout.anatomy.sites[site].name} gate", _array(weight)[None])


def _array(tensor: "Tensor") -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


COMPUTED: dict[tuple[str, str], Callable[[Patient], Groups]] = {
    ("reference", "hyper_connections"): _tanh_of_reference,
    ("hyper_connections_modules", "hyper_connections"): _tanh_of_package,
    ("muse_spark", "residual_gate"): _static_sigmoids,
}
"""(family, scheme): gates that natives do not show, computed with the model's parameters."""

"""Checks that run the model: routing that does nothing, that cannot learn, and sight of later tokens."""

from collections.abc import Iterator
from math import isfinite

from resinspect.checkup.patient import Patient
from resinspect.checkup.rows import NotApplicable, Row, listed


def without_effect(patient: Patient) -> Iterator[Row]:
    """Routing parameters that do not change the output: logits, or the last hidden state where there is no head.

    Each tensor is moved by seeded noise of 10 % of its root mean square (of 0.1 if it is all zero); if the output of up
    to 16 tokens stays the same, by 100 % on up to 4 prompts of 64; and if it stays the same then too, once more while
    all other routing parameters are moved. It is put back in any case. Threshold: no change at all beyond that between
    two runs of the unchanged model. Without effect even then: a finding, it is not applied. With an effect only then: a
    note, since another parameter is at zero, as at initialisation.
    """
    from resinspect.checkup.probes import effects

    found = effects(_routed(patient))
    tokens, limit = found.tokens, "no change at all"
    if not found.dead:
        evidence = f"each of {len(found.changes)} tensors changes the output, least {found.least[0]}"
        yield Row("ok", f"{evidence}: {found.least[1]:.2g} of its norm", "", found.least[1], tokens, limit)
    said = (
        (
            "finding",
            [name for name, revived in found.dead.items() if not revived],
            "even with all other routing parameters moved",
            "The model computes or stores these but does not use them: routing that seems to depend on them is not "
            "what it does.",
        ),
        (
            "note",
            [name for name, revived in found.dead.items() if revived],
            "but do once other routing parameters are moved",
            "At present these have no effect because another routing parameter is zero, as at initialisation.",
        ),
    )
    for severity, names, how, consequence in said:
        if names:
            yield Row(
                severity,
                f"{len(names)} of {len(found.changes)} tensors do not change the output of {tokens} tokens, {how}",
                listed(names, of=len(found.changes), what="routing tensors"),
                0.0,
                tokens,
                limit,
                consequence,
            )


def without_gradient(patient: Patient) -> Iterator[Row]:
    """Routing parameters whose gradient of the next-token loss is exactly zero, or not finite: one backward pass.

    Threshold: every entry exactly 0, or no path from the loss. If there is one once all routing parameters are moved by
    10 %, it is a note: another one is zero.
    """
    from resinspect.checkup.probes import gradients

    found = gradients(_routed(patient))
    tokens, count = found.tokens, len(found.norms)
    said = (
        ("finding", found.never, "zero", "Training with this loss cannot change these parameters."),
        (
            "note",
            found.revived,
            "zero, but not once all routing parameters are moved",
            "Another routing parameter is zero, as at initialisation; these learn once it has moved.",
        ),
        ("finding", found.broken, "not finite", "One step of training with this gradient destroys the parameters."),
    )
    for severity, names, how, consequence in said:
        if names:
            where = listed(names, of=count, what="routing tensors")
            evidence = f"gradient of {len(names)} of {count} tensors is {how}; loss over {tokens} tokens"
            yield Row(severity, evidence, where, 0.0, tokens, "every entry 0, or not finite", consequence)
    if not (found.never or found.revived or found.broken):
        name, norm = min(found.norms.items(), key=lambda item: item[1])
        evidence = f"norm of each of {count} gradients is above 0, least {norm:.2g} of {name}"
        yield Row("ok", f"{evidence}; loss over {tokens} tokens", "", norm, tokens, "every entry 0, or not finite")


def sees_the_future(patient: Patient) -> Iterator[Row]:
    """Attention to later tokens in a model that claims to be a decoder.

    The start of the longest prompt (16 tokens) runs with two other last tokens. Threshold: the logits of earlier tokens
    change by more than 1e-4, or 8 roundings in half precision. A model that claims to be no decoder gets a note.
    """
    patient.need_model()
    from resinspect.checkup.probes import future

    found = future(patient)
    if found is None:
        raise NotApplicable("it takes logits and a prompt of two tokens")
    if not isfinite(found.change):
        raise NotApplicable("the logits are not finite, so no change of them can be seen")
    evidence = f"earlier logits change by {found.change:.2g} when only the last of {found.tokens} tokens changes"
    limit = f"> {found.limit:.2g}"
    if found.change <= found.limit:
        yield Row("ok", evidence, "", found.change, found.tokens, limit)
    elif found.decoder:
        yield Row(
            "finding",
            evidence,
            f"{type(patient.model).__name__}",
            found.change,
            found.tokens,
            limit,
            "Its next-token loss is that of a model that has seen the answer; check its attention mask.",
        )
    else:
        consequence = "It does not claim to be a decoder; it has no next-token loss."
        yield Row("note", evidence, type(patient.model).__name__, found.change, found.tokens, limit, consequence)


def _routed(patient: Patient) -> Patient:
    patient.need_model()
    if not patient.layout.routing:
        raise NotApplicable("no parameter decides the routing here")
    return patient

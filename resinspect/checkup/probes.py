"""Runs of the model behind the checks: parameters moved and put back, and one backward pass."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from resinspect.checkup.patient import Patient
from resinspect.checkup.rows import NotApplicable
from resinspect.families import Event
from resinspect.families.forward import call, evaluating
from resinspect.families.wrapped import INSIDE
from resinspect.hooks.causality import change_of_earlier, claims_to_decode, is_causal, logits_of
from resinspect.hooks.taps import attached

SHORT, LONG, ROWS = 16, 64, 4
"""Tokens of the first look, and tokens and prompts of a second one."""
SMALL, LARGE = 0.1, 1.0
"""Noise in root mean squares of a tensor."""

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Effects:
    """What moving each routing tensor does to the output.

    Attributes:
        changes: Per tensor, the largest change in norms of the output of a token; 0: none.
        dead: Tensors without any, and whether there is one once all others are moved.
        tokens: On which that was seen.
    """

    changes: dict[str, float]
    dead: dict[str, bool]
    tokens: int

    @property
    def least(self) -> tuple[str, float]:
        """The tensor that changes least."""
        return min(self.changes.items(), key=lambda item: item[1])


@dataclass(frozen=True)
class Gradients:
    """Gradients of the loss by routing tensors: norms, and which are zero for good, for now, or not finite."""

    norms: dict[str, float]
    never: list[str]
    revived: list[str]
    broken: list[str]
    tokens: int


@dataclass(frozen=True)
class Future:
    """How much logits of earlier tokens change with the last token, and from where on that is no rounding."""

    change: float
    limit: float
    tokens: int
    decoder: bool


def effects(patient: Patient) -> Effects:
    """Move one routing tensor after the other; every one is put back."""
    model, ids, parameters = patient.model, _ids(patient), _parameters(patient)
    short = ids[:1, :SHORT]
    changes = {name: _change(model, short, {name: value}, SMALL) for name, value in parameters.items()}
    dead = {}
    for name in [name for name, change in changes.items() if change == 0]:
        alone = {name: parameters[name]}
        changes[name] = _change(model, ids, alone, LARGE)
        if changes[name] == 0:
            with moved({other: v for other, v in parameters.items() if other != name}, SMALL):
                dead[name] = _change(model, ids, alone, LARGE) > 0
    return Effects(changes, dead, ids.numel())


def gradients(patient: Patient) -> Gradients:
    """One backward pass, and for tensors without a gradient one more with all routing tensors moved."""
    ids, parameters = _ids(patient), _parameters(patient)
    if ids.shape[1] < 2:
        raise NotApplicable("a loss takes prompts of two tokens")
    if not is_causal(patient.model, ids.tolist(), ids.device):
        raise NotApplicable("no causal decoder, so there is no next-token loss")
    norms = _gradients(patient.model, ids, parameters)
    broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
    zero = [name for name, norm in norms.items() if norm == 0]
    revived = []
    if zero:
        with moved(parameters, SMALL):
            again = _gradients(patient.model, ids, parameters)
        revived = [name for name in zero if again[name] != 0]
    never = [name for name in zero if name not in revived]
    return Gradients(norms, never, revived, broken, ids.shape[0] * (ids.shape[1] - 1))


def sensitivity(patient: Patient, native: str, sites: list[int]) -> float:
    """Largest ``|d M / d parameter|`` of a native at some sites by any routing parameter, in one random direction of M.

    One backward pass over the mean of up to 16 tokens.
    """
    ids, parameters = _ids(patient)[:1, :SHORT], _parameters(patient)
    seen: list[Tensor] = []

    def receive(event: Event, value: Tensor) -> None:
        if (event.what, event.name) == ("native", native) and event.index in sites:
            seen.append(value)

    with _differentiable(patient.model, parameters), attached(patient.layout.taps, receive):
        call(patient.model, ids.clone(), use_cache=False, return_dict=True)
        generator = torch.Generator().manual_seed(0)
        signs = [torch.randn(value.shape, generator=generator).to(value) for value in seen]
        total = sum((value * sign).sum() for value, sign in zip(seen, signs, strict=True)) / ids.numel()
        if not isinstance(total, Tensor) or not total.requires_grad:
            return 0.0
        found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return max((float(grad.abs().max()) for grad in found if grad is not None), default=0.0)


def future(patient: Patient) -> Future | None:
    """What a later token does to logits of earlier ones; None if it cannot be told."""
    device = next((p.device for p in patient.model.parameters()), torch.device("cpu"))
    found = change_of_earlier(patient.model, patient.prompts, device)
    return None if found is None else Future(*found, decoder=claims_to_decode(patient.model))


@contextmanager
def moved(parameters: Mapping[str, Tensor], size: float) -> Iterator[None]:
    """Add seeded noise of so many root mean squares to tensors (or so much to zeros), and put them back bit by bit."""
    saved = {name: value.detach().clone() for name, value in parameters.items()}
    try:
        with torch.no_grad():
            for i, (name, value) in enumerate(parameters.items()):
                noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
                scale = float(saved[name].double().square().mean().sqrt()) or 1.0
                value.add_((size * scale * noise).to(value))
        yield
    finally:
        with torch.no_grad():
            for name, value in parameters.items():
                value.copy_(saved[name])


def _change(model: nn.Module, ids: Tensor, parameters: Parameters, size: float) -> float:
    """Largest change of a token's output over its norm; 0 within what two runs of the same model differ by."""
    base, again = _output(model, ids), _output(model, ids)
    if not bool(base.isfinite().all()):
        raise NotApplicable("the output is not finite, so no change of it can be seen")
    with moved(parameters, size):
        other = _output(model, ids)
    change, noise = ((value - base).norm(dim=-1) for value in (other, again))
    # What is NaN has changed.
    change = torch.where(change <= noise, 0.0, change).nan_to_num(nan=torch.inf)
    return float((change / base.norm(dim=-1)).max())


def _output(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits, or the last hidden state of a model without a head: ``(batch, token, ...)``."""
    with evaluating(model):
        output = call(model, ids, use_cache=False, return_dict=True)
    values = logits_of(output)
    values = getattr(output, "last_hidden_state", None) if values is None else values
    if values is None or values.shape[:2] != ids.shape:
        raise NotApplicable("the model gives neither logits nor a last hidden state")
    return values.double()


def _gradients(model: nn.Module, ids: Tensor, parameters: Parameters) -> dict[str, float]:
    with _differentiable(model, parameters):
        ids = ids.clone()  # one made in inference mode has no place in a backward pass
        logits = logits_of(call(model, ids, use_cache=False, return_dict=True))
        if logits is None or logits.shape[:2] != ids.shape:
            raise NotApplicable("the model gives no logits")
        loss = nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        if not loss.requires_grad:
            return dict.fromkeys(parameters, 0.0)
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    norms = [0.0 if grad is None else float(grad.double().norm()) for grad in found]
    return dict(zip(parameters, norms, strict=True))


@contextmanager
def _differentiable(model: nn.Module, parameters: Parameters) -> Iterator[None]:
    """Run with gradients by these parameters, also where they are frozen; their own flags are put back."""
    flags = {name: value.requires_grad for name, value in parameters.items()}
    try:
        with torch.inference_mode(False), evaluating(model), torch.enable_grad():
            for value in parameters.values():
                value.requires_grad_(True)
            yield
    finally:
        for name, value in parameters.items():
            value.requires_grad_(flags[name])


def _ids(patient: Patient) -> Tensor:
    """The longest prompts, cut to one length: ``(prompt, token)``."""
    longest = sorted(patient.prompts, key=len, reverse=True)[:ROWS]
    width = min(LONG, len(longest[-1])) if len(longest[-1]) > 1 else min(LONG, len(longest[0]))
    rows = [row[:width] for row in longest if len(row) >= width]
    device = next((p.device for p in patient.model.parameters()), torch.device("cpu"))
    return torch.tensor(rows, device=device)


def _parameters(patient: Patient) -> Parameters:
    """Routing tensors by the names that the family gives them, which know no wrappers."""
    own = {_bare(name): value for name, value in patient.model.named_parameters(remove_duplicate=False)}
    found = {name: own[name] for name in patient.layout.routing if name in own}
    usable = {name: value for name, value in found.items() if value.is_floating_point() and not value.is_inference()}
    if not usable:
        raise NotApplicable("no routing parameter of floating point is found in the model by its name")
    return usable


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in INSIDE)

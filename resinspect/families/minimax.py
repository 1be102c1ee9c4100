"""MiniMax: every norm is on the carry, which is then weighed against the write."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.families.stack import PRE_NORM, Stack, Sublayer, find_stack, parts_of, sequence_of
from resinspect.families.weighted import Weighted
from resinspect.program import TERM, Carrier, Native

FACTORS = {"attn": ("attn_alpha_factor", "attn_beta_factor"), "mlp": ("mlp_alpha_factor", "mlp_beta_factor")}


class NormedCarry(Weighted):
    """``n = norm(h)`` is both read and carried on: ``h' = alpha n + beta w``. The readout reads ``h`` itself.

    Exact given the observed statistics of the norms ("conditional").

    Args:
        keep: As in ``Weighted``: alpha.
        add: Beta.
        gain: Per site index, the weight of its norm, ``(d)``.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("rstd",) for kind in FACTORS}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"rstd": ()}

    def __init__(self, keep: Mapping[int, Tensor], add: Mapping[int, Tensor], gain: Mapping[int, Tensor]) -> None:
        super().__init__(keep, add)
        self.gain = {site: weight.detach() for site, weight in gain.items()}
        self.carrier = TERM

    def read(self, carrier: Carrier, state: Tensor, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Tensor]:
        """Norm the carry, then read it."""
        if site.kind != FINAL:
            gain = self.gain[site.index].to(state.device, state.dtype)
            state = carrier.normalise(state, native["rstd"], gain)
        return (state,), state


def recognise(model: nn.Module) -> Layout | None:
    """The layout of layers with alpha and beta factors for attention and MLP."""
    stack = find_stack(model, (*parts_of(PRE_NORM), *FACTORS["attn"], *FACTORS["mlp"]))
    if stack is None or not all(_is_rms_norm(layer) for layer in stack.layers):
        return None
    anatomy = sequence_of(stack, PRE_NORM)
    sites = anatomy.sites[:-1]
    factors = {
        site.index: [_number(getattr(stack.layers[site.layer], name)) for name in FACTORS[site.kind]] for site in sites
    }
    norms = {site.index: stack.inside(site.layer, _part(site).read) for site in sites}
    return Layout(
        family="minimax",
        scheme="normed_carry",
        anatomy=anatomy,
        taps=tuple(_taps(stack, anatomy)),
        connection=NormedCarry(
            keep={site: alpha for site, (alpha, _) in factors.items()},
            add={site: beta for site, (_, beta) in factors.items()},
            gain={site: model.get_submodule(path).weight for site, path in norms.items()},
        ),
        write_definition="output of the attention and MLP modules, before its factor",
        source_definition="source 0 is what enters the first layer",
        rounds_to=torch.float32,
        routing=tuple(f"{path}.weight" for path in norms.values()),
    )


def _is_rms_norm(layer: nn.Module) -> bool:
    norms = [getattr(layer, part.read) for part in PRE_NORM]
    return all(hasattr(norm, "variance_epsilon") and getattr(norm, "bias", None) is None for norm in norms)


def _part(site: Site) -> Sublayer:
    return next(part for part in PRE_NORM if part.kind == site.kind)


def _taps(stack: Stack, anatomy: Anatomy) -> Iterator[Tap]:
    for site in anatomy.sites:
        (reader,) = anatomy.readers_of(site)
        if site.kind == FINAL:
            yield stack.tap(stack.under("norm"), "input", Event("reader", reader))
            continue
        norm, write = (stack.inside(site.layer, name) for name in _part(site)[1:])
        module = stack.model.get_submodule(norm)
        if site.index == 0:
            yield stack.tap(norm, "input", Event("source", 0))
        yield stack.tap(norm, "input", Event("native", site.index, "rstd"), partial(_rstd, module))
        yield replace(stack.tap(norm, "output", Event("reader", reader)), carried=True)
        yield stack.tap(write, "output", Event("source", *anatomy.sources_of(site)))


def _rstd(norm: nn.Module, seen: Seen) -> Tensor:
    """``(batch, token)``, in float32 as the norm itself computes it."""
    mean_square = seen.args[0].to(torch.float32).square().mean(-1)
    return torch.rsqrt(mean_square + norm.variance_epsilon)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)

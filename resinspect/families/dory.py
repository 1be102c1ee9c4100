"""Dory: the carry is put back on the unit sphere before every sublayer (nGPT), and the middle layers run in a loop."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.families.stack import SANDWICH, Stack, Sublayer, find_stack, parts_of
from resinspect.families.weighted import weigh
from resinspect.program import TERM, Carrier, Connection, Native

RATES = {"attn": "lambda_1", "mlp": "lambda_2"}
LOOP = ("n_input_layers", "n_recurrent_layers", "n_output_layers", "n_recurrent_loops")
State = tuple[Tensor, Tensor | None]


class Sphere(Connection):
    """``x = h / |h|`` is both read and carried on: ``h' = x + rate (v - x)``, with a static rate per channel.

    Each pass of the loop starts from ``h / |h| + e``, where e is what entered the loop, also of length 1. Exact given
    the observed lengths ("conditional"). The readout reads h itself.

    Args:
        rates: Per site kind and layer, the rate ``(d)``.
        loop: The first layer of the loop.
    """

    carrier = TERM
    natives: ClassVar[dict[str, tuple[str, ...]]] = {"attn": ("rstd", "entry"), "mlp": ("rstd",)}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"rstd": (), "entry": ()}

    def __init__(self, rates: dict[tuple[str, int], Tensor], loop: int) -> None:
        super().__init__()
        self.rates, self.loop = rates, loop

    def start(self, carrier: Carrier, embedding: Tensor) -> State:
        """The carry, and what entered the loop."""
        return embedding, None

    def read(self, carrier: Carrier, state: State, site: Site, native: Native) -> tuple[tuple[Tensor, ...], State]:
        """Start a pass of the loop where there is one, put the carry on the sphere, read it."""
        carry, entered = state
        if site.kind == FINAL:
            return (carry,), state
        if "entry" in native:
            carry = carrier.scale(native["entry"], carry)
            entered = carry if entered is None else entered
            carry = carry + entered
        carry = carrier.scale(native["rstd"], carry)
        return (carry,), (carry, entered)

    def write(self, carrier: Carrier, state: State, site: Site, native: Native, *values: Tensor) -> State:
        """Go from the carry towards the write."""
        carry, entered = state
        towards = carrier.combine(carry.new_tensor([1.0, -1.0]), (*values, carry))
        return carry + weigh(carrier, self.rates[site.kind, site.layer], towards), entered


def recognise(model: nn.Module) -> Layout | None:
    """The layout of sandwich layers with two rates of interpolation, in a trunk that says which of them loop."""
    stack = find_stack(model, (*parts_of(SANDWICH), *RATES.values(), "lambda_scale"), ("norm", "config"))
    config = model.get_submodule(stack.trunk).config if stack else None
    if stack is None or not all(getattr(config, name, 0) >= 0 and hasattr(config, name) for name in LOOP):
        return None
    if config.n_recurrent_layers == 0 or next(stack.layers[0].input_layernorm.parameters(), None) is not None:
        return None
    anatomy = _anatomy(*(getattr(config, name) for name in LOOP))
    rates = {
        (kind, i): (getattr(layer, name).detach() * layer.lambda_scale).abs()
        for i, layer in enumerate(stack.layers)
        for kind, name in RATES.items()
    }
    return Layout(
        family="dory",
        scheme="unit_sphere",
        anatomy=anatomy,
        taps=tuple(_taps(stack, anatomy, config.n_input_layers)),
        connection=Sphere(rates, config.n_input_layers),
        write_definition="output of the norm after attention and after the MLP, of length 1",
        source_definition="source 0 is what enters the first layer",
        rounds_to=torch.float32,
        routing=tuple(stack.inside(i, name) for i in range(len(stack.layers)) for name in RATES.values()),
    )


def _anatomy(before: int, looped: int, after: int, passes: int) -> Anatomy:
    loop = [(before + i, call) for call in range(passes) for i in range(looped)]
    order = [*((i, 0) for i in range(before)), *loop, *((before + looped + i, 0) for i in range(after))]
    sites = [Site(0, layer, kind, writes=(kind,), call=call) for layer, call in order for kind in RATES]
    return anatomy_of([*sites, Site(0, -1, FINAL)])


def _taps(stack: Stack, anatomy: Anatomy, loop: int) -> Iterator[Tap]:
    parts: dict[str, Sublayer] = {part.kind: part for part in SANDWICH}
    shared = stack.under("norm")
    passes = 1 + max(site.call for site in anatomy.sites)
    for site in anatomy.sites:
        (reader,) = anatomy.readers_of(site)
        if site.kind == FINAL:
            # The norm of the readout is also that of the loop: once for what enters it, once for every pass.
            yield stack.tap(shared, "input", Event("reader", reader), call=passes + 1)
            continue
        if site.kind == "attn" and site.layer == loop:
            entry = partial(_rstd, stack.model.get_submodule(shared))
            yield stack.tap(shared, "input", Event("native", site.index, "entry"), entry, call=site.call + 1)
        norm, write = (stack.inside(site.layer, name) for name in parts[site.kind][1:])
        if site.index == 0:
            yield stack.tap(norm, "input", Event("source", 0))
        rstd = partial(_rstd, stack.model.get_submodule(norm))
        yield stack.tap(norm, "input", Event("native", site.index, "rstd"), rstd, call=site.call)
        yield replace(stack.tap(norm, "output", Event("reader", reader), call=site.call), carried=True)
        yield stack.tap(write, "output", Event("source", *anatomy.sources_of(site)), call=site.call)


def _rstd(norm: nn.Module, seen: Seen) -> Tensor:
    """One over the length ``(batch, token)``, in float32 as the norm itself computes it."""
    return torch.rsqrt(seen.args[0].to(torch.float32).square().sum(-1) + norm.eps)

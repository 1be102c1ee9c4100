"""HRM-Text: two stacks of plain layers that run in turn, each on the sum of a low and a high state."""

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.families.stack import PRE_NORM, Stack, find_stacks, parts_of
from resinspect.program import Carrier, Connection, Native

LOW, HIGH = "L_module", "H_module"
CYCLES = ("H_cycles", "L_cycles")
State = tuple[Tensor | None, Tensor | None, Tensor]


class TwoStates(Connection):
    """A run of a stack starts from ``low + high`` and ends as ``low`` or ``high``, divided by its root mean square.

    Layers of the low stack come first, then those of the high stack. The last run is read before it is normed.

    Args:
        layers: Layers in each stack.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {"mlp": ("rstd",)}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"rstd": ()}

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def start(self, carrier: Carrier, embedding: Tensor) -> State:
        """The carry of the run, the low state, which the first site writes, and the high state: the embedding."""
        return None, None, embedding

    def read(self, carrier: Carrier, state: State, site: Site, native: Native) -> tuple[tuple[Tensor, ...], State]:
        """The carry, which at the first sublayer of a stack is the sum of both states."""
        carry, low, high = state
        if not site.views:
            return (), state
        if site.kind == "attn" and site.layer % self.layers == 0:
            carry = low + high
        return (carry,), (carry, low, high)

    def write(self, carrier: Carrier, state: State, site: Site, native: Native, *values: Tensor) -> State:
        """Add to the carry; after the last sublayer of a stack, norm it into that stack's state."""
        carry, low, high = state
        (value,) = values
        if not site.views:
            return None, value, high
        carry = carry + value
        if "rstd" not in native:
            return carry, low, high
        done = carrier.scale(native["rstd"], carry)
        return (None, done, high) if site.layer < self.layers else (None, low, done)


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a module with a low and a high stack of plain layers, both with a norm without parameters."""
    stacks = find_stacks(model, parts_of(PRE_NORM), ("final_norm",))
    stack = stacks[0] if len(stacks) == 2 else None
    if stack is None or not stack.path.endswith(f"{LOW}.layers"):
        return None
    trunk_path = stack.trunk.removesuffix(LOW).rstrip(".")
    trunk = model.get_submodule(trunk_path)
    config = getattr(trunk, "config", None)
    if not hasattr(trunk, "z_L_init") or not all(hasattr(config, name) for name in CYCLES):
        return None
    modules = getattr(trunk, LOW), getattr(trunk, HIGH, None)
    if not all(_is_bare_stack(module, len(stack.layers)) for module in modules):
        return None
    anatomy = _anatomy(len(stack.layers), *(getattr(config, name) for name in CYCLES))
    return Layout(
        family="hrm_text",
        scheme="two_states",
        anatomy=anatomy,
        taps=tuple(_taps(Stack(model, trunk_path, trunk_path, stack.layers), anatomy)),
        connection=TwoStates(len(stack.layers)),
        rounds_to=torch.float32,
        write_definition=f"output of the attention and MLP modules; layers from {len(stack.layers)} on are those of "
        f"{HIGH}; z_L_init is the low state before the first run",
        source_definition="source 0 is the scaled token embedding",
    )


def _is_bare_stack(module: nn.Module | None, layers: int) -> bool:
    norm = getattr(module, "final_norm", None)
    return norm is not None and next(norm.parameters(), None) is None and len(module.layers) == layers


def _anatomy(layers: int, high_cycles: int, low_cycles: int) -> Anatomy:
    runs = []
    for high in range(high_cycles):
        runs += [(0, high * low_cycles + low) for low in range(low_cycles)]
        runs.append((layers, high))
    sites = [
        Site(0, first + i, part.kind, writes=(part.kind,), call=call)
        for first, call in runs
        for i in range(layers)
        for part in PRE_NORM
    ]
    return anatomy_of([Site(0, -1, "start", views=(), writes=("z_L_init",)), *sites, Site(0, -1, FINAL)])


def _taps(trunk: Stack, anatomy: Anatomy) -> Iterator[Tap]:
    layers, parts = len(trunk.layers), {part.kind: part for part in PRE_NORM}
    module = trunk.model.get_submodule(trunk.trunk)
    embed = trunk.under("embed_tokens")
    yield trunk.tap(embed, "output", Event("source", 0), lambda seen: seen.output * module.embedding_scale)
    yield trunk.tap(embed, "output", Event("source", 1), lambda seen: _expanded(module.z_L_init, seen.output))
    for site in anatomy.sites[1:-1]:
        (reader,), name = anatomy.readers_of(site), LOW if site.layer < layers else HIGH
        read, write = (trunk.under(f"{name}.layers.{site.layer % layers}.{part}") for part in parts[site.kind][1:])
        yield trunk.tap(read, "input", Event("reader", reader), call=site.call)
        yield trunk.tap(write, "output", Event("source", *anatomy.sources_of(site)), call=site.call)
        if site.kind == "mlp" and site.layer % layers == layers - 1:
            norm = trunk.under(f"{name}.final_norm")
            rstd = partial(_rstd, trunk.model.get_submodule(norm))
            last = site.index == len(anatomy.sites) - 2
            (final,) = anatomy.readers_of(anatomy.sites[-1])
            # The last run is read before its norm: that is the final readout.
            event = Event("reader", final) if last else Event("native", site.index, "rstd")
            yield trunk.tap(norm, "input", event, None if last else rstd, call=site.call)


def _expanded(vector: Tensor, like: Tensor) -> Tensor:
    return vector.to(like.dtype).expand_as(like)


def _rstd(norm: nn.Module, seen: Seen) -> Tensor:
    """``(batch, token)``, in float32 as the norm itself computes it."""
    return torch.rsqrt(seen.args[0].to(torch.float32).square().mean(-1) + norm.eps)

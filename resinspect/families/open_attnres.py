"""Open attention residuals on Qwen3: depth attention over hidden states, unrolled to writes.

The states that a read attends to are sums of writes, so a write's weight is the sum of the weights of all states that
hold it. The layout is that of public checkpoints: ``{attn,mlp}_res_{proj,norm,bias}`` in every layer, perhaps gates.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, decoder_anatomy
from resinspect.errors import CaptureError
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.models.open_attnres import MODES, SUBLAYERS, depth_weights, keeps, scalar_gate
from resinspect.program import COEFFICIENT, TERM, Carrier, Connection, Native

Pick = Callable[[Seen], Tensor]
States = tuple[tuple[Tensor, ...], Tensor]

NORMS = {"attn": "input_layernorm", "mlp": "post_attention_layernorm"}
WRITES = {"attn": "self_attn", "mlp": "mlp"}
PARTS = ("res_proj.weight", "res_norm.weight", "res_bias")
OPTIONS = ("res_gate_logit", "res_alpha", "res_gate_proj.weight", "res_gate_proj.bias")


class StateAttention(Connection):
    """A plain residual, read as ``(1 - g) h + g sum_j alpha_j h_j`` over earlier states and the current one.

    Args:
        keeps: Whether the state after a layer's sublayer stays visible to later reads.
        per_channel: Whether ``g`` has channels; it is 1 where there is no gate.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {kind: ("alpha", "gate") for kind in SUBLAYERS}

    def __init__(self, keeps: Callable[[int, str], bool], *, per_channel: bool) -> None:
        super().__init__()
        self.keeps, self.per_channel = keeps, per_channel
        self.carrier = TERM if per_channel else COEFFICIENT
        self.native_dims = {"alpha": ("slot",), "gate": ("hidden",) if per_channel else ()}

    def start(self, carrier: Carrier, embedding: Tensor) -> States:
        """The embedding is the first state kept, and the current one."""
        return (embedding,), embedding

    def read(self, carrier: Carrier, state: States, site: Site, native: Native) -> tuple[tuple[Tensor, ...], States]:
        """Depth attention, perhaps gated; the readout reads the current state itself."""
        kept, current = state
        if site.kind == FINAL:
            return (current,), state
        mixed = carrier.combine(native["alpha"], (*kept, current))
        if "gate" not in native:
            return (mixed,), state
        gate = native["gate"]
        weigh = carrier.channels if self.per_channel else carrier.scale
        return (weigh(1 - gate, current) + weigh(gate, mixed),), state

    def write(self, carrier: Carrier, state: States, site: Site, native: Native, *values: Tensor) -> States:
        """Add up; keep the state where the model does."""
        kept, current = state
        current = sum(values, current)
        return ((*kept, current) if self.keeps(site.layer, site.kind) else kept), current


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a Qwen3 decoder with depth attention over states."""
    for path, trunk in model.named_modules():
        layers = getattr(trunk, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) and _is_trunk(trunk):
            prefix = f"{path}." if path else ""
            anatomy = decoder_anatomy(len(layers))
            return Layout(
                family="open_attnres",
                scheme=f"state_attention_{trunk.config.attnres_mode}",
                anatomy=anatomy,
                taps=tuple(_taps(prefix, trunk, anatomy)),
                connection=StateAttention(
                    partial(keeps, trunk.config), per_channel=hasattr(layers[0], "attn_res_gate_proj")
                ),
                write_definition="output of the attention and MLP modules; the model itself attends over states, "
                "which are sums of these",
                source_definition="source 0 is the token embedding, which is also the first state",
                routing=tuple(prefix + name for name, _ in trunk.named_parameters() if "_res_" in name),
            )
    return None


def _is_trunk(trunk: nn.Module) -> bool:
    """Exactly the known parts: a final readout of its own or further routing would be another scheme.

    Raises:
        CaptureError: If these parts are there, but not how they work: the weights alone do not say it.
    """
    names = {name for name, _ in trunk.named_parameters() if "res_" in name and not name.startswith("layers.")}
    if names or not hasattr(trunk, "norm") or not all(_is_layer(layer) for layer in trunk.layers):
        return False
    config = getattr(trunk, "config", None)
    mode, blocks = (getattr(config, f"attnres_{name}", None) for name in ("mode", "num_blocks"))
    if mode not in MODES:
        raise CaptureError(
            f"the layers of {type(trunk).__name__} attend over depth, but its config.attnres_mode is {mode!r} and "
            f"only {' and '.join(MODES)} are known here; name its sublayers, or correct the mode."
        )
    if mode == "block" and not isinstance(blocks, int):
        raise CaptureError(
            f"the layers of {type(trunk).__name__} attend over blocks, but config.attnres_num_blocks is {blocks!r}; "
            "give their number there."
        )
    return True


def _is_layer(layer: nn.Module) -> bool:
    routing = {name for name, _ in layer.named_parameters() if "_res_" in name or "null_source" in name}
    needed = {f"{kind}_{part}" for kind in SUBLAYERS for part in PARTS}
    allowed = needed | {f"{kind}_{part}" for kind in SUBLAYERS for part in OPTIONS}
    children = all(hasattr(layer, name) for name in (*NORMS.values(), *WRITES.values()))
    return children and needed <= routing <= allowed and layer.attn_res_proj.weight.shape[0] == 1


def _taps(prefix: str, trunk: nn.Module, anatomy: Anatomy) -> Iterator[Tap]:
    for site in anatomy.sites:
        (reader,) = anatomy.readers_of(site)
        if site.kind == FINAL:
            yield Tap(f"{prefix}norm", trunk.norm, "input", Event("reader", reader))
            continue
        layer = trunk.layers[site.layer]
        events = [(WRITES[site.kind], "output", Event("source", *anatomy.sources_of(site)), None)]
        for name, side, event, pick in (*_reads(layer, site, reader), *events):
            yield Tap(f"{prefix}layers.{site.layer}.{name}", layer.get_submodule(name), side, event, pick)


def _reads(layer: nn.Module, site: Site, reader: int) -> Iterator[tuple[str, Any, Event, Pick | None]]:
    """Module, side, event and pick of everything up to a sublayer's input."""
    norm, gate = f"{site.kind}_res_norm", f"{site.kind}_res_gate_proj"
    if site.index == 0:
        yield norm, "input", Event("source", 0), lambda seen: seen.args[0][-1]
    yield norm, "output", Event("native", site.index, "alpha"), _alpha(layer, site.kind)
    if hasattr(layer, gate):
        yield gate, "output", Event("native", site.index, "gate"), lambda seen: seen.output.sigmoid()
    elif scalar_gate(layer, site.kind) is not None:
        yield norm, "output", Event("native", site.index, "gate"), _gate(layer, site.kind)
    yield NORMS[site.kind], "input", Event("reader", reader), None


def _alpha(layer: nn.Module, name: str) -> Pick:
    """``alpha (batch, token, state)`` from the normed states, which come with the states first."""
    return lambda seen: depth_weights(layer, name, seen.output).movedim(0, -1)


def _gate(layer: nn.Module, name: str) -> Pick:
    return lambda seen: scalar_gate(layer, name).expand(seen.output.shape[1:3])

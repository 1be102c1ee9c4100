"""A user's own model around the modules of the ``hyper-connections`` package: streams folded into the batch.

Its ``HyperConnections``, ``mHC`` and the ``mHC`` of ``mHCv2`` all pass what they read through ``merge_fracs`` and what
they add through ``split_fracs``, with a branch inside or without, so both are seen there whoever calls the branch. The
weights are locals; they are computed once more from a call of ``norm``, whose input are the unfolded streams.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.errors import CaptureError
from resinspect.families.layout import Event, Layout, Seen, Tap, put_argument, put_item
from resinspect.models.connections.hyper_connections import Streams
from resinspect.program import COEFFICIENT, TERM, Carrier, Native

Pick = Callable[[Seen], Tensor]

EMBEDDED = "stream_embed"
WEIGHTS = ("static_alpha", "dynamic_alpha_fn", "static_beta", "dynamic_beta_fn")
SCALES = (("dynamic_alpha_scale", "dynamic_beta_scale"), ("pre_branch_scale", "residual_scale", "h_post_scale"))
PARTS = ("norm", "split_fracs", "merge_fracs")
KINDS = {"attn": ("att",), "mlp": ("mlp", "ff", "feed")}


class FoldedStreams(Streams):
    """As ``Streams``, with several inputs per site, an embedding for each stream, and a readout of several kinds.

    Args:
        streams: Number of streams n.
        kinds: Of the sites that have weights.
        share: Weight of each stream in the readout: 1 for their sum.
        pooled: Whether the readout has a weight ``pool`` for each stream and channel instead.
    """

    native_dims: ClassVar[dict[str, tuple[str, ...]]] = Streams.native_dims | {
        "pre": ("view", "stream"),
        "pool": ("stream", "hidden"),
    }

    def __init__(self, streams: int, kinds: Sequence[str], *, share: float = 1.0, pooled: bool = False) -> None:
        super().__init__()
        self.streams, self.share = streams, share
        self.carrier = TERM if pooled else COEFFICIENT
        self.natives = dict.fromkeys(kinds, ("pre", "post", "mix")) | ({FINAL: ("pool",)} if pooled else {})

    def read(self, carrier: Carrier, state: Tensor, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Tensor]:
        """Weighted sums of streams; at the readout their sum, mean or pool."""
        stream = -carrier.features - 1
        if "pool" in native:
            weights = native["pool"].unbind(-2)
            pooled = (carrier.channels(w, x) for w, x in zip(weights, state.unbind(stream), strict=True))
            return (sum(pooled),), state
        if site.kind == FINAL:
            return (carrier.scale(state.new_tensor(self.share), carrier.collapse(state)),), state
        if not site.views:
            return (), state
        return carrier.mix(native["pre"], state).unbind(stream), state

    def write(self, carrier: Carrier, state: Tensor, site: Site, native: Native, *values: Tensor) -> Tensor:
        """Mix the streams and add the write to each; an embedding of streams adds one value to each."""
        if site.kind == EMBEDDED:
            each = torch.eye(self.streams, dtype=values[0].dtype, device=values[0].device)
            return state + sum(carrier.outer(one, value) for one, value in zip(each, values, strict=True))
        return super().write(carrier, state, site, native, *values)


@dataclass(frozen=True)
class Hyper:
    """One module that reads from the streams and adds to them, and how many inputs it reads."""

    path: str
    module: nn.Module
    views: int


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a model with hyper-connections of the package.

    Raises:
        CaptureError: If it has them in a form whose map is not known, in one sentence.
    """
    found = [_hyper(path, module) for path, module in model.named_modules() if _is_hyper(module)]
    if not found:
        return None
    hypers = sorted(found, key=_order)
    streams = {hyper.module.num_residual_streams for hyper in hypers}
    if len(streams) > 1:
        raise CaptureError(f"the model's hyper-connections have {sorted(streams)} streams; only one number is known.")
    (count,) = streams
    embed = _one(model, _is_stream_embed, "embeddings of streams")
    reduce = _one(model, _is_reduce, "modules that add up the streams")
    final, module = reduce or _last_norm(model)
    pooled = hasattr(module, "to_attn_logits")
    anatomy = _anatomy(hypers, count if embed else 0)
    kinds = tuple({site.kind for site in anatomy.sites if site.views and site.kind != FINAL})
    share = 1 / count if str(getattr(module, "reduction", "")) == "mean" else 1.0
    return Layout(
        family="hyper_connections_modules",
        scheme="mhc" if hasattr(hypers[0].module, "residual_scale") else "hyper_connections",
        anatomy=anatomy,
        taps=tuple(_taps(anatomy, hypers, embed, (final, module), at_input=reduce is None)),
        connection=FoldedStreams(count, kinds, share=share, pooled=pooled),
        write_definition="what each hyper-connection adds: the output of its branch",
        source_definition="source 0 is what enters the streams, the same in each",
        rounds_to=torch.float32,
        routing=tuple(_routing(hypers, embed, (final, module) if pooled else None)),
    )


def _is_hyper(module: nn.Module) -> bool:
    """Weights that depend on the token beside static ones, for streams and for what a branch adds."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    scaled = any(own >= {*scales} for scales in SCALES) or own >= {SCALES[0][0]} or own >= {*SCALES[1][:2]}
    return (
        own >= {*WEIGHTS[:2]}
        and scaled
        and isinstance(getattr(module, "num_residual_streams", None), int)
        and all(isinstance(getattr(module, part, None), nn.Module) for part in PARTS)
        and getattr(module.norm, "gamma", None) is not None
    )


def _hyper(path: str, module: nn.Module) -> Hyper:
    refused = {
        "split channels into fractions (num_fracs)": getattr(module, "num_fracs", 1) != 1,
        "hold channels before tokens (channel_first)": getattr(module, "channel_first", False),
        "add nothing back (add_branch_out_to_residual)": getattr(module, "static_beta", None) is None,
    }
    if reasons := [reason for reason, applies in refused.items() if applies]:
        raise CaptureError(
            f"{path!r} has hyper-connections that {reasons[0]}, whose map is not known; use them without, or name the "
            'sublayers yourself (method="solve").'
        )
    return Hyper(path, module, module.static_alpha.shape[1] - module.num_residual_streams)


def _order(hyper: Hyper) -> tuple[int, ...]:
    """Layers first, so that two lists side by side, of attention and of MLP, run alternately."""
    return tuple(map(int, re.findall(r"\b\d+\b", hyper.path)))


def _one(model: nn.Module, matches: Callable[[nn.Module], bool], what: str) -> tuple[str, nn.Module] | None:
    found = [(path, module) for path, module in model.named_modules() if matches(module)]
    if len(found) > 1:
        raise CaptureError(f"the model has {len(found)} {what} ({', '.join(p for p, _ in found)}); only one is known.")
    return found[0] if found else None


def _is_stream_embed(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("stream_embed"), nn.Parameter) and hasattr(module, "expand_to_streams")


def _is_reduce(module: nn.Module) -> bool:
    """A sum, a mean or an attention pool over streams."""
    if [name for name, _ in module.named_parameters()] == ["to_attn_logits.weight"]:
        return True
    before, arrow, after = str(getattr(module, "pattern", "")).replace("(", " ").replace(")", " ").partition("->")
    summed = str(getattr(module, "reduction", "")) in ("sum", "mean")
    return summed and bool(arrow) and set(before.split()) - set(after.split()) == {"s"}


def _last_norm(model: nn.Module) -> tuple[str, nn.Module]:
    """Without a module that adds up the streams: the norm outside of all layers, which is taken to read their sum."""
    norms = [
        (path, module)
        for path, module in model.named_modules()
        if [p.ndim for p in module.parameters()] in ([1], [1, 1]) and not re.search(r"\b\d+\b", path)
    ]
    if len(norms) != 1:
        raise CaptureError(
            "the model's hyper-connections are known, but not what adds up its streams at the end; hold the function "
            "that the package returns for it as a module of the model."
        )
    return norms[0]


def _anatomy(hypers: Sequence[Hyper], embedded: int) -> Anatomy:
    names = [_name(hyper) for hyper in hypers]
    sites = []
    if embedded:
        sites.append(Site(0, -1, EMBEDDED, (), tuple(f"{EMBEDDED}_{i}" for i in range(embedded))))
    for hyper, (layer, kind) in zip(hypers, names, strict=True):
        if names.count((layer, kind)) > 1:
            kind = hyper.path.replace(".", "_")
        views = ("",) if hyper.views == 1 else tuple(f"view{i}" for i in range(hyper.views))
        sites.append(Site(0, layer, kind, views, (kind,)))
    return anatomy_of([*sites, Site(0, -1, FINAL)])


def _name(hyper: Hyper) -> tuple[int, str]:
    """Layer, the first number of its path, and kind: from its name in the layer, that of its list, or its branch."""
    before, number, rest = re.match(r"(\D*)(\d*)(.*)", hyper.path).groups()
    own = [word for word in (rest if number else before).split(".") if word and not word.isdigit()]
    held = [word for word in before.split(".") if word]
    word = (own or held)[-1]
    words = f"{word} {type(getattr(hyper.module, 'branch', None)).__name__}".lower()
    kind = next((kind for kind, parts in KINDS.items() if any(part in words for part in parts)), word)
    return int(number or -1), kind


def _taps(
    anatomy: Anatomy,
    hypers: Sequence[Hyper],
    embed: tuple[str, nn.Module] | None,
    final: tuple[str, nn.Module],
    *,
    at_input: bool,
) -> Iterator[Tap]:
    sites = iter(anatomy.sites)
    if embed:
        path, module = embed
        yield Tap(path, module, "input", Event("source", 0))
        for stream, source in enumerate(anatomy.sources_of(next(sites))):
            yield Tap(path, module, "output", Event("source", source), _embedded(module, stream))
    else:
        path, module = f"{hypers[0].path}.norm", hypers[0].module.norm
        yield Tap(path, module, "output", Event("source", 0), lambda seen: _unfolded(seen.args[0])[:, :, 0])
    for hyper, site in zip(hypers, sites, strict=False):
        yield from _site_taps(anatomy, hyper, site)
    site, (path, module) = anatomy.sites[-1], final
    if hasattr(module, "to_attn_logits"):
        pool = Event("native", site.index, "pool")
        yield Tap(f"{path}.to_attn_logits", module.to_attn_logits, "output", pool, lambda seen: seen.output.softmax(-2))
    yield Tap(path, module, "input" if at_input else "output", Event("reader", *anatomy.readers_of(site)))


def _site_taps(anatomy: Anatomy, hyper: Hyper, site: Site) -> Iterator[Tap]:
    module, path = hyper.module, hyper.path
    for name, pick in (("pre", _pre), ("mix", _mix), ("post", _post)):
        event = Event("native", site.index, name)
        yield Tap(f"{path}.norm", module.norm, "output", event, lambda seen, pick=pick: pick(module, seen, hyper.views))
    for view, reader in enumerate(anatomy.readers_of(site)):
        event = Event("reader", reader)
        if hyper.views == 1:
            yield Tap(f"{path}.merge_fracs", module.merge_fracs, "output", event)
        else:
            pick, put = (lambda seen, view=view: seen.output[view]), put_item(view)
            yield Tap(f"{path}.merge_fracs", module.merge_fracs, "output", event, pick, put=put)
    # The branch's output passes split_fracs after the streams and, but in mHCv2, the weights; then merge_fracs again.
    written = 1 if module.static_beta.ndim == 3 else 2
    event = Event("source", *anatomy.sources_of(site))
    yield Tap(f"{path}.split_fracs", module.split_fracs, "input", event, call=written, put=put_argument)
    yield Tap(f"{path}.merge_fracs", module.merge_fracs, "output", None, call=1)


def _unfolded(streams: Tensor) -> Tensor:
    """``(batch, token, n, d)`` of what the module's norm sees, which has a dimension of one fraction as well."""
    return streams.flatten(2, 3)


def _embedded(module: nn.Module, stream: int) -> Pick:
    return lambda seen: module.stream_embed[stream].expand(*seen.args[0].shape[:2], -1)


def _alpha(module: nn.Module, seen: Seen, views: int) -> tuple[Tensor, Tensor]:
    """Weights from each stream to the inputs ``(batch, token, n, views)`` and to the new streams ``(..., n, n)``."""
    normed = _unfolded(seen.output)
    if hasattr(module, "dynamic_alpha_scale"):
        dynamic = module.act(normed @ module.dynamic_alpha_fn) * module.dynamic_alpha_scale
        alpha = dynamic + module.static_alpha
        return alpha[..., :views], alpha[..., views:]
    proposals = torch.stack([normed.float() @ matrix for matrix in module.dynamic_alpha_fn.float()])
    static = module.static_alpha.float()
    pre = proposals[..., :views] * module.pre_branch_scale.float() + static[:, :views]
    mixed = proposals[..., views:] * module.residual_scale.float() + static[:, views:]
    return pre.sigmoid().mean(0), module.residual_mix_constraint_fn(mixed).mean(0)


def _pre(module: nn.Module, seen: Seen, views: int) -> Tensor:
    return _alpha(module, seen, views)[0].mT


def _mix(module: nn.Module, seen: Seen, views: int) -> Tensor:
    """In the convention ``X' = mix X``."""
    return _alpha(module, seen, views)[1].mT


def _post(module: nn.Module, seen: Seen, views: int) -> Tensor:
    normed, weight, static = _unfolded(seen.output), module.dynamic_beta_fn.flatten(), module.static_beta.flatten()
    if hasattr(module, "dynamic_beta_scale"):
        return module.act(normed @ weight) * module.dynamic_beta_scale + static
    dynamic = normed.float() @ weight.float() * module.h_post_scale.float()
    return (2 * (dynamic + static.float()).sigmoid()).to(seen.args[0].dtype)


def _routing(
    hypers: Sequence[Hyper], embed: tuple[str, nn.Module] | None, pool: tuple[str, nn.Module] | None
) -> Iterator[str]:
    for hyper in hypers:
        yield from (f"{hyper.path}.{name}" for name, _ in hyper.module.named_parameters(recurse=False))
        yield from (f"{hyper.path}.norm.{name}" for name, _ in hyper.module.norm.named_parameters())
    for path, module in filter(None, (embed, pool)):
        yield from (f"{path}.{name}" for name, _ in module.named_parameters())

"""From a residual that was followed to a layout: sites, taps and program."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.families.generic.carry import Carry
from resinspect.families.generic.names import reader_name, unique, write_names
from resinspect.families.generic.norms import Norm
from resinspect.families.generic.probe import Call
from resinspect.families.generic.residual import Residual, Step, Write
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.program import Connection


@dataclass(frozen=True)
class Place:
    """A site, the call that reads there, and the step that its write completes.

    Attributes:
        site: Without its index.
        reader: None where nothing reads.
        step: None where several read the same value and this is not the last.
        carried: Whether the reader's module forms the next residual inside, from what it reads.
    """

    site: Site
    reader: Call | None
    step: Step | None
    carried: bool


def layout_of(found: Residual, family: str) -> Layout:
    """The layout of a model whose residual was followed to its end."""
    places = list(_places(found))
    anatomy = anatomy_of([*(place.site for place in places), Site(0, -1, FINAL)])
    steps = {i: place.step for i, place in enumerate(places) if place.step}
    keep = {i: step.keep.value for i, step in steps.items() if step.keep.value != 1}
    norms = {i: step.norm for i, step in steps.items() if step.norm}
    return Layout(
        family=family,
        scheme=family,
        anatomy=anatomy,
        taps=(*_taps(found, places, anatomy),),
        connection=Carry(keep, norms) if keep or norms else Connection(),
        write_definition=_definition(found),
        source_definition="source 0 is what enters the first layer",
        routing=tuple(dict.fromkeys(_routing(found.steps))),
    )


def _places(found: Residual) -> Iterator[Place]:
    taken_by = [(set(), set()) for _ in found.probe.layers]
    for step in found.steps:
        layer = found.probe.layers[step.layer]
        sources, sites = taken_by[step.layer]
        names, kinds = write_names(step, found.probe.calls, layer)
        writes = [unique(name, sources) for name in names]
        if step.norm and step.norm.bias is not None:
            writes.append(f"{writes[0]}.bias" if writes else unique("bias", sources))
        readers = step.readers or (None,)
        for reader in readers:
            alone = len(readers) == 1 or reader is None
            kind = kinds if alone else reader_name(reader, found.probe.calls, layer)
            last = reader is readers[-1]
            yield Place(
                Site(
                    0,
                    step.layer,
                    unique(kind or ("norm" if step.norm else "scale"), sites),
                    views=("",) if reader else (),
                    writes=tuple(writes) if last else (),
                ),
                reader,
                step if last else None,
                any(reader in call.inside for call in _formed_by(step)),
            )


def _formed_by(step: Step) -> list[Call]:
    """The calls whose outputs form the next residual."""
    return [write.call for write in step.writes] + ([step.norm.call] if step.norm else [])


def _taps(found: Residual, places: list[Place], anatomy: Anatomy) -> Iterator[Tap]:
    taps = list(_events(found, places, anatomy))
    yield from taps
    for side in ("input", "output"):
        last = {tap.module: tap for tap in sorted(taps, key=lambda tap: tap.call) if tap.side == side}
        for module, tap in last.items():
            if found.probe.count[module] > tap.call + 1:
                yield Tap(tap.path, module, side, None, call=found.probe.count[module] - 1)


def _events(found: Residual, places: list[Place], anatomy: Anatomy) -> Iterator[Tap]:
    origin = Event("source", 0)
    yield _gives(found.origin, origin) if found.origin else _reads(found.probe.layers[0], origin)
    for place, site in zip(places, anatomy.sites, strict=False):
        if place.reader:
            yield _reads(place.reader, Event("reader", *anatomy.readers_of(site)), carried=place.carried)
        if place.step:
            sources = iter(anatomy.sources_of(site))
            for write, source in zip(place.step.writes, sources, strict=False):
                yield _writes(write, Event("source", source))
            if place.step.norm:
                yield from _norm_taps(place.step.norm, site, anatomy)
    yield _final(found, Event("reader", len(anatomy.readers) - 1))


def _norm_taps(norm: Norm, site: Site, anatomy: Anatomy) -> Iterator[Tap]:
    yield _gives(norm.call, Event("native", site.index, "rstd"), partial(_rstd, norm))
    if norm.bias is not None:
        yield _gives(norm.call, Event("source", anatomy.sources_of(site)[-1]), partial(_bias, norm))


def _final(found: Residual, event: Event) -> Tap:
    """The readout, or what the last layer gives where nothing reads it."""
    if found.final:
        return _reads(found.final, event)
    last = found.probe.layers[-1]
    return _gives(last, event)


def _reads(call: Call, event: Event, *, carried: bool = False) -> Tap:
    pick, put = partial(_input, call), partial(_put_input, call)
    return Tap(call.path, call.module, "input", event, pick, call.number, put, carried)


def _gives(call: Call, event: Event, pick: partial[Tensor] | None = None) -> Tap:
    put = None if pick else partial(_put_output, call, 1.0)
    return Tap(call.path, call.module, "output", event, pick or partial(_output, call), call.number, put)


def _writes(write: Write, event: Event) -> Tap:
    put = partial(_put_output, write.call, write.weight.value)
    return replace(_gives(write.call, event, partial(_weighted, write)), put=put)


def _input(call: Call, seen: Seen) -> Tensor:
    return seen.args[call.slot] if isinstance(call.slot, int) else seen.kwargs[call.slot]


def _put_input(call: Call, seen: Seen, value: Tensor) -> Seen:
    if isinstance(call.slot, str):
        return seen._replace(kwargs=seen.kwargs | {call.slot: value})
    return seen._replace(args=(*seen.args[: call.slot], value, *seen.args[call.slot + 1 :]))


def _put_output(call: Call, weight: float, seen: Seen, value: Tensor) -> Seen:
    value = value if weight == 1 else value / weight
    if call.item is None:
        return seen._replace(output=value)
    items = (*seen.output[: call.item], value, *seen.output[call.item + 1 :])
    return seen._replace(output=type(seen.output)(items) if type(seen.output) in (tuple, list) else items)


def _output(call: Call, seen: Seen) -> Tensor:
    return seen.output if call.item is None else seen.output[call.item]


def _weighted(write: Write, seen: Seen) -> Tensor:
    value = _output(write.call, seen)
    return value if write.weight.value == 1 else value * write.weight.value


def _rstd(norm: Norm, seen: Seen) -> Tensor:
    return norm.rstd(_input(norm.call, seen), _output(norm.call, seen))


def _bias(norm: Norm, seen: Seen) -> Tensor:
    output = _output(norm.call, seen)
    return norm.bias.to(output.device, output.dtype).expand_as(output)


def _definition(found: Residual) -> str:
    """What is written in the first layer that writes, in the words of the model."""
    writes = [write for step in found.steps if step.layer == found.steps[0].layer for write in step.writes]
    prefix = f"{found.probe.layers[found.steps[0].layer].path}."
    names = ", ".join(
        write.call.path.removeprefix(prefix) + (f" times {write.weight.value:.4g}" if write.weight.value != 1 else "")
        for write in writes
    )
    return f"output of {names}"


def _routing(steps: list[Step]) -> Iterator[str]:
    for step in steps:
        yield from (weight.parameter for weight in (step.keep, *(w.weight for w in step.writes)) if weight.parameter)
        if step.norm:
            yield from step.norm.parameters

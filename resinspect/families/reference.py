"""The reference models of ``resinspect.models``: natives, reader inputs and writes at their own hook points."""

from collections.abc import Iterator

from torch import nn

from resinspect.families.layout import Event, Layout, Tap
from resinspect.models.decoder import ResidualLM


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a ``ResidualLM``."""
    if not isinstance(model, ResidualLM):
        return None
    return Layout(
        family="reference",
        scheme=model.config.connection,
        anatomy=model.anatomy,
        taps=tuple(_taps(model)),
        connection=model.connection,
        write_definition="output of the sublayer (attention output projection, MLP down projection)",
        source_definition="source 0 is the token embedding",
        routing=tuple(name for name, _ in model.named_parameters() if name.startswith("connection.")),
    )


def _taps(model: ResidualLM) -> Iterator[Tap]:
    def tap(path: str, event: Event) -> Tap:
        return Tap(path, model.get_submodule(path), "output", event)

    yield tap("hook_embed", Event("source", 0))
    for site in model.anatomy.sites:
        module = model.site_module(site)
        where = "final" if site.kind == "final" else f"layers.{site.layer}.{site.kind}"
        for name in module.native_names:
            yield tap(f"{where}.hook_native_{name}", Event("native", site.index, name))
        for name, reader in zip(module.read_names, model.anatomy.readers_of(site), strict=True):
            yield tap(f"{where}.{name}", Event("reader", reader))
        if site.kind != "final":
            write, *extras = model.anatomy.sources_of(site)
            yield tap(f"{where}.hook_write", Event("source", write))
            for name, extra in zip(module.extra_names, extras, strict=True):
                yield tap(f"{where}.hook_extra_{name}", Event("source", extra))

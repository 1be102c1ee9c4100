"""Names, kinds and execution order of the sources and readers of a model's residual.

A **site** is a place in execution order where the residual is read, written, or both.
A **source** is what can be read: the embedding and everything that sites write. A **reader** is one input of a site:
most sites have one, a site that reads separately for queries, keys and values has three, and one that only writes (a
constant, a per-layer embedding) has none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

EMBED = "embed"
FINAL = "final"


@dataclass(frozen=True, slots=True)
class Site:
    """One read and write of the residual.

    Attributes:
        index: Place in execution order.
        layer: Layer, -1 outside of all layers.
        kind: Such as ``"attn"``, ``"mlp"``, ``"final"``.
        views: Names of its inputs; one without a name is the usual case, none for a site that only writes.
        writes: Names of what it writes, such as ``("attn",)``, or ``("attn", "attn.bias")`` with a source that enters
            the residual together with the write.
        call: How often its layer ran before in the same forward pass, where layers are looped.
    """

    index: int
    layer: int
    kind: str
    views: tuple[str, ...] = ("",)
    writes: tuple[str, ...] = ()
    call: int = 0

    @property
    def name(self) -> str:
        """``"3.attn"``, ``"3@1.attn"`` when layer 3 runs for the second time, or ``"final"``."""
        return self.label(self.kind)

    def label(self, what: str) -> str:
        """The name of something of this site's layer."""
        if self.layer < 0:
            return what
        return f"{self.layer}@{self.call}.{what}" if self.call else f"{self.layer}.{what}"


@dataclass(frozen=True, slots=True)
class Source:
    """Something written into the residual."""

    name: str
    kind: str
    layer: int = -1


@dataclass(frozen=True, slots=True)
class Reader:
    """One input formed from the residual; it can read the first ``prefix`` sources."""

    name: str
    kind: str
    prefix: int
    layer: int = -1


@dataclass(frozen=True)
class Anatomy:
    """The sources and readers of one model, in execution order.

    Attributes:
        sources: What can be read; ``sources[0]`` is the embedding.
        readers: What reads, each with the number of leading sources that exist by then.
        sites: The sites of a known scheme, in order, or empty when only modules are known (``method="solve"``).
    """

    sources: tuple[Source, ...]
    readers: tuple[Reader, ...]
    sites: tuple[Site, ...] = ()

    def readers_of(self, site: Site) -> range:
        """Indices into ``readers`` of one site's inputs."""
        first = self._first_readers[site.index]
        return range(first, first + len(site.views))

    def sources_of(self, site: Site) -> range:
        """Indices into ``sources`` of what one site writes."""
        first = self._first_sources[site.index]
        return range(first, first + len(site.writes))

    def site_of(self, reader: int) -> Site:
        """The site that one reader is an input of."""
        return next(site for site in self.sites if reader in self.readers_of(site))

    @cached_property
    def _first_readers(self) -> tuple[int, ...]:
        return tuple(accumulate((len(site.views) for site in self.sites), initial=0))

    @cached_property
    def _first_sources(self) -> tuple[int, ...]:
        return tuple(accumulate((len(site.writes) for site in self.sites), initial=1))


def anatomy_of(sites: Iterable[Site]) -> Anatomy:
    """The anatomy of sites in execution order, the final readout last; they are numbered here.

    Source 0 is the embedding, which no site writes.
    """
    sites = tuple(replace(site, index=i) for i, site in enumerate(sites))
    sources, readers = [Source(EMBED, EMBED)], []
    for site in sites:
        names = (f"{site.name}.{view}" if view else site.name for view in site.views)
        readers += [Reader(name, site.kind, len(sources), site.layer) for name in names]
        sources += [Source(site.label(name), name.rpartition(".")[2], site.layer) for name in site.writes]
    return Anatomy(tuple(sources), tuple(readers), sites)


def decoder_anatomy(
    num_layers: int,
    *,
    kinds: Iterable[str] = ("attn", "mlp"),
    views: Mapping[str, tuple[str, ...]] | None = None,
    extras: tuple[str, ...] = (),
) -> Anatomy:
    """The anatomy of a decoder: ``num_layers`` layers of the same sublayers, then the final readout.

    Args:
        num_layers: Number of layers.
        kinds: Sublayers of a layer in execution order.
        views: Per kind, the names of separate inputs, such as ``{"attn": ("q", "k", "v")}``; default one input.
        extras: Names of further sources that come with every write, such as ``("bias",)``.
    """
    views, kinds = views or {}, tuple(kinds)
    writes = {kind: (kind, *(f"{kind}.{extra}" for extra in extras)) for kind in kinds}
    sites = [
        Site(0, layer, kind, views.get(kind, ("",)), writes[kind]) for layer in range(num_layers) for kind in kinds
    ]
    return anatomy_of([*sites, Site(0, -1, FINAL, views.get(FINAL, ("",)))])

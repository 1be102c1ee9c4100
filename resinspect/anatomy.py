"""Names, kinds and execution order of the sources and readers of a model's residual.

A **site** is a place in execution order where the residual is read and, except at the last one, written back.
A **source** is what can be read: the embedding and the write of every site. A **reader** is one input of a site:
most sites have one, a site that reads separately for queries, keys and values has three.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

EMBED = "embed"
FINAL = "final"


@dataclass(frozen=True, slots=True)
class Site:
    """One read (and write) of the residual.

    Attributes:
        index: Place in execution order.
        layer: Layer, -1 for the final readout.
        kind: Such as ``"attn"``, ``"mlp"``, ``"final"``.
        views: Names of its inputs; one without a name is the usual case.
        extras: Names of sources that enter the residual together with its write, such as the bias of a norm.
    """

    index: int
    layer: int
    kind: str
    views: tuple[str, ...] = ("",)
    extras: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``"3.attn"``, ``"3.mlp"`` or ``"final"``."""
        return FINAL if self.kind == FINAL else f"{self.layer}.{self.kind}"


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
        first = sum(len(s.views) for s in self.sites[: site.index])
        return range(first, first + len(site.views))

    def sources_of(self, site: Site) -> range:
        """Indices into ``sources`` of one site's write and of the extras that come with it."""
        first = 1 + sum(1 + len(s.extras) for s in self.sites[: site.index])
        return range(first, first + 1 + len(site.extras))


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
    order = [(layer, kind) for layer in range(num_layers) for kind in kinds]
    sites = [Site(i, layer, kind, views.get(kind, ("",)), extras) for i, (layer, kind) in enumerate(order)]
    sites.append(Site(len(sites), -1, FINAL, views.get(FINAL, ("",))))
    sources, readers = [Source(EMBED, EMBED)], []
    for site in sites:
        names = (f"{site.name}.{view}" if view else site.name for view in site.views)
        readers += [Reader(name, site.kind, len(sources), site.layer) for name in names]
        if site.kind != FINAL:
            sources.append(Source(site.name, site.kind, site.layer))
            sources += [Source(f"{site.name}.{extra}", extra, site.layer) for extra in site.extras]
    return Anatomy(tuple(sources), tuple(readers), tuple(sites))

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
    """One read (and write) of the residual: ``index`` in execution order, ``layer``, ``kind`` and reader views."""

    index: int
    layer: int
    kind: str
    views: tuple[str, ...] = ("",)

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

    def source_of(self, site: Site) -> int:
        """Index into ``sources`` of one site's write."""
        return site.index + 1


def decoder_anatomy(
    num_layers: int,
    *,
    kinds: Iterable[str] = ("attn", "mlp"),
    views: Mapping[str, tuple[str, ...]] | None = None,
) -> Anatomy:
    """The anatomy of a decoder: ``num_layers`` layers of the same sublayers, then the final readout.

    Args:
        num_layers: Number of layers.
        kinds: Sublayers of a layer in execution order.
        views: Per kind, the names of separate inputs, such as ``{"attn": ("q", "k", "v")}``; default one input.
    """
    views = views or {}
    kinds = tuple(kinds)
    order = [(layer, kind) for layer in range(num_layers) for kind in kinds] + [(-1, FINAL)]
    sites = tuple(Site(i, layer, kind, views.get(kind, ("",))) for i, (layer, kind) in enumerate(order))
    sources = (Source(EMBED, EMBED), *(Source(s.name, s.kind, s.layer) for s in sites[:-1]))
    readers = tuple(
        Reader(f"{s.name}.{view}" if view else s.name, s.kind, s.index + 1, s.layer) for s in sites for view in s.views
    )
    return Anatomy(sources, readers, sites)

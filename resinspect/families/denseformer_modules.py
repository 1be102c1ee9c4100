"""A user's own model around ``DWAModules`` of the ``denseformer`` package (epfml/DenseFormer on GitHub).

One module holds the weights of all averages and is called after every block with that block's output and number. Where
the blocks have the parts of Llama's or GPT-2's, their two sublayers are read and written each; any other block is one
sublayer, whose write is its output minus its input.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from resinspect.anatomy import FINAL, Anatomy, Site, anatomy_of
from resinspect.errors import CaptureError
from resinspect.families.layout import Event, Layout, Seen, Tap
from resinspect.families.stack import PRE_NORM, Sublayer, parts_of
from resinspect.program import Carrier, Connection, Native

Outputs = tuple[tuple[Tensor, ...], Tensor]

SUBLAYERS = (PRE_NORM, (Sublayer("attn", "ln_1", "attn"), Sublayer("mlp", "ln_2", "mlp")))
BLOCK = (Sublayer("block", "", ""),)


class Averaged(Connection):
    """After block i its output is replaced by a weighted average of earlier outputs, the embedding first.

    Args:
        dwa: The module that holds the weights.
        last: Kind of the last sublayer of a block.
    """

    natives: ClassVar[dict[str, tuple[str, ...]]] = {"average": ("alpha",)}
    native_dims: ClassVar[dict[str, tuple[str, ...]]] = {"alpha": ("slot",)}

    def __init__(self, dwa: nn.Module, last: str) -> None:
        super().__init__()
        self.dilation, self.last = dwa.dilation, last

    def start(self, carrier: Carrier, embedding: Tensor) -> Outputs:
        """Outputs of the blocks so far, the embedding first, and the running residual."""
        return (embedding,), embedding

    def read(self, carrier: Carrier, state: Outputs, site: Site, native: Native) -> tuple[tuple[Tensor, ...], Outputs]:
        """The running residual; an average, which reads nothing by itself, replaces it."""
        outputs, residual = state
        if "alpha" in native:
            newest = len(outputs) - 1
            averaged = outputs[newest % self.dilation :: self.dilation]
            residual = carrier.combine(native["alpha"], averaged)
        return (residual,) * len(site.views), (outputs, residual)

    def write(self, carrier: Carrier, state: Outputs, site: Site, native: Native, *values: Tensor) -> Outputs:
        """Add to the residual; the last sublayer of a block completes its output."""
        outputs, residual = state
        if not values:
            return state
        residual = residual + values[0]
        return (*outputs, residual) if site.kind == self.last else outputs, residual


def recognise(model: nn.Module) -> Layout | None:
    """The layout of a model with one ``DWAModules``.

    Raises:
        CaptureError: If it has several, or the blocks that it averages cannot be told.
    """
    found = [(path, module) for path, module in model.named_modules() if _is_dwa(module)]
    if not found:
        return None
    if len(found) > 1:
        raise CaptureError(f"the model has {len(found)} modules of weighted averages; only one is known.")
    ((path, dwa),) = found
    list_path, blocks = _blocks(model, dwa)
    sublayers = next((parts for parts in SUBLAYERS if all(_has(block, parts) for block in blocks)), BLOCK)
    anatomy = _anatomy(dwa, sublayers)
    return Layout(
        family="denseformer_modules",
        scheme="denseformer",
        anatomy=anatomy,
        taps=tuple(_taps(anatomy, (path, dwa), (list_path, blocks), sublayers)),
        connection=Averaged(dwa, sublayers[-1].kind),
        write_definition="output of a block minus its input" if sublayers is BLOCK else "output of attention and MLP",
        source_definition="source 0 is what enters the first block",
        routing=tuple(f"{path}.alphas.{i}.weight" for i in _averages(dwa)),
    )


def _is_dwa(module: nn.Module) -> bool:
    """A list of weights, one row for every ``period`` blocks, as long as the outputs that it averages."""
    alphas = getattr(module, "alphas", None)
    sizes = [getattr(module, name, None) for name in ("n_blocks", "dilation", "period")]
    if not isinstance(alphas, nn.ModuleList) or not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    blocks, dilation, period = sizes
    expected = [(1, (i + 1) // dilation + 1) if (i + 1) % period == 0 else None for i in range(blocks)]
    return [None if a is None else tuple(getattr(a, "weight", a).shape) for a in alphas] == expected


def _averages(dwa: nn.Module) -> list[int]:
    return [i for i, alpha in enumerate(dwa.alphas) if alpha is not None]


def _blocks(model: nn.Module, dwa: nn.Module) -> tuple[str, nn.ModuleList]:
    """The outermost list of as many modules as there are averages to take."""
    lists = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList) and m is not dwa.alphas]
    depth = min((path.count(".") for path, m in lists if len(m) == dwa.n_blocks), default=0)
    found = [(path, m) for path, m in lists if len(m) == dwa.n_blocks and path.count(".") == depth]
    if len(found) != 1:
        raise CaptureError(
            f"the model averages the outputs of {dwa.n_blocks} blocks, but "
            f"{'no list' if not found else 'more than one list (' + ', '.join(p for p, _ in found) + ')'} of that "
            'length was found; name the sublayers yourself (method="solve").'
        )
    return found[0]


def _has(block: nn.Module, sublayers: Sequence[Sublayer]) -> bool:
    with_parameters = {name for name, child in block.named_children() if any(True for _ in child.parameters())}
    return with_parameters == set(parts_of(sublayers)) and not any(True for _ in block.parameters(recurse=False))


def _anatomy(dwa: nn.Module, sublayers: Sequence[Sublayer]) -> Anatomy:
    sites = []
    for block in range(dwa.n_blocks):
        sites += [Site(0, block, part.kind, writes=(part.kind,)) for part in sublayers]
        if dwa.alphas[block] is not None:
            sites.append(Site(0, block, "average", ()))
    return anatomy_of([*sites, Site(0, -1, FINAL)])


def _taps(
    anatomy: Anatomy, dwa: tuple[str, nn.Module], blocks: tuple[str, nn.ModuleList], sublayers: Sequence[Sublayer]
) -> Iterator[Tap]:
    (path, module), (list_path, _) = dwa, blocks
    parts = {part.kind: part for part in sublayers}

    def tap(site: Site, part: str, **options: Any) -> Tap:
        inside = f"{list_path}.{site.layer}.{part}".rstrip(".")
        block = blocks[1][site.layer]
        return Tap(inside, block.get_submodule(part) if part else block, **options)

    first = anatomy.sites[0]
    yield tap(first, parts[first.kind].read, side="input", event=Event("source", 0))
    for site in anatomy.sites[:-1]:
        if site.kind == "average":
            alpha = Event("native", site.index, "alpha")
            yield Tap(path, module, "output", alpha, _alpha(module.alphas[site.layer]), site.layer)
            continue
        (reader,), (source,) = anatomy.readers_of(site), anatomy.sources_of(site)
        part = parts[site.kind]
        yield tap(site, part.read, side="input", event=Event("reader", reader), carried=not part.read)
        added = {} if part.write else {"pick": _added, "put": _put_added}
        yield tap(site, part.write, side="output", event=Event("source", source), **added)
    final = Event("reader", *anatomy.readers_of(anatomy.sites[-1]))
    yield Tap(path, module, "output", final, call=module.n_blocks - 1)


def _alpha(linear: nn.Module) -> Any:
    """The weights of one average, the same for every token."""
    return lambda seen: linear.weight.view(-1).expand(*seen.output.shape[:2], -1)


def _added(seen: Seen) -> Tensor:
    output = seen.output[0] if isinstance(seen.output, tuple) else seen.output
    return output - _entered(seen)


def _put_added(seen: Seen, value: Tensor) -> Seen:
    output = _entered(seen) + value
    return seen._replace(output=(output, *seen.output[1:]) if isinstance(seen.output, tuple) else output)


def _entered(seen: Seen) -> Tensor:
    return seen.args[0] if seen.args else seen.kwargs["x"]

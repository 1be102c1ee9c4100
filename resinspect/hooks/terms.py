"""Pushing writes through a program as vectors: for weights per channel, norms on the carry and operators."""

from torch import Tensor, stack

from resinspect.families import Layout
from resinspect.program import TERM, VECTOR_PATHS, Native, Unroll, terms


def push_terms(layout: Layout, natives: dict[int, Native], writes: Tensor) -> tuple[Tensor, Tensor]:
    """What becomes of every write on its way to every reader.

    Args:
        layout: Sites and program.
        natives: Per site, with leading dimension token.
        writes: ``(token, source, d)``.

    Returns:
        Contributions ``(token, reader, source, d)``, and the sum of absolute paths ``(token, reader, d)``.
    """
    values = writes if writes.element_size() >= 4 else writes.float()
    pushed = Unroll(layout.connection, layout.anatomy, TERM, terms(values))
    paths = Unroll(layout.connection, layout.anatomy, VECTOR_PATHS, lambda source: values[:, source].abs())
    contributions, magnitudes = [], []
    for site in layout.anatomy.sites:
        native = {name: value.to(values.dtype) for name, value in natives.get(site.index, {}).items()}
        contributions += pushed.read(native)
        magnitudes += paths.read(native)
        if site.kind != "final":
            pushed.write(native)
            paths.write(native)
    return stack(contributions, dim=1), stack(magnitudes, dim=1)

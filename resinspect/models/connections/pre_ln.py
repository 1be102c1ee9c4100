"""Pre-LN: every reader is the plain sum of all earlier writes, W = 1."""

from resinspect.program import Connection


class PreLN(Connection):
    """``h_r = sum of v_s for all s < r``; no parameters. Each sublayer norms its own input."""

    def __init__(self, *, num_sites: int, hidden_size: int) -> None:
        super().__init__()

"""ShortSWA (arXiv 2603.16039): the sequence-axis counterpart of attention over depth."""

from typing import ClassVar

from resinspect.models.connections.pre_ln import PreLN


class ShortSWA(PreLN):
    """The plain residual with one more sublayer before attention: causal attention over the last few tokens.

    It mixes tokens, not depth, so W stays 1; its write is a source of its own.

    Args:
        num_sites: Sites, the final readout included.
        hidden_size: Width ``d``.
        window: Tokens a token sees, itself included.
    """

    kinds: ClassVar[tuple[str, ...]] = ("swa", "attn", "mlp")

    def __init__(self, *, num_sites: int, hidden_size: int, window: int = 4) -> None:
        super().__init__(num_sites=num_sites, hidden_size=hidden_size)
        self.window = window

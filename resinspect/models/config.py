"""Configuration of the reference model."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class ResidualConfig(PreTrainedConfig):
    """A small decoder (RMSNorm, rotary positions, SwiGLU) whose residual is a pluggable connection.

    Attributes:
        connection: Name in ``resinspect.models.connections.CONNECTIONS``.
        connection_options: Keyword arguments of that connection, such as ``{"streams": 4}``.
        vocab_size: Size of the vocabulary.
        hidden_size: Width of the residual.
        num_hidden_layers: Number of layers, each an attention and an MLP sublayer.
        num_attention_heads: Heads; must divide ``hidden_size`` into even parts.
        intermediate_size: Width inside the MLP; default 8/3 of ``hidden_size``, rounded up to a multiple of 8.
        max_position_embeddings: Longest context.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Added to the mean square in every norm.
        initializer_range: Standard deviation of the initial weights.
    """

    model_type = "resinspect"

    connection: str = "pre_ln"
    connection_options: dict[str, Any] | None = None
    vocab_size: int = 2048
    hidden_size: int = 128
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    intermediate_size: int | None = None
    max_position_embeddings: int = 256
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | None = 0
    pad_token_id: int | None = 0

    def __post_init__(self, **kwargs: Any) -> None:
        self.connection_options = self.connection_options or {}
        self.intermediate_size = self.intermediate_size or 8 * -(-self.hidden_size // 3)
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse a width that the heads cannot share."""
        if self.num_attention_heads < 1 or self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be a multiple of twice num_attention_heads "
                f"{self.num_attention_heads}, since rotary positions turn pairs of channels."
            )

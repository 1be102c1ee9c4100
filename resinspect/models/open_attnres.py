"""Qwen3 with depth attention over hidden states, in the layout of the open attention residual checkpoints.

Public checkpoints of model_type ``qwen3_attnres`` come with code for other versions of transformers. This is their
forward on the installed one: the plain residual goes on as in Qwen3, but each sublayer reads a softmax over earlier
states and the current one. Which states were kept is not visible in the weights, so the mode must be named.
"""

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

MODES = ("block", "full")
GATES = ("bias", "sigmoid_scalar", "sigmoid_vector", "learnable_alpha")
SUBLAYERS = ("attn", "mlp")


@strict
class OpenAttnResConfig(Qwen3Config):
    """Qwen3, and which states its depth attention sees.

    Attributes:
        attnres_mode: ``"block"``: the embedding, the state after each block, and the current state. ``"full"``: the
            state after every sublayer instead. Other modes of that code are other schemes, and refused.
        attnres_num_blocks: Blocks of equally many layers, the last may be shorter; for ``"block"``.
        attnres_gate_type: ``"bias"``: the read is the depth attention itself. Otherwise it is mixed with the current
            state, by a number per sublayer (``"sigmoid_scalar"``, ``"learnable_alpha"``) or by a linear function of
            that state per channel (``"sigmoid_vector"``).
        attnres_recency_bias_init: Start of what is added to the score of the current state.
    """

    model_type = "qwen3_attnres"

    attnres_mode: str | None = None
    attnres_num_blocks: int | None = None
    attnres_gate_type: str = "bias"
    attnres_recency_bias_init: float | int = 3.0

    def validate_architecture(self) -> None:
        """Refuse what would leave the forward to a guess."""
        if self.attnres_mode not in MODES:
            raise ValueError(f"attnres_mode is {self.attnres_mode!r}, but only {' and '.join(MODES)} are known here")
        if self.attnres_gate_type not in GATES:
            raise ValueError(f"attnres_gate_type is {self.attnres_gate_type!r}, but only {', '.join(GATES)} are known")
        if self.attnres_mode == "block" and not (self.attnres_num_blocks or 0) > 0:
            raise ValueError(f"attnres_num_blocks is {self.attnres_num_blocks!r}, but mode block needs 1 or more")


class OpenAttnResLayer(Qwen3DecoderLayer):
    """A Qwen3 layer whose sublayers read through depth attention."""

    def __init__(self, config: OpenAttnResConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.config, self.layer_idx = config, layer_idx
        width = config.hidden_size
        for name in SUBLAYERS:
            self.add_module(f"{name}_res_proj", nn.Linear(width, 1, bias=False))
            self.add_module(f"{name}_res_norm", Qwen3RMSNorm(width, eps=config.rms_norm_eps))
            self.register_parameter(f"{name}_res_bias", nn.Parameter(torch.empty(())))
            if config.attnres_gate_type == "sigmoid_scalar":
                self.register_parameter(f"{name}_res_gate_logit", nn.Parameter(torch.empty(())))
            elif config.attnres_gate_type == "learnable_alpha":
                self.register_parameter(f"{name}_res_alpha", nn.Parameter(torch.empty(())))
            elif config.attnres_gate_type == "sigmoid_vector":
                self.add_module(f"{name}_res_gate_proj", nn.Linear(width, width))

    def reset_parameters(self) -> None:
        """Queries of zero, gates nearly closed."""
        for name, parameter in self.named_parameters():
            if name.endswith("_res_bias"):
                bias = self.config.attnres_recency_bias_init if self.config.attnres_gate_type == "bias" else 0.0
                init.constant_(parameter, bias)
            elif name.endswith(("_res_gate_logit", "_res_gate_proj.bias")):
                init.constant_(parameter, -2.0)
            elif name.endswith(("_res_proj.weight", "_res_alpha", "_res_gate_proj.weight")):
                init.zeros_(parameter)

    def forward(self, hidden_states: Tensor, *, history: list[Tensor], **kwargs: Any) -> Tensor:
        """Extends ``history``, the states that later reads see beside the current one."""
        if not history:
            history.append(hidden_states)
        read = self.input_layernorm(self._read("attn", history, hidden_states))
        hidden_states = hidden_states + self.self_attn(hidden_states=read, **kwargs)[0]
        self._keep("attn", history, hidden_states)
        read = self.post_attention_layernorm(self._read("mlp", history, hidden_states))
        hidden_states = hidden_states + self.mlp(read)
        self._keep("mlp", history, hidden_states)
        return hidden_states

    def _read(self, name: str, history: list[Tensor], state: Tensor) -> Tensor:
        states = torch.stack([*history, state])
        alpha = depth_weights(self, name, getattr(self, f"{name}_res_norm")(states))
        mixed = torch.einsum("sbt,sbtd->btd", alpha, states)
        gate = self._gate(name, state)
        return mixed if gate is None else (1 - gate) * state + gate * mixed

    def _gate(self, name: str, state: Tensor) -> Tensor | None:
        if hasattr(self, f"{name}_res_gate_proj"):
            return getattr(self, f"{name}_res_gate_proj")(state).sigmoid()
        return scalar_gate(self, name)

    def _keep(self, name: str, history: list[Tensor], state: Tensor) -> None:
        if keeps(self.config, self.layer_idx, name):
            history.append(state)


class OpenAttnResPreTrained(PreTrainedModel):
    """How its parameters start."""

    config_class = OpenAttnResConfig

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # By its parent, so that the generic start of a linear layer does not come after it.
        if isinstance(module, OpenAttnResLayer):
            module.reset_parameters()


class OpenAttnResModel(OpenAttnResPreTrained, Qwen3Model):
    """The Qwen3 decoder over such layers."""

    supports_gradient_checkpointing = False
    _no_split_modules: ClassVar[list[str]] = ["OpenAttnResLayer"]

    def __init__(self, config: OpenAttnResConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(OpenAttnResLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """As Qwen3; every call has a history of its own."""
        return super().forward(input_ids, history=[], **kwargs)


class OpenAttnResForCausalLM(OpenAttnResPreTrained, Qwen3ForCausalLM):
    """The decoder and its language head."""

    supports_gradient_checkpointing = False
    _no_split_modules: ClassVar[list[str]] = ["OpenAttnResLayer"]

    def __init__(self, config: OpenAttnResConfig) -> None:
        super().__init__(config)
        self.model = OpenAttnResModel(config)
        self.post_init()


def keeps(config: Any, layer: int, sublayer: str) -> bool:
    """Whether the state after a sublayer of a layer stays visible to all later reads."""
    if config.attnres_mode == "full":
        return True
    size = -(-config.num_hidden_layers // config.attnres_num_blocks)
    return sublayer == "mlp" and (layer + 1) % size == 0


def depth_weights(layer: nn.Module, name: str, keys: Tensor) -> Tensor:
    """Softmax over normed states ``(state, batch, token, d)``, the current one last, for one sublayer of a layer."""
    scores = torch.einsum("d,sbtd->sbt", getattr(layer, f"{name}_res_proj").weight.view(-1), keys)
    older, current = scores.split([len(scores) - 1, 1])
    return torch.cat([older, current + getattr(layer, f"{name}_res_bias")]).softmax(0)


def scalar_gate(layer: nn.Module, name: str) -> Tensor | None:
    """The share of depth attention in a read, where it is one number per sublayer."""
    if hasattr(layer, f"{name}_res_gate_logit"):
        return getattr(layer, f"{name}_res_gate_logit").sigmoid()
    return getattr(layer, f"{name}_res_alpha", None)

"""The sublayers of the reference model. Each norms its own input: the pre-norm belongs to the sublayer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint
from transformers.cache_utils import Cache

from resinspect.anatomy import Site
from resinspect.models.config import ResidualConfig
from resinspect.program import Native

Rotary = tuple[Tensor, Tensor]


class HookedSite(nn.Module):
    """A site's hook points and norms.

    Hook names are ``hook_read`` (``hook_read_q``, ... for several views), ``hook_native_<name>`` and ``hook_write``.
    """

    def __init__(self, config: ResidualConfig, site: Site, natives: tuple[str, ...]) -> None:
        super().__init__()
        self.site, self.native_names = site, natives
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in site.views)
        for name in self.read_names:
            self.add_module(name, HookPoint())
        for name in natives:
            self.add_module(f"hook_native_{name}", HookPoint())
        if site.kind != "final":
            self.hook_write = HookPoint()

    @property
    def read_names(self) -> list[str]:
        """Names of this site's reader hook points, in the order of its views."""
        return [f"hook_read_{view}" if view else "hook_read" for view in self.site.views]

    def emit(self, native: Native) -> Native:
        """Pass natives through their hook points, where they can be seen and replaced."""
        return {name: self.get_submodule(f"hook_native_{name}")(value) for name, value in native.items()}

    def normed(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Pass reader inputs ``(batch, token, d)`` through their hook points and norm each."""
        read = (self.get_submodule(name)(value) for name, value in zip(self.read_names, inputs, strict=True))
        return [norm(value) for norm, value in zip(self.norms, read, strict=True)]


class Attention(HookedSite):
    """Causal multi-head attention with rotary positions and a key-value cache."""

    def __init__(self, config: ResidualConfig, site: Site, natives: tuple[str, ...]) -> None:
        super().__init__(config, site, natives)
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, inputs: tuple[Tensor, ...], rotary: Rotary, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """Reader inputs ``(batch, token, d)`` to the write ``(batch, token, d)``."""
        normed = self.normed(inputs)
        q, k, v = (self._heads(proj(x)) for proj, x in zip((self.q, self.k, self.v), _three(normed), strict=True))
        q, k = _rotate(q, rotary), _rotate(k, rotary)
        if cache is not None:
            k, v = cache.update(k, v, self.site.layer)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1)
        return self.hook_write(self.o(mixed.transpose(1, 2).flatten(2)))

    @property
    def output(self) -> nn.Linear:
        """The projection whose output is written."""
        return self.o

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class MLP(HookedSite):
    """SwiGLU."""

    def __init__(self, config: ResidualConfig, site: Site, natives: tuple[str, ...]) -> None:
        super().__init__(config, site, natives)
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    @property
    def output(self) -> nn.Linear:
        """The projection whose output is written."""
        return self.down

    def forward(self, inputs: tuple[Tensor, ...], *_: object) -> Tensor:
        """Reader input ``(batch, token, d)`` to the write ``(batch, token, d)``."""
        (x,) = self.normed(inputs)
        return self.hook_write(self.down(F.silu(self.gate(x)) * self.up(x)))


class Readout(HookedSite):
    """The final reader and its norm; the head follows."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Final reader input to normed hidden vectors ``(batch, token, d)``."""
        (x,) = self.normed(inputs)
        return x


SUBLAYERS: dict[str, type[HookedSite]] = {"attn": Attention, "mlp": MLP}


def rotary_angles(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Rotary:
    """Cosines and sines ``(batch, 1, token, head_dim / 2)`` for positions ``(batch, token)``.

    Computed on the fly: a non-persistent buffer would load as garbage.
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angle = positions[:, None, :, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = rotary
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _three(views: list[Tensor]) -> list[Tensor]:
    return views if len(views) == 3 else views * 3

"""The sublayers of the reference model. Each norms its own input: the pre-norm belongs to the sublayer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint
from transformers.cache_utils import Cache

from resinspect.anatomy import Site
from resinspect.models.config import ResidualConfig
from resinspect.program import Connection, Native

Rotary = tuple[Tensor, Tensor]


class HookedSite(nn.Module):
    """A site's hook points and norms.

    Hook names are ``hook_read`` (``hook_read_q``, ... for several views), ``hook_native_<name>``, ``hook_write`` and
    ``hook_extra_<name>``.
    """

    def __init__(self, config: ResidualConfig, site: Site, connection: Connection) -> None:
        super().__init__()
        self.site, self.native_names = site, connection.natives.get(site.kind, ())

        def norm() -> nn.Module:
            return nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

        self.norms = nn.ModuleList(norm() if connection.pre_norm else nn.Identity() for _ in site.views)
        for name in self.read_names:
            self.add_module(name, HookPoint())
        for name in self.native_names:
            self.add_module(f"hook_native_{name}", HookPoint())
        if site.kind != "final":
            self.post_norm = norm() if connection.post_norm else nn.Identity()
            self.hook_write = HookPoint()
        for name in self.extra_names:
            self.add_module(f"hook_extra_{name}", HookPoint())

    @property
    def read_names(self) -> list[str]:
        """Names of this site's reader hook points, in the order of its views."""
        return [f"hook_read_{view}" if view else "hook_read" for view in self.site.views]

    @property
    def extra_names(self) -> list[str]:
        """Names of the sources that come with the write, without those of the sublayer."""
        return [name.rpartition(".")[2] for name in self.site.writes[1:]]

    def emit(self, native: Native) -> Native:
        """Pass natives through their hook points, where they can be seen and replaced."""
        return {name: self.get_submodule(f"hook_native_{name}")(value) for name, value in native.items()}

    def emit_extras(self, extras: tuple[Tensor, ...]) -> list[Tensor]:
        """Pass the sources that come with the write through their hook points."""
        points = (self.get_submodule(f"hook_extra_{name}") for name in self.extra_names)
        return [point(value) for point, value in zip(points, extras, strict=True)]

    def normed(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Pass reader inputs ``(batch, token, d)`` through their hook points and norm each."""
        read = (self.get_submodule(name)(value) for name, value in zip(self.read_names, inputs, strict=True))
        return [norm(value) for norm, value in zip(self.norms, read, strict=True)]


class Attention(HookedSite):
    """Causal multi-head attention with rotary positions and a key-value cache."""

    def __init__(self, config: ResidualConfig, site: Site, connection: Connection) -> None:
        super().__init__(config, site, connection)
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.cache_index = site.layer
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, inputs: tuple[Tensor, ...], rotary: Rotary, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """Reader inputs ``(batch, token, d)`` to the write ``(batch, token, d)``."""
        normed = self.normed(inputs)
        q, k, v = (self._heads(proj(x)) for proj, x in zip((self.q, self.k, self.v), _three(normed), strict=True))
        q, k = _rotate(q, rotary), _rotate(k, rotary)
        if cache is not None:
            k, v = cache.update(k, v, self.cache_index)
        mask = self.limit(mask, q.shape[2], k)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1)
        return self.hook_write(self.post_norm(self.o(mixed.transpose(1, 2).flatten(2))))

    def limit(self, mask: Tensor | None, queries: int, keys: Tensor) -> Tensor | None:
        """The mask to attend with: None is plainly causal, True lets a query see a key."""
        return mask

    @property
    def output(self) -> nn.Linear:
        """The projection whose output is written."""
        return self.o

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class WindowAttention(Attention):
    """Causal attention over the last few tokens."""

    def __init__(self, config: ResidualConfig, site: Site, connection: Connection) -> None:
        super().__init__(config, site, connection)
        self.window = connection.window
        # Its keys and values are cached behind those of the attention sublayers.
        self.cache_index = config.num_hidden_layers + site.layer

    def limit(self, mask: Tensor | None, queries: int, keys: Tensor) -> Tensor | None:
        """A query at position t sees keys t - window + 1 .. t that the mask lets it see."""
        key = torch.arange(keys.shape[2], device=keys.device)
        query = key[-queries:, None]
        near = (key <= query) & (key > query - self.window)
        return near if mask is None else mask & near


class MLP(HookedSite):
    """SwiGLU."""

    def __init__(self, config: ResidualConfig, site: Site, connection: Connection) -> None:
        super().__init__(config, site, connection)
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
        return self.hook_write(self.post_norm(self.down(F.silu(self.gate(x)) * self.up(x))))


class Readout(HookedSite):
    """The final reader and its norm; the head follows."""

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Final reader input to normed hidden vectors ``(batch, token, d)``."""
        (x,) = self.normed(inputs)
        return x


SUBLAYERS: dict[str, type[HookedSite]] = {"attn": Attention, "mlp": MLP, "swa": WindowAttention}


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

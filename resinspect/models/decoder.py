"""The reference model: one decoder for every connection, so that models differ in nothing else."""

from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg

from resinspect.anatomy import Anatomy, Site, decoder_anatomy
from resinspect.models.config import ResidualConfig
from resinspect.models.connections import build_connection
from resinspect.models.sublayers import SUBLAYERS, HookedSite, Readout, rotary_angles
from resinspect.program import VECTOR

_LOSS_ARGUMENTS = ("num_items_in_batch",)


class ResidualLM(PreTrainedModel, HookedRootModule, GenerationMixin):
    """A causal language model whose residual is ``config.connection``.

    It saves, loads, trains and generates as any Hugging Face model, and carries transformer_lens hook points:
    ``hook_embed``, ``layers.{l}.{attn|mlp}.hook_read`` / ``hook_write`` / ``hook_native_{name}`` and
    ``final.hook_read``, so ``model.run_with_cache(tokens)`` works.
    """

    config_class = ResidualConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012 - read by transformers

    def __init__(self, config: ResidualConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.hook_embed = HookPoint()
        self.connection = build_connection(
            config.connection,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            **config.connection_options,
        )
        self.anatomy: Anatomy = decoder_anatomy(
            config.num_hidden_layers,
            kinds=self.connection.kinds,
            views=self.connection.views,
            extras=self.connection.extra_sources,
        )
        modules = {s: SUBLAYERS.get(s.kind, Readout)(config, s, self.connection) for s in self.anatomy.sites}
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(config.num_hidden_layers))
        gain = getattr(self.connection, "output_init_scale", 1.0) / (2 * config.num_hidden_layers) ** 0.5
        for site in self.anatomy.sites[:-1]:
            self.layers[site.layer][site.kind] = modules[site]
            modules[site].output.init_gain = gain
        self.final = modules[self.anatomy.sites[-1]]
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.gradient_checkpointing = False
        self.post_init()
        self.setup()

    def site_module(self, site: Site) -> HookedSite:
        """The module that holds one site's hook points, norms and weights."""
        return self.final if site.kind == "final" else self.layers[site.layer][site.kind]

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding (needed for tying)."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Linear:
        """The head (needed for tying)."""
        return self.lm_head

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``(batch, token, vocab)`` for ids ``(batch, token)``; arguments as in transformers.

        Raises:
            TypeError: If an argument is not one of these, such as ``output_hidden_states``: use ``run_with_cache``.
        """
        if unknown := [name for name, value in kwargs.items() if value and name not in _LOSS_ARGUMENTS]:
            raise TypeError(f"ResidualLM does not take {', '.join(unknown)}; hidden states come from run_with_cache.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        embedding = self.hook_embed(self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)
        if cache is None and (self.config.use_cache if use_cache is None else use_cache) and not self.training:
            cache = DynamicCache(config=self.config)
        if cache is not None and "swa" in self.connection.kinds:
            while len(cache.layers) < 2 * self.config.num_hidden_layers:
                cache.layers.append(DynamicLayer())
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(embedding.shape[1], device=embedding.device) + past)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embedding,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        rotary = rotary_angles(position_ids, head_dim, self.config.rope_theta, embedding.dtype)
        hidden = self._run_sites(embedding, rotary, mask, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept] if logits_to_keep is not None else hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    def _run_sites(self, embedding: Tensor, *context: Any) -> Tensor:
        """Drive the connection over all sites with hidden vectors; returns the normed final input."""
        connection = self.connection
        state = connection.start(VECTOR, embedding)
        for site in self.anatomy.sites:
            module = self.site_module(site)
            native = module.emit(connection.route_read(state, site))
            inputs, state = connection.read(VECTOR, state, site, native)
            if site.kind == "final":
                return module(inputs)
            run = self._gradient_checkpointing_func if self.gradient_checkpointing and self.training else _call
            value = run(module.__call__, inputs, *context)
            native = native | module.emit(connection.route_write(state, site, value))
            extras = module.emit_extras(connection.extras(state, site))
            state = connection.write(VECTOR, state, site, native, value, *extras)
        raise AssertionError("an anatomy ends with the final site")

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=std * getattr(module, "init_gain", 1.0))
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, type(self.connection)) and hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _call(function: Any, *args: Any) -> Any:
    return function(*args)

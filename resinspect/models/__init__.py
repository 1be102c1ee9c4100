"""Reference models: importing this package registers them with the Auto classes of transformers."""

from transformers import AutoConfig, AutoModelForCausalLM

from resinspect.models.config import ResidualConfig
from resinspect.models.connections import CONNECTIONS, build_connection
from resinspect.models.decoder import ResidualLM
from resinspect.models.open_attnres import OpenAttnResConfig, OpenAttnResForCausalLM

AutoConfig.register(ResidualConfig.model_type, ResidualConfig)
AutoModelForCausalLM.register(ResidualConfig, ResidualLM)
AutoConfig.register(OpenAttnResConfig.model_type, OpenAttnResConfig)
AutoModelForCausalLM.register(OpenAttnResConfig, OpenAttnResForCausalLM)

__all__ = ["CONNECTIONS", "ResidualConfig", "ResidualLM", "build_connection"]

"""Reference models: importing this package registers them with the Auto classes of transformers."""

from transformers import AutoConfig, AutoModelForCausalLM

from resinspect.models.config import ResidualConfig
from resinspect.models.connections import CONNECTIONS, build_connection
from resinspect.models.decoder import ResidualLM

AutoConfig.register(ResidualConfig.model_type, ResidualConfig)
AutoModelForCausalLM.register(ResidualConfig, ResidualLM)

__all__ = ["CONNECTIONS", "ResidualConfig", "ResidualLM", "build_connection"]

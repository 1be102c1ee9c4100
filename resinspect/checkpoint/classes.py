"""Which class of transformers a checkpoint is of."""

from collections.abc import Iterator
from typing import Any

import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_PRETRAINING_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from resinspect.errors import CheckpointError


def model_classes(config: PreTrainedConfig, where: str, *, trust_remote_code: bool) -> list[type[Any]]:
    """Classes to try in this order: the first that the weights fill, with none left over, is the one.

    First the one that ``config.architectures`` names, if transformers itself has it for this configuration; then the
    causal language model of the configuration; then the model that was pretrained, whose heads published encoders
    hold beside what they name. Code that comes with a checkpoint is used only when it is trusted.

    Raises:
        CheckpointError: If there is none that reads text.
    """
    own_code = getattr(config, "auto_map", None) or {}
    if trust_remote_code and (own := [kind for kind in (AutoModelForCausalLM, AutoModel) if kind.__name__ in own_code]):
        return own[:1]
    classes = [kind for kind in dict.fromkeys(_candidates(config)) if kind.main_input_name == "input_ids"]
    if classes:
        return classes
    named = f" and {', '.join(config.architectures)} under architectures" if config.architectures else ""
    raise CheckpointError(
        f"the config.json of {where} has model_type {config.model_type!r}{named}, which is no causal language model "
        "or other text model of transformers; choose a decoder or a text encoder."
    )


def _candidates(config: PreTrainedConfig) -> Iterator[type[PreTrainedModel]]:
    for name in config.architectures or ():
        kind = getattr(transformers, str(name), None)
        # A name of another model, or of a function, says nothing.
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel) and kind.config_class is type(config):
            yield kind
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_PRETRAINING_MAPPING):
        if type(config) in mapping:
            kind = mapping[type(config)]
            yield from kind if isinstance(kind, tuple) else (kind,)

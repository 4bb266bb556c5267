"""Which of transformers' auto classes builds a model: a language model, or one that also sees."""

from typing import Any

from postgrad.errors import ConfigError

# Ends of the names of reward models' classes.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


def auto_class_of(config: Any) -> Any:
    """Return the auto class for a transformers configuration.

    It is AutoModelForCausalLM if that knows the configuration. A model of text and images, such as
    Qwen3-VL, needs AutoModelForImageTextToText. So does one whose language model alone could be
    loaded (Qwen3.5): its checkpoints would lose the weights that read images. A configuration of
    the model's own code counts as a language model's: transformers knows its own ones by the names
    of their classes, and another one may have the same name.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    from transformers.utils.hub import TRANSFORMERS_DYNAMIC_MODULE_NAME

    kind = type(config)
    is_remote_code = kind.__module__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")
    if is_remote_code or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM
    full_model: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    declared = config.architectures or ()
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING and full_model.__name__ not in declared:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def check_is_language_model(stock_config: Any, path: str) -> None:
    """Raise ConfigError if a transformers configuration is that of a reward model.

    transformers would load its blocks, with a head that was never trained to generate text.
    """
    declared = stock_config.architectures or ()
    if declared and all(name.endswith(CLASSIFIERS) for name in declared):
        raise ConfigError(
            f"model.path={path} is a reward model ({declared[0]}), which generates no text; "
            f"reward.verifier=model:{path} scores responses with it"
        )

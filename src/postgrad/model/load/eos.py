"""The tokens at which a model's folder says that a response ends, beside those of the data."""

from pathlib import Path
from typing import Any

from postgrad.config.schema import Config, ModelConfig
from postgrad.model.load.formats import hub_is_reachable
from postgrad.model.load.load import model_config, resolve_path
from postgrad.model.lora import base_model_config, is_adapter


def declared_ends(config: ModelConfig, tokenizer: Any, seed: int = 0) -> set[int]:
    """Return the token ids of generation_config.json, or of config.json, and the tokenizer's."""
    from transformers import GenerationConfig

    path = resolve_path(config.path, seed)
    if is_adapter(path):
        return declared_ends(base_model_config(config, path), tokenizer, seed)
    is_offline = not Path(path).exists() and not hub_is_reachable()
    try:
        declared = GenerationConfig.from_pretrained(path, local_files_only=is_offline).eos_token_id
    except OSError:  # transformers then reads config.json
        declared = getattr(model_config(config, seed), "eos_token_id", None)
    ends = declared if isinstance(declared, list) else [declared]
    return {end for end in [*ends, tokenizer.eos_token_id] if end is not None}


def describe_end(config: Config, encoder: Any, end: int) -> str:
    """Return a line if responses of the data end with a token at which sampling does not stop.

    `end` is the last token of such a response, `encoder` encodes them. Otherwise the line is empty.
    """
    tokenizer = encoder.tokenizer
    if end not in tokenizer.all_special_ids:
        return ""
    if end in declared_ends(config.model, tokenizer, config.seed):
        return ""
    return (
        f"warning: responses end with {encoder.decode_raw([end])}, at which the trained model "
        f"will not stop: add {end} to eos_token_id in the generation_config.json of model.path"
    )

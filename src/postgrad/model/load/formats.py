"""Formats of stock model folders: the class that builds a model, its processor's files, the hub."""

import shutil
import socket
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from postgrad.errors import WrongValue

HUB_TIMEOUT_S = 3
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
    is_full = any(name.endswith((full_model.__name__, *CLASSIFIERS)) for name in declared)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING and not is_full:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def check_is_language_model(stock_config: Any, path: str) -> None:
    """Raise ConfigError if a transformers configuration is that of a reward model.

    transformers would load its blocks, with a head that was never trained to generate text.
    """
    declared = stock_config.architectures or ()
    if declared and all(name.endswith(CLASSIFIERS) for name in declared):
        raise WrongValue(
            f"model.path={path} is a reward model ({declared[0]}), which generates no text; "
            f"reward.verifier=model:{path} scores responses with it"
        )


# ---- a model and its tokenizer


class Loaded(NamedTuple):
    """A transformers causal language model and its tokenizer."""

    model: Any
    tokenizer: Any


# ---- the hub


def hub_is_reachable() -> bool:
    """Return whether the model hub, or the proxy to it, accepts a connection."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return False
    address = urlsplit(ENDPOINT)
    proxies = getproxies()
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy)
    if not address.hostname:
        return True  # a proxy in an unknown format: let the download try
    default_port = 80 if address.scheme == "http" else 443
    try:
        connection = socket.create_connection(
            (address.hostname, address.port or default_port), timeout=HUB_TIMEOUT_S
        )
    except OSError:
        return False
    connection.close()
    return True


# ---- files that checkpoints keep

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def is_image_text_model(model: Any) -> bool:
    return auto_class_of(model.config).__name__ == "AutoModelForImageTextToText"


def tower_parameters(model: Any) -> dict[str, Any]:
    """Return the parameters of a model of text and images outside of its language model."""
    inside = {id(p) for p in model.get_decoder().parameters()}
    if (head := model.get_output_embeddings()) is not None:
        inside |= {id(p) for p in head.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in inside}


def freeze_tower(model: Any) -> None:
    """Let a model of text and images learn in its language model only."""
    if is_image_text_model(model):
        for parameter in tower_parameters(model).values():
            parameter.requires_grad_(False)


def has_processor(loaded: Loaded) -> bool:
    """Return whether a model of text and images was loaded with the files of its processor."""
    if not is_image_text_model(loaded.model):
        return False
    source = str(loaded.tokenizer.name_or_path)
    is_offline = not _is_folder(source) and not hub_is_reachable()
    return any(_find_file(source, name, is_offline) for name in PROCESSOR_FILES[:2])


def save_tokenizer(loaded: Loaded, folder: Path) -> None:
    """Write the tokenizer, and for a model of text and images what its processor was loaded from.

    Without these files other programs could not give images to the trained model.
    """
    loaded.tokenizer.save_pretrained(folder)
    if not is_image_text_model(loaded.model):
        return
    names = (str(loaded.tokenizer.name_or_path), str(loaded.model.config._name_or_path))
    sources = [source for source in dict.fromkeys(names) if source]
    is_offline = not all(map(_is_folder, sources)) and not hub_is_reachable()
    for name in PROCESSOR_FILES:
        found = [_find_file(source, name, is_offline) for source in sources]
        file = next((file for file in found if file is not None), None)
        if file is not None:
            shutil.copyfile(file, folder / name)


def _is_folder(source: str) -> bool:
    """Return whether a model was loaded from a folder, and not by its name on the hub."""
    return Path(source).is_absolute() or Path(source).exists()


def _find_file(source: str, name: str, is_offline: bool) -> Path | None:
    """Return a file of a model folder, or of a model on the hub; None if it has none."""
    if _is_folder(source):
        file = Path(source) / name
        return file if file.is_file() else None
    from transformers.utils.hub import cached_file

    options: dict[str, Any] = {
        "local_files_only": is_offline,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
        "_raise_exceptions_for_gated_repo": False,
    }
    try:
        found = cached_file(source, name, **options)
    except OSError:  # also a model that is no longer on the hub: the checkpoint matters more
        return None
    return None if found is None else Path(found)

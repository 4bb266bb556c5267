"""A model's tokenizer and the files of its processor of images, which checkpoints keep."""

import shutil
from pathlib import Path
from typing import Any

from postgrad.model.auto_class import auto_class_of
from postgrad.model.hub import hub_is_reachable
from postgrad.model.loaded import Loaded

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def save_tokenizer(loaded: Loaded, folder: Path) -> None:
    """Write the tokenizer, and for a model of text and images what its processor was loaded from.

    Without these files other programs could not give images to the trained model.
    """
    loaded.tokenizer.save_pretrained(folder)
    if auto_class_of(loaded.model.config).__name__ != "AutoModelForImageTextToText":
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

"""Runs `postgrad analyze entropy`: checks all inputs, then computes, then writes the folder."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from postgrad import phases
from postgrad.analysis.data import (
    evenly_spaced,
    make_batch,
    stored_pairs,
)
from postgrad.analysis.entropy import measure, summarize
from postgrad.analysis.figures import draw
from postgrad.analysis.settings import EntropyConfig
from postgrad.errors import Unwritable
from postgrad.evaluation.folder import write
from postgrad.evaluation.model import Target
from postgrad.model.device import choose_device
from postgrad.model.load.context import context_length
from postgrad.model.load.load import load, load_tokenizer, model_config
from postgrad.model.passes.head import head_of
from postgrad.model.threads import set_threads


def analyze_entropy(
    config: EntropyConfig, target: Target
) -> tuple[dict[str, Any], Path, list[Path]]:
    """Return the report, its folder and the figures written there.

    Raises: ConfigError for a model or data that cannot be analyzed; nothing is written then.
    """
    folder = output_folder(config, target)
    device = choose_device(config.model.device)
    config.model.device = device.type
    context = context_length(model_config(config.model))
    tokenizer = load_tokenizer(config.model)
    pairs = stored_pairs(config, tokenizer)
    if config.model.threads:
        set_threads(config.model.threads)
    phases.begin(f"loading {config.model.path}")
    loaded = load(config.model, device)
    vocabulary = len(head_of(loaded.model).weight)
    batch = make_batch(evenly_spaced(pairs, config.rows), vocabulary, context, config.data)
    phases.begin("measuring entropies, tokens")
    entropies = measure(loaded.model, batch, config.token_budget)
    report = {
        "model": target.label,
        "rows": len(batch),
        "vocabulary": vocabulary,
        "ceiling": math.log(vocabulary),
        **summarize(entropies, config.tolerance),
        "settings": dataclasses.asdict(config),
    }
    _write_results(folder, report)
    phases.begin("drawing")
    return report, folder, draw(report, folder)


def _write_results(folder: Path, report: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unwritable(
            f"out={folder} cannot be written: {error.strerror}; choose another out=FOLDER"
        ) from error
    write(folder / "entropy.json", json.dumps(report, indent=1) + "\n")


def output_folder(config: EntropyConfig, target: Target) -> Path:
    """Return `out`; if empty, eval/entropy of the data's or the model's run, else entropy-MODEL.

    Raises: ConfigError when it is a file.
    """
    data = Path(config.data).expanduser()
    if config.out:
        folder = Path(config.out).expanduser()
    elif (data / "rollouts").is_dir():
        folder = data / "eval" / "entropy"
    elif target.run:
        folder = target.run / "eval" / "entropy"
    else:
        folder = Path("entropy-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", target.label))
    if folder.exists() and not folder.is_dir():
        raise Unwritable(f"out={folder} is a file; choose another out=FOLDER")
    return folder

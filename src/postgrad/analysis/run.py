"""`postgrad analyze entropy`, from the model and the data to the folder: everything is looked at before anything is written."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postgrad.analysis import data
from postgrad.analysis.entropy import Probe, measure, summarize
from postgrad.analysis.figures import draw
from postgrad.config.schema import RolloutConfig
from postgrad.data.render import Prompts
from postgrad.errors import ConfigError
from postgrad.evaluation.folder import write
from postgrad.evaluation.model import Target
from postgrad.model.device import choose_device, set_threads
from postgrad.model.load import load, load_tokenizer, model_config
from postgrad.rollout.native.engine import NativeEngine

MAX_ROWS = 64  # decoded at once when problems are answered first
Told = Callable[[str, int, int], None]  # what is going on, how much is done, of how much


def analyze_entropy(
    config: data.EntropyConfig, target: Target, told: Told
) -> tuple[dict[str, Any], Path, list[Path]]:
    """The report, its folder and the figures in it."""
    folder = out_folder(config, target)
    device = choose_device(config.model.device)
    config.model.device = device.type
    shape = model_config(config.model, config.seed).get_text_config()
    tokenizer = load_tokenizer(config.model, config.seed)
    pairs = data.stored_pairs(config, tokenizer)
    room = shape.max_position_embeddings - config.max_response_tokens
    prompts = Prompts(
        tokenizer,
        config.template,
        max(1, room),
        "error",
        config.prompt_style,
        config.template_options,
    )
    problems = [] if pairs is not None else data.read_problems(config, prompts)
    if config.model.threads:
        set_threads(config.model.threads)
    told("loading the model", 0, 0)
    loaded = load(config.model, device, config.seed)
    Probe(loaded.model)  # refuses a model of another layout
    fresh = pairs is None
    if pairs is None:
        told(f"sampling {len(problems) * config.samples} responses", 0, 0)
        pairs = data.sample_pairs(
            config, NativeEngine(loaded, RolloutConfig(max_rows=MAX_ROWS)), prompts, problems
        )
    vocabulary = len(loaded.model.get_output_embeddings().weight)
    batch = data.make_batch(
        data.spread(pairs, config.rows), vocabulary, int(shape.max_position_embeddings), config.data
    )
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        told("entropies", done, batch.num_tokens)

    found = measure(loaded.model, batch, config.token_budget, advance)
    report = {
        "model": target.label,
        "rows": len(batch),
        "vocabulary": vocabulary,
        "ceiling": math.log(vocabulary),
        **summarize(found, config.tolerance),
        "settings": dataclasses.asdict(config),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"out={folder} cannot be written: {error.strerror}; choose another out=FOLDER"
        ) from error
    if fresh:
        data.store_pairs(pairs, folder / "responses.parquet")
    write(folder / "entropy.json", json.dumps(report, indent=1) + "\n")
    told("drawing", 0, 0)
    return report, folder, draw(report, folder)


def out_folder(config: data.EntropyConfig, target: Target) -> Path:
    """eval/entropy of the run that the data or the model comes from, else entropy-MODEL here."""
    if config.out:
        folder = Path(config.out).expanduser()
    elif (Path(config.data).expanduser() / "rollouts").is_dir():
        folder = Path(config.data).expanduser() / "eval" / "entropy"
    elif target.run:
        folder = target.run / "eval" / "entropy"
    else:
        folder = Path("entropy-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", target.label))
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out={folder} is a file; choose another out=FOLDER")
    return folder

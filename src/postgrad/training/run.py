"""The run folder: creating it, locking it, and whether a command continues the run in it.

runs/NAME/ holds config.yaml, metrics.jsonl, events.jsonl, inputs.json, tokenizer.json, rollouts/,
checkpoints/, eval/, and profile/ for profiled steps.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postgrad.config.compose import to_yaml
from postgrad.config.schema import Config, copy_settings
from postgrad.config.stored import CONFIG_FILE, read_stored_config
from postgrad.errors import ConfigError
from postgrad.files import atomic_write_text
from postgrad.job_folder import JobFolder, restore_auto
from postgrad.training import checkpoint

# Settings that a resumed run may change: they do not change what a step computes.
MAY_CHANGE = {
    "name",
    "runs",
    "track",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.max_flat_steps",
    "training.token_budget",
    "model.activation_checkpointing",
    "model.kept_attention_blocks",
    "reward.max_failure_rate",
    "reward.workers",
    "rollout.cache_gib",
    "rollout.max_rows",
    "rollout.tensor_parallel",
    "rollout.url",
    "rollout.max_gap",
    "training.async_save",
    "training.profile_steps",
    "cluster.backend",
    "cluster.workers",
    "cluster.engines",
    "cluster.pools",
    "cluster.offload",
    "cluster.address",
    "cluster.engine_apart",
    "cluster.wait_s",
}

# (section, key, value): with this value a new run takes what the machine offers.
AUTO = (
    ("model", "device", "auto"),
    ("model", "dtype", "auto"),
    ("model", "threads", 0),
    ("model", "activation_checkpointing", None),
    ("model", "kept_attention_blocks", None),
    ("rollout", "max_rows", 0),
    ("rollout", "stop", None),
    ("training", "token_budget", 0),
)


def run_folder(config: Config) -> Path:
    return job_folder(config).path


def job_folder(config: Config) -> JobFolder:
    return JobFolder(Path(config.runs) / config.name, "name=...", "runs=FOLDER")


def resume_config(config: Config) -> Config:
    """Return a copy of the configuration, checked against the run that the folder holds, if any.

    Settings with the value auto become what the run probed at its start, so that a resumed run
    computes the same bits. Raises ConfigError if another setting differs from the stored one.
    """
    config = copy_settings(config)
    folder = run_folder(config)
    if not (folder / CONFIG_FILE).is_file():
        return config
    defaults = dataclasses.asdict(type(config)(method=type(config.method)()))
    stored = _with_defaults(_read_config(folder), defaults)
    restore_auto(config, stored, AUTO)
    if config.training.epochs:  # the run computed its steps from the number of problems
        config.training.steps = stored["training"]["steps"]
    may_change = MAY_CHANGE | _changeable_in(config)
    job_folder(config).check_same(stored, dataclasses.asdict(config), may_change)
    return config


def create_folder(config: Config) -> Path:
    """Create the run folder and write the resolved configuration. Raises ConfigError.

    The configuration of a run that has all these steps stays: nothing is trained with the new one.
    """
    folder = run_folder(config)
    last_step = max(checkpoint.saved_steps(folder), default=0)
    is_kept = (folder / CONFIG_FILE).is_file() and last_step >= config.training.steps
    with job_folder(config).writing():
        for name in ("rollouts", "checkpoints", "eval"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if not is_kept:
            atomic_write_text(folder / CONFIG_FILE, to_yaml(config))
    return folder


@contextmanager
def locked_folder(config: Config, new: bool = False) -> Iterator[None]:
    """Hold the lock of the run folder. Raises ConfigError.

    That is also raised if a `new` folder got a run meanwhile.
    """
    folder = job_folder(config)
    with folder.locked():
        if new and (folder.path / CONFIG_FILE).exists():
            raise ConfigError(
                f"another process has created {folder.path} meanwhile; "
                "the same command continues it"
            )
        yield


def _changeable_in(config: Config) -> set[str]:
    """Return the settings that this run may change besides MAY_CHANGE."""
    keys = set()
    optimizer = config.optimizer
    lr_depends_on_steps = optimizer.schedule != "constant" or optimizer.warmup_ratio > 0
    if not lr_depends_on_steps and not config.rollout.staleness:
        keys.add("training.steps")  # no step depends on the number of steps
    if config.warmup.recipe:
        keys.add("model.path")  # the warm-up run, which checks its own settings, wrote the model
    return keys


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the settings that a run started with. Raises ConfigError."""
    try:
        stored = read_stored_config(folder)
    except ConfigError as error:
        raise ConfigError(f"{error}; use another name=...") from error
    for section, _, _ in AUTO:
        if not isinstance(stored.get(section), dict):
            raise ConfigError(
                f"{folder / CONFIG_FILE} has no section {section}; use another name=..."
            )
    return stored


def _with_defaults(stored: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Add the default of every key that the version which started the run did not have."""
    completed = dict(stored)
    for key, value in defaults.items():
        if isinstance(value, dict) and isinstance(completed.get(key), dict):
            completed[key] = _with_defaults(completed[key], value)
        else:
            completed.setdefault(key, value)
    return completed

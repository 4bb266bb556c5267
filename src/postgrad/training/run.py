"""The run folder: opening it, locking it, and deciding whether a command continues it.

runs/NAME/config.yaml  metrics.jsonl  events.jsonl  tokenizer.json  rollouts/  checkpoints/  eval/
"""

import dataclasses
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from postgrad.config.compose import differences, to_yaml
from postgrad.config.schema import Config
from postgrad.errors import ConfigError

# Settings that may change when a run goes on: they do not change what a step computes.
MAY_CHANGE = {
    "runs",
    "track",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.token_budget",
    "reward.workers",
    "rollout.cache_gib",
    "rollout.url",
    "rollout.max_gap",
    "training.async_save",
    "cluster.place",
    "cluster.workers",
    "cluster.engines",
    "cluster.pools",
    "cluster.offload",
    "cluster.address",
    "cluster.engine_restarts",
    "cluster.engine_apart",
    "cluster.wait_s",
}

# Settings whose value here means: what this machine offers.
AUTO = (
    ("model", "device", "auto"),
    ("model", "dtype", "auto"),
    ("model", "threads", 0),
    ("rollout", "max_rows", 0),
    ("rollout", "stop", None),
    ("training", "token_budget", 0),
)


TRIES = 10


def run_folder(config: Config) -> Path:
    return Path(config.runs) / config.name


def continued(config: Config) -> Config:
    """The configuration to run: the stored one with what may change, when the folder holds a run; else the given one.

    `auto` settings take what the run probed at its start, so that it goes on computing the same bits.
    """
    file = run_folder(config) / "config.yaml"
    if not file.is_file():
        return config
    stored: Any = OmegaConf.to_container(OmegaConf.load(file))
    wanted = dataclasses.asdict(config)
    for section, key, auto in AUTO:
        if wanted[section][key] == auto:
            wanted[section][key] = stored[section].get(key, auto)  # a run of an older version does not know every key
            setattr(getattr(config, section), key, wanted[section][key])
    inside = tuple(f"{key}." for key in MAY_CHANGE)  # of settings that are dictionaries
    changed = [key for key in differences(stored, wanted) if key not in MAY_CHANGE and not key.startswith(inside)]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{run_folder(config)} holds a run with other settings ({key} was {_at(stored, key)}, now {_at(wanted, key)}"
            f"{f', and {len(changed) - 1} more' if len(changed) > 1 else ''}); use another name=..., or the same settings to continue it"
        )
    return config


def create(config: Config) -> Path:
    """Make the folder and write the resolved configuration."""
    folder = run_folder(config)
    try:
        for name in ("rollouts", "checkpoints", "eval"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        aside = folder / ".config.yaml"
        aside.write_text(to_yaml(config))
        aside.rename(folder / "config.yaml")
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}; choose another with runs=FOLDER"
        ) from error
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}; choose another with runs=FOLDER"
        ) from error
    with lock as file:
        for more in reversed(range(TRIES)):  # somebody who only looks whether the run is alive holds it for a moment, too
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not more:
                    raise ConfigError(f"{folder} is in use by another process; wait for it, or use another name=...") from error
                time.sleep(0.02)
        yield


def _at(values: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values.get(part, {})
    return values

"""The run folder: opening it, locking it, and deciding whether a command continues it.

runs/NAME/config.yaml  metrics.jsonl  events.jsonl  tokenizer.json  rollouts/  checkpoints/  eval/  (profile/)
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from postgrad.config.compose import differences, to_yaml
from postgrad.config.schema import Config
from postgrad.errors import ConfigError
from postgrad.files import acquire_lock, atomic_write_text

# Settings that may change when a run goes on: they do not change what a step computes.
MAY_CHANGE = {
    "name",
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
    "training.profile_steps",
    "cluster.backend",
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

# A process that only tests whether the run is alive holds its lock for a moment too.
LOCK_WAIT_S = 0.2


def run_folder(config: Config) -> Path:
    return Path(config.runs) / config.name


def continued(config: Config) -> Config:
    """The configuration to run: the stored one with what may change, when the folder holds a run; else the given one.

    `auto` settings take what the run probed at its start, so that it goes on computing the same bits.
    """
    file = run_folder(config) / "config.yaml"
    if not file.is_file():
        return config
    defaults = dataclasses.asdict(type(config)(method=type(config.method)()))
    stored = _completed(_stored(file), defaults)
    wanted = dataclasses.asdict(config)
    for section, key, auto in AUTO:
        if wanted[section][key] == auto:
            wanted[section][key] = stored[section][key]
            setattr(getattr(config, section), key, wanted[section][key])
    may = MAY_CHANGE | _may_here(config)
    inside = tuple(f"{key}." for key in may)  # of settings that are dictionaries
    changed = [
        key for key in differences(stored, wanted) if key not in may and not key.startswith(inside)
    ]
    if changed:
        key = changed[0]
        raise ConfigError(
            f"{run_folder(config)} holds a run with other settings ({key} was {_at(stored, key)}, now {_at(wanted, key)}"
            f"{f', and {len(changed) - 1} more' if len(changed) > 1 else ''}); use another name=..., or the same settings to continue it"
        )
    return config


def _may_here(config: Config) -> set[str]:
    """Settings that change nothing in this run: its length where no step depends on it, and the place of the model that its `first` run
    left, which compares its own settings."""
    steps = config.optimizer.schedule == "constant" and not config.rollout.staleness
    return ({"training.steps"} if steps else set()) | (
        {"model.path"} if config.warmup.recipe else set()
    )


def create(config: Config) -> Path:
    """Make the folder and write the resolved configuration."""
    folder = run_folder(config)
    try:
        for name in ("rollouts", "checkpoints", "eval"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        atomic_write_text(folder / "config.yaml", to_yaml(config))
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}; choose another with runs=FOLDER"
        ) from error
    return folder


@contextmanager
def locked(folder: Path, new: bool = False) -> Iterator[None]:
    """Hold the folder; the lock goes with the process, however it ends. A `new` one must not have become another's run meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(folder / ".lock", LOCK_WAIT_S)
    except BlockingIOError as error:
        raise ConfigError(
            f"{folder} is in use by another process; wait for it, or use another name=..."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the run folder {folder} cannot be written: {error.strerror}; choose another with runs=FOLDER"
        ) from error
    with lock:
        if new and (folder / "config.yaml").exists():
            raise ConfigError(
                f"another process has made {folder} meanwhile; the same command continues its run"
            )
        yield


def _stored(file: Path) -> dict[str, Any]:
    """The settings a run began with."""
    try:
        stored: Any = OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(
            f"{file} cannot be read: {' '.join(str(error).split())[:200]}; use another name=..."
        ) from error
    sections = {section for section, _, _ in AUTO}
    if not isinstance(stored, dict) or not all(
        isinstance(stored.get(section), dict) for section in sections
    ):
        raise ConfigError(f"{file} is not the configuration of a run; use another name=...")
    return stored


def _completed(stored: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A run of an older version does not know every key: it ran as with the default of those that came since."""
    out = dict(stored)
    for key, value in defaults.items():
        if isinstance(value, dict) and isinstance(out.get(key), dict):
            out[key] = _completed(out[key], value)
        else:
            out.setdefault(key, value)
    return out


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return "not there"
        values = values[part]
    return values

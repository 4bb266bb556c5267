"""The run folder: its lock, its settings, and whether a command continues the run in it.

runs/NAME/ holds config.yaml, metrics.jsonl, events.jsonl, inputs.json, tokenizer.json, rollouts/,
checkpoints/, eval/, and profile/ for profiled steps.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postgrad.config.compose import to_yaml
from postgrad.config.schema import Config, copy_settings
from postgrad.config.stored import CONFIG_FILE, read_stored_config
from postgrad.data.rows.files import READERS, data_files, exists
from postgrad.errors import ConfigError, Damaged, RunError, Unwritable
from postgrad.files import atomic_write_text, sample_files
from postgrad.job_folder import JobFolder, restore_auto
from postgrad.training import checkpoint
from postgrad.training.result import Result

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
    "rollout.max_logprob_difference",
    "training.profile_steps",
    "cluster.backend",
    "cluster.workers",
    "cluster.engines",
    "cluster.pools",
    "cluster.offload",
    "cluster.address",
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
# Settings of earlier versions, with the value that changed nothing.
GONE: dict[str, dict[str, object]] = {
    "optimizer": {"warmup_ratio": 0.0},
    "method": {"correction_normalize": False, "resample": "none", "resample_power": 2.0},
}


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
    stored = _with_defaults(_without_gone(_read_config(folder)), defaults)
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
            raise Unwritable(
                f"another process has created {folder.path} meanwhile; "
                "the same command continues it"
            )
        yield


def _changeable_in(config: Config) -> set[str]:
    """Return the settings that this run may change besides MAY_CHANGE."""
    keys = set()
    optimizer = config.optimizer
    lr_depends_on_steps = optimizer.schedule != "constant" or 0 < optimizer.warmup_steps < 1
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
        raise error.reworded(f"{error}; use another name=...") from error
    for section, _, _ in AUTO:
        if not isinstance(stored.get(section), dict):
            raise Damaged(f"{folder / CONFIG_FILE} has no section {section}; use another name=...")
    return stored


def _without_gone(stored: dict[str, Any]) -> dict[str, Any]:
    """Leave out settings that this version does not have, where they changed nothing."""
    kept = dict(stored)
    for section, idle in GONE.items():
        values = stored.get(section)
        if isinstance(values, dict):
            kept[section] = {k: v for k, v in values.items() if k not in idle or v != idle[k]}
    return kept


def _with_defaults(stored: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Add the default of every key that the version which started the run did not have."""
    completed = dict(stored)
    for key, value in defaults.items():
        if isinstance(value, dict) and isinstance(completed.get(key), dict):
            completed[key] = _with_defaults(completed[key], value)
        else:
            completed.setdefault(key, value)
    return completed


# ---- inputs.json: hashes of the user's files and of the model that the settings name
#
# The settings of a resumed run hold names of files only. The hashes tell whether a reward function,
# a method, a data file or the model folder was changed since the run began.

INPUTS_FILE = "inputs.json"
ENDINGS = (".py", ".txt", ".md", *READERS)
SAMPLED_BYTES = 1 << 20  # of each end of a model's file, which may be too large to read
# What separates names within a setting: a command, a sum of verifiers, a list, NAME=FILE.
SEPARATORS = re.compile(r"[\s,*+=()\[\]]+")


def record_inputs(folder: Path, config: Config) -> None:
    """Write the hashes of a run's files, unless the run has recorded them or there are none.

    Raises RunError if they cannot be written.
    """
    file = folder / INPUTS_FILE
    hashes = {} if file.exists() else _hashes(config)
    if not hashes:
        return
    try:
        atomic_write_text(file, json.dumps(hashes, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{file} could not be written: {error.strerror}") from error


def changed_inputs(folder: Path, config: Config) -> list[str]:
    """Return the names of the files whose content differs from that at the start of the run."""
    try:
        before = json.loads((folder / INPUTS_FILE).read_text())
    except (OSError, ValueError):  # the settings name no file, or somebody removed it
        return []
    now = _hashes(config)
    return [name for name in before if name in now and now[name] != before[name]]


def untrained_note(config: Config, result: Result) -> str:
    """Return the line about a call that found a run whose steps were finished.

    It says what changed, and what to do.
    """
    files = changed_inputs(result.folder, config)
    reason = f" ({', '.join(files)} changed since then)" if files else ""
    setting, value = "training.steps", f"{result.step}"
    if result.step < result.num_steps and config.training.stop_at is not None:
        setting, value = "training.stop_at", f"{config.training.stop_at:g}"
    return (
        f"nothing was trained now{reason}; for a new run add name=NEW, for more steps set "
        f"{setting} above {value}"
    )


def _hashes(config: Config) -> dict[str, str]:
    """Return the hash of each file that a setting names, by its name in the setting.

    The model folder has one hash, by its path.
    """
    settings: dict[str, Any] = dataclasses.asdict(config)
    del settings["model"]
    names = names_in(settings)
    for text in _texts(settings["data"]):
        for word in SEPARATORS.split(text):
            path = Path(word).expanduser()
            if word and exists(path) and path.is_dir():
                names += [str(Path(word) / file.name) for file in sorted(path.iterdir())]
            elif word and not exists(path):  # FOLDER/train: the files of a split
                names += [str(Path(word).parent / file.name) for file in data_files(path)]
    hashes = hash_files(names)
    model = Path(config.model.path).expanduser()
    if exists(model) and model.is_dir():
        hashes[config.model.path] = _model_hash(model)
    return hashes


def names_in(settings: Any) -> list[str]:
    """Return the words of nested settings as names of files; most of them name none."""
    names: list[str] = []
    for text in _texts(settings):
        names += map(_file_name, SEPARATORS.split(text))
    return names


def hash_files(names: Iterable[str]) -> dict[str, str]:
    """Return the hash of each of these files of code, text or data that exists."""
    hashes: dict[str, str] = {}
    for name in names:
        if name.endswith(ENDINGS) and Path(name).expanduser().is_file():
            with Path(name).expanduser().open("rb") as file:
                hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def _model_hash(folder: Path) -> str:
    """Return a hash of the sizes and of both ends of a model folder's files."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    digest = hashlib.sha256()
    for sample in sample_files(files, 2, SAMPLED_BYTES):
        digest.update(sample)
    return digest.hexdigest()


def _file_name(word: str) -> str:
    """Return the file that a word of a setting names: FILE, FILE:COLUMN, FILE:NAME, MODULE:NAME."""
    name, _, attribute = word.partition(":")
    if not attribute:
        return word
    return name if name.endswith(ENDINGS) else name.replace(".", "/") + ".py"


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of nested settings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)

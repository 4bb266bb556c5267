"""Saved adapters on disk. They survive the server: a restarted one lists and loads them.

    FOLDER/RUN/run.json                    base model, rank, layers, user metadata
    FOLDER/RUN/weights/NAME/               adapter and optimizer: training continues from it
    FOLDER/RUN/sampler_weights/NAME/       adapter for sampling
    FOLDER/RUN/external_weights/NAME/      adapter for download, in peft's format

RUN is the id of a training client. `tinker://RUN/weights/NAME` names a checkpoint.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError
from postgrad.files import atomic_folder, atomic_write_text, moved_aside, remove_folder
from postgrad.web import HttpError

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
SCHEME = "tinker://"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,127}")
INFO_FILE = "checkpoint.json"
RUN_FILE = "run.json"
MIN_TTL_S = 3600
MAX_TTL_S = 10 * 366 * 86400


@dataclass
class RunInfo:
    """What run.json holds."""

    base_model: str
    lora_rank: int
    train_attn: bool
    train_mlp: bool
    last_request_time: str
    user_metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """One saved adapter."""

    run_id: str
    kind: str  # weights, sampler_weights or external_weights
    name: str
    folder: Path

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.kind}/{self.name}"


class Checkpoints:
    """The checkpoints below a folder, which is made with the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ---- runs

    def write_run(self, run_id: str, info: RunInfo) -> None:
        """Write the file of a training run."""
        folder = self.folder / run_id
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_text(folder / RUN_FILE, json.dumps(asdict(info)))

    def read_run(self, run_id: str) -> RunInfo:
        """Return what is known of a training run. Raises HttpError: 404 no such run."""
        file = self.folder / run_id / RUN_FILE
        if not RUN_ID.fullmatch(run_id) or not file.is_file():
            raise HttpError(404, f"no training run {run_id[:200]!r} below {self.folder}")
        return RunInfo(**json.loads(file.read_text()))

    def run_ids(self) -> list[str]:
        """Return the ids of all runs that have a file, the latest first."""
        files = self.folder.glob(f"*/{RUN_FILE}")
        ordered = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
        return [file.parent.name for file in ordered]

    # ---- checkpoints

    def save(
        self,
        run_id: str,
        kind: str,
        name: str,
        fill: Callable[[Path], None],
        *,
        ttl_s: int | None = None,
        user_metadata: dict[str, str] | None = None,
        overwrite: bool = False,
    ) -> Checkpoint:
        """Write a checkpoint; `fill` writes its files. Raises ConfigError."""
        check_name(name)
        expires_at = expiry_time(ttl_s)
        folder = self.folder / run_id / kind / name
        if folder.exists() and not overwrite and not _has_expired(_read_info(folder)):
            raise ConfigError(
                f"the checkpoint {name} exists already; choose another name, "
                "or call save_state with overwrite=True"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        new_folder = folder.with_name(f".{name}.new")
        shutil.rmtree(new_folder, ignore_errors=True)
        with atomic_folder(new_folder) as temporary:
            fill(temporary)
            size = sum(file.stat().st_size for file in temporary.iterdir())
            info = {
                "time": _now().isoformat(),
                "size_bytes": size,
                "user_metadata": user_metadata,
                "expires_at": expires_at,
            }
            (temporary / INFO_FILE).write_text(json.dumps(info))
        with moved_aside(folder):
            new_folder.rename(folder)
        return Checkpoint(run_id, kind, name, folder)

    def find(self, path: str) -> Checkpoint:
        """Return the checkpoint of a tinker:// path. Raises HttpError: 400, or 404 not there."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise HttpError(
                400, f"{path[:200]!r} is not a checkpoint; write tinker://RUN/weights/NAME"
            )
        return self.get(*parts)

    def get(self, run_id: str, kind: str, name: str) -> Checkpoint:
        """Return a checkpoint by its parts. Raises HttpError: 404 no such checkpoint."""
        folder = self.folder / run_id / kind / name
        is_valid = RUN_ID.fullmatch(run_id) and kind in KINDS and NAME.fullmatch(name)
        if not is_valid or not folder.is_dir() or _has_expired(_read_info(folder)):
            shown = f"{SCHEME}{run_id}/{kind}/{name}"[:200]
            raise HttpError(404, f"no checkpoint {shown} below {self.folder}")
        return Checkpoint(run_id, kind, name, folder)

    def list(self, run_id: str) -> list[dict[str, Any]]:
        """Return a run's checkpoints as the client wants them, oldest first.

        Those that have expired are removed.
        """
        found: list[dict[str, Any]] = []
        for folder in (self.folder / run_id).glob("*/*"):
            if folder.parent.name not in KINDS or not NAME.fullmatch(folder.name):
                continue
            info = _read_info(folder)
            if _has_expired(info):
                remove_folder(folder)
                continue
            checkpoint = Checkpoint(run_id, folder.parent.name, folder.name, folder)
            found.append(
                {
                    "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
                    "checkpoint_type": KINDS[checkpoint.kind],
                    "tinker_path": checkpoint.path,
                    **info,
                }
            )
        return sorted(found, key=lambda entry: entry["time"])

    def delete(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint."""
        remove_folder(checkpoint.folder)

    def set_expiry(self, checkpoint: Checkpoint, ttl_s: int | None) -> None:
        """Let a checkpoint expire after this time; None: never. Raises ConfigError."""
        info = _read_info(checkpoint.folder) | {"expires_at": expiry_time(ttl_s)}
        atomic_write_text(checkpoint.folder / INFO_FILE, json.dumps(info))


def check_name(name: str) -> None:
    """Raise ConfigError for a name that cannot be a folder's."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"checkpoint name {name[:150]!r}: use up to 128 letters, digits, - _ and ."
        )


def expiry_time(ttl_s: int | None) -> str | None:
    """Return the time after `ttl_s` seconds as text; None for None. Raises ConfigError."""
    if ttl_s is None:
        return None
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise ConfigError(f"ttl_seconds={ttl_s} is out of range; it must be {MIN_TTL_S} or more")
    return (_now() + timedelta(seconds=ttl_s)).isoformat()


def _read_info(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INFO_FILE).read_text())


def _has_expired(info: dict[str, Any]) -> bool:
    expires_at = info["expires_at"]
    return expires_at is not None and datetime.fromisoformat(expires_at) < _now()


def _now() -> datetime:
    return datetime.now(UTC)

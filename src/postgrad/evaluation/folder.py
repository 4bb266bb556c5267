"""The folder of a result: OUT/settings.json, SET.jsonl of each set, summary.json, report.md.

A result file grows batch by batch in the order of the problems. What a kill left of the last batch is dropped, and the batch is answered
again from its start, so the engine sees the same batches as without the kill.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postgrad.config.compose import differences
from postgrad.errors import ConfigError, RunError
from postgrad.files import acquire_lock, append_bytes, atomic_write_text
from postgrad.judge.llm import RATINGS_STEM
from postgrad.problem import Problem

AUTO = (
    ("model", "device", "auto"),
    ("model", "dtype", "auto"),
    ("model", "threads", 0),
    ("rollout", "batch", 0),
)


def stored_settings(folder: Path) -> dict[str, Any] | None:
    """What the folder's results depend on; None where there is no such folder yet.

    Raises:
        ConfigError: the folder is something else.
    """
    file = folder / "settings.json"
    if not file.is_file():
        if folder.exists() and (
            not folder.is_dir()
            or any(
                path.name not in (".lock", ".settings.json.partial") for path in folder.iterdir()
            )
        ):
            raise ConfigError(
                f"out={folder} is there already and is no evaluation; choose another out=FOLDER"
            )
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(
            f"{file} is not JSON ({error}); remove the folder, or choose another out=FOLDER"
        ) from error


def take_over(stored: dict[str, Any], settings: Any) -> None:
    """Let `auto` settings be what they were when the folder's results began."""
    for section, key, auto in AUTO:
        if getattr(getattr(settings, section), key) == auto:
            setattr(getattr(settings, section), key, stored.get(section, {}).get(key, auto))


def check_same(folder: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse to put results of two settings into one folder."""
    changed = differences(stored, json.loads(json.dumps(wanted)))
    if changed:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        key = changed[0]
        raise ConfigError(
            f"{folder} holds an evaluation with other settings ({key} was {_at(stored, key)}, now {_at(wanted, key)}{more}); "
            "choose another out=FOLDER, or use the same settings to continue it"
        )


@contextmanager
def opened(folder: Path, identity: dict[str, Any]) -> Iterator[None]:
    """Make and hold the folder; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = acquire_lock(folder / ".lock")
    except BlockingIOError as error:
        raise ConfigError(
            f"{folder} is in use by another process; wait for it, or choose another out=FOLDER"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"out={folder} cannot be written: {error.strerror}; choose another out=FOLDER"
        ) from error
    with lock:
        if not (folder / "settings.json").is_file():
            write(folder / "settings.json", json.dumps(identity, indent=1) + "\n")
        yield


def write(file: Path, text: str) -> None:
    """Write the file atomically. Raises RunError."""
    try:
        atomic_write_text(file, text)
    except OSError as error:
        raise RunError(f"{file} could not be written: {error.strerror}") from error


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add a batch's lines and see them on the disk."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        append_bytes(file, lines.encode())
    except OSError as error:
        raise RunError(
            f"{file} could not be written: {error.strerror}; the same command continues"
        ) from error


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(where the line ends, the line) of a result file; ends at a line that a kill cut short.

    Raises:
        ConfigError: a line that is not the last is broken.
    """
    end = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            end += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{file}: line {number} is damaged; remove the file, and its set is answered again"
                ) from error
            yield end, row


def set_names(folder: Path) -> list[str]:
    """The sets that a folder holds results of."""
    return sorted(path.stem for path in folder.glob("*.jsonl") if path.stem != RATINGS_STEM)


def resume(file: Path, problems: Sequence[Problem], samples: int, batch: int) -> int:
    """The number of problems that are answered already; cuts the file back to whole batches.

    Raises:
        ConfigError: the file's lines are not these problems'.
    """
    if not file.is_file():
        return 0
    whole, keep = 0, 0
    for line, (end, row) in enumerate(read_rows(file)):
        index, sample = divmod(line, samples)
        if index >= len(problems) or (row.get("uid"), row.get("sample")) != (
            problems[index].uid,
            sample,
        ):
            raise ConfigError(
                f"{file}: line {line + 1} is not the answer that belongs there; remove the file to answer its set again"
            )
        answered = index + 1
        if sample == samples - 1 and (answered % batch == 0 or answered == len(problems)):
            whole, keep = answered, end
    if keep < file.stat().st_size:
        with file.open("r+b") as stream:
            stream.truncate(keep)
    return whole


def _at(values: dict[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found

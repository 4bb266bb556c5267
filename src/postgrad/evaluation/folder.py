"""The result folder of an evaluation: settings.json, SET.jsonl per set, summary.json, report.md.

A result file grows batch by batch, in the order of the problems. After a kill, the incomplete
last batch is removed and generated again, so the engine gets the same batches as without the
kill.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError, Damaged, RunError, Unwritable, first_line
from postgrad.files import append_bytes, atomic_write_text
from postgrad.job_folder import LOCK_FILE, JobFolder
from postgrad.judge.llm import RATINGS_STEM
from postgrad.problem import Problem

# (section, key, value that means "choose for this machine")
AUTO = (
    ("model", "device", "auto"),
    ("model", "dtype", "auto"),
    ("model", "threads", 0),
    ("rollout", "batch", 0),
)
# Files that a folder may have before settings.json is written.
UNFINISHED = (LOCK_FILE, ".settings.json.partial")


def stored_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings the folder's results depend on; None if the folder is new or empty.

    Raises:
        ConfigError: the folder is not an evaluation.
    """
    file = folder / "settings.json"
    if not file.is_file():
        if folder.exists() and not _is_unused(folder):
            raise Unwritable(
                f"out={folder} exists and is not an evaluation; choose another out=FOLDER"
            )
        return None
    try:
        return read_json_object(file)
    except ConfigError as error:
        text = f"{error}; remove the folder, or choose another out=FOLDER"
        raise error.reworded(text) from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{file} is not JSON ({first_line(error)})") from error
    if not isinstance(value, dict):
        raise Damaged(f"{file} is not a JSON object")
    return value


def _is_unused(folder: Path) -> bool:
    return folder.is_dir() and all(path.name in UNFINISHED for path in folder.iterdir())


def output_folder(out: str, parent: Path, label: str, identity: dict[str, Any]) -> Path:
    """Return `out`; if empty, eval/LABEL-HASH in the parent folder."""
    if out:
        return Path(out).expanduser()
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return parent / "eval" / f"{label}-{digest}"


def job_folder(folder: Path) -> JobFolder:
    return JobFolder(folder, "out=FOLDER", "out=FOLDER")


def check_same_settings(folder: Path, stored: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise ConfigError if the current settings differ from those of the folder's results."""
    job_folder(folder).check_same(stored, json.loads(json.dumps(current)))


@contextmanager
def locked_folder(folder: Path, identity: dict[str, Any]) -> Iterator[None]:
    """Create the folder with its settings.json and hold its lock until the block ends.

    Raises: ConfigError if another process has the lock, the folder has results of other settings,
    or it cannot be written.
    """
    with job_folder(folder).locked():
        stored = stored_settings(folder)
        if stored is None:
            write(folder / "settings.json", json.dumps(identity, indent=1) + "\n")
        else:  # perhaps written by another process since the caller read them
            check_same_settings(folder, stored, identity)
        yield


def write(file: Path, text: str) -> None:
    """Write the file atomically. Raises RunError."""
    try:
        atomic_write_text(file, text)
    except (OSError, ValueError) as error:  # ValueError: a path without a file name
        raise RunError(f"{file} could not be written: {first_line(error)}") from error


def append(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append one line per row and wait for the disk. Raises RunError."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        append_bytes(file, lines.encode())
    except OSError as error:
        raise RunError(
            f"{file} could not be written: {error.strerror}; run the same command to continue"
        ) from error


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (byte offset of the line's end, row) per line; stop at an incomplete last line.

    Raises:
        ConfigError: a complete line is not JSON.
    """
    end = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            end += len(line)
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise Damaged(
                    f"{file}: line {number} is not JSON; remove the file to evaluate its set again"
                ) from error
            yield end, row


def set_names(folder: Path) -> list[str]:
    """Return the sets of which the folder has results."""
    return sorted(path.stem for path in folder.glob("*.jsonl") if path.stem != RATINGS_STEM)


def resume(file: Path, problems: Sequence[Problem], samples: int, batch: int) -> int:
    """Truncate the file after its last complete batch; return the number of problems in it.

    Raises:
        ConfigError: a line is not the response expected at its position.
    """
    if not file.is_file():
        return 0
    num_complete = 0
    complete_bytes = 0
    for line, (end, row) in enumerate(read_rows(file)):
        index, sample = divmod(line, samples)
        if index >= len(problems) or not _is_response(row, problems[index], sample):
            raise Damaged(
                f"{file}: line {line + 1} is not the expected response; "
                "remove the file to evaluate its set again"
            )
        answered = index + 1
        if sample == samples - 1 and (answered % batch == 0 or answered == len(problems)):
            num_complete = answered
            complete_bytes = end
    if complete_bytes < file.stat().st_size:
        with file.open("r+b") as stream:
            stream.truncate(complete_bytes)
    return num_complete


def _is_response(row: dict[str, Any], problem: Problem, sample: int) -> bool:
    return row.get("uid") == problem.uid and row.get("sample") == sample

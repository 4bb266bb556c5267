"""What a run writes per step: one line of metrics.jsonl and one parquet file of trajectories.

The pictures of trajectories are files of their own, written once: pictures/KEY.png.

The web page, resume, plots and tests read these files.
"""

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from postgrad.data.rollout_folder import rollout_files, write_pictures
from postgrad.errors import RunError
from postgrad.files import (
    atomic_file,
    atomic_write_text,
    fsync_path,
    remove_folder,
)
from postgrad.methods.support.responses import reward_metrics
from postgrad.types import SOURCE_NAMES, Batch

# Small row groups let a reader load one problem's rows from a large file.
TOKENS_PER_ROW_GROUP = 1 << 16
MIN_ROWS_PER_ROW_GROUP = 64
ANSWER_FOLDER = re.compile(r"validation-([0-9]{6,})")
TIMING_METRICS = ("time", "tokens_per_second", "memory_gib", "step_s")


def is_timing(name: str) -> bool:
    """Whether a metric measures time or memory; two runs of one seed differ only in these."""
    return name in TIMING_METRICS or name.startswith(("stage/", "wait/"))


class RunLog:
    """Writes metrics.jsonl and rollouts/ of one run that continues after step `start`.

    What a killed run wrote after that step is removed, answers of its validations too.
    """

    def __init__(self, folder: Path, start: int) -> None:
        self.folder = folder
        self.unsynced: list[Path] = []  # rollout files that may not be on the disk yet
        try:
            self._remove_after(start)
            self.file = (folder / "metrics.jsonl").open("a")
        except OSError as error:
            raise RunError(
                f"metrics and rollouts in {folder} cannot be continued: {error.strerror}"
            ) from error

    def _remove_after(self, step: int) -> None:
        """Remove what a killed run wrote after checkpoint `step`; for step 0 everything."""
        metrics = self.folder / "metrics.jsonl"
        if metrics.is_file():
            lines = read_metrics(self.folder) if step > 0 else []
            kept = [json.dumps(line) + "\n" for line in lines if line["step"] <= step]
            atomic_write_text(metrics, "".join(kept))
        rollouts = self.folder / "rollouts"
        for path in rollouts.glob(".step-*"):  # unfinished when the run was killed
            path.unlink()
        for number, path in rollout_files(rollouts).items():
            if number > step:
                path.unlink()
        for number, path in answer_folders(self.folder).items():
            if number > step:
                remove_folder(path)

    def write(self, number: int, metrics: dict[str, float]) -> dict[str, float]:
        """Append and return one line; a validation of the same step is a separate line."""
        line: dict[str, float] = {"step": number, "time": time.time()}
        for name, value in metrics.items():
            line[name] = float(value)
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:
            raise RunError(f"metrics.jsonl could not be written: {error.strerror}") from error
        return line

    def write_rollouts(self, number: int, batches: list[Batch]) -> None:
        """Write all trajectories of a step, including those without a verdict."""
        path = self.folder / "rollouts" / f"step-{number:06d}.parquet"
        try:
            shown = [row for batch in batches for row in batch.rows.get("images", ())]
            self.unsynced += write_pictures(self.folder, chain.from_iterable(shown))
            table = pa.concat_tables([_table(b) for b in batches], promote_options="default")
            num_tokens = max(1, sum(batch.num_tokens for batch in batches))
            rows = max(MIN_ROWS_PER_ROW_GROUP, len(table) * TOKENS_PER_ROW_GROUP // num_tokens)
            with atomic_file(path, fsync=False) as temporary:
                pq.write_table(table, temporary, row_group_size=rows)
            self.unsynced.append(path)
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror or error}") from error

    def sync(self) -> None:
        """Wait until the disk has everything written so far.

        Called before each checkpoint: after a power failure a checkpoint must not be newer than
        its metrics. Raises RunError.
        """
        for path in [self.folder / "metrics.jsonl", *self.unsynced, self.folder / "rollouts"]:
            try:
                fsync_path(path)
            except OSError as error:
                raise RunError(f"{path} could not be written: {error.strerror}") from error
        self.unsynced = []

    def close(self) -> None:
        # A line that a full disk refused is still in the buffer; write() raised its error.
        with suppress(OSError):
            self.file.close()


def answer_folders(run: Path) -> dict[int, Path]:
    """Return the folder of each validation of a run, by step; other evaluations are left out."""
    folders: dict[int, Path] = {}
    for path in (run / "eval").glob("validation-*"):
        if match := ANSWER_FOLDER.fullmatch(path.name):
            folders[int(match[1])] = path
    return folders


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, without one that a kill cut short."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for text in file.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # a kill cut the line short
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


def missing_steps(folder: Path, start: int) -> list[int]:
    """Return the steps up to `start` that have no line in metrics.jsonl."""
    present = {line["step"] for line in read_metrics(folder)}
    return sorted(set(range(1, start + 1)) - present)


def batch_metrics(batch: Batch, failed: Sequence[Batch] = ()) -> dict[str, float]:
    """Return the metrics of a step's trajectories: lengths, rewards, rows with a signal.

    Responses that could not be scored, which are `failed`, count in lengths only.
    """
    parts = [batch, *failed]
    lengths = torch.cat([part.response.lengths for part in parts]).double()
    finishes = [finish for part in parts for finish in part.rows["finish"]]
    metrics = {
        "response/length": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": finishes.count("length") / len(finishes),
        "prompt/length": float(batch.prompt.lengths.double().mean()),
    }
    metrics |= reward_metrics(batch)
    if "advantages" in batch.tokens:
        has_signal = batch.sum_tokens(batch.tokens["advantages"].abs()) > 0
        metrics["advantages/rows_with_signal"] = float(has_signal.double().mean())
    return metrics


def _table(batch: Batch) -> pa.Table:
    """Return one row per trajectory; per-token columns become lists.

    A column with several numbers per token is left out: it would be much larger than the rest.
    """
    columns: dict[str, Any] = {
        "prompt": _lists(batch.prompt.values, batch.prompt.lengths),
        "response": _lists(batch.response.values, batch.response.lengths),
    }
    for name, column in batch.rows.items():
        if name == "kept_ids":  # many times the size of the rest; num_kept has their numbers
            continue
        values: Any = column.tolist() if isinstance(column, torch.Tensor) else column
        if name == "images":
            values = [[picture.key for picture in row] for row in values]
        if name == "source":
            values = [SOURCE_NAMES[value] for value in values]
        columns[name] = values
    for name, column in batch.tokens.items():
        if column.ndim > 1:
            continue
        columns[name] = _lists(column, batch.response.lengths)
    return pa.table(columns)


def _lists(values: torch.Tensor, lengths: torch.Tensor) -> pa.Array:
    """Return one list per row of flat values; nan becomes null.

    The entropy of a row that no pass computed is nan.
    """
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    flat = pa.array(values.cpu().numpy(), from_pandas=True)
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), flat)

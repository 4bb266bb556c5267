"""What a run writes each step: a line of metrics and a parquet file of trajectories. The page, resume, plots and tests read these."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from postgrad.errors import RunError
from postgrad.files import atomic_file, atomic_write_bytes, fsync_path
from postgrad.methods.base import Step
from postgrad.types import SOURCE_NAMES, Batch

TOKENS_PER_ROW_GROUP = (
    1 << 16
)  # a reader who wants one problem's group then reads a part of a large file
# Metrics that tell of the clock or the machine, not of the computation: two runs of one seed differ only in these.
CLOCK = ("time", "tokens_per_second", "memory_gib", "step_s")


def is_clock(name: str) -> bool:
    return name in CLOCK or name.startswith(("stage/", "wait/"))


class RunLog:
    """metrics.jsonl and rollouts/ of one run."""

    def __init__(self, folder: Path, start: int) -> None:
        self.folder = folder
        self.unsynced: list[Path] = []  # rollouts that the disk may not have yet
        try:
            self._forget_after(start)
            self.file = (folder / "metrics.jsonl").open("a")
        except OSError as error:
            raise RunError(
                f"{folder} could not be made ready to go on: {error.strerror}"
            ) from error

    def _forget_after(self, step: int) -> None:
        """Drop what a killed run wrote after the checkpoint it goes on from; without one (step 0) all of it."""
        lines = [line for line in read_metrics(self.folder) if 0 < step >= line["step"]]
        if (self.folder / "metrics.jsonl").is_file():
            atomic_write_bytes(
                self.folder / "metrics.jsonl",
                "".join(json.dumps(line) + "\n" for line in lines).encode(),
            )
        for path in (self.folder / "rollouts").glob(".step-*"):  # cut short by a kill
            path.unlink()
        for path in (self.folder / "rollouts").glob("step-*.parquet"):
            number = path.stem.removeprefix("step-")
            if number.isdigit() and int(number) > step:
                path.unlink()

    def write(self, number: int, metrics: dict[str, float]) -> dict[str, float]:
        """Append one line; a validation of the same step is a line of its own."""
        line = {"step": number, "time": time.time(), **{k: float(v) for k, v in metrics.items()}}
        try:
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        except OSError as error:
            raise RunError(f"metrics.jsonl could not be written: {error.strerror}") from error
        return line

    def write_rollouts(self, number: int, batches: list[Batch]) -> None:
        """All trajectories of a step, those that could not be judged included."""
        path = self.folder / "rollouts" / f"step-{number:06d}.parquet"
        try:
            table = pa.concat_tables([_table(b) for b in batches], promote_options="default")
            rows = max(
                64, len(table) * TOKENS_PER_ROW_GROUP // max(1, sum(b.num_tokens for b in batches))
            )
            with atomic_file(path, fsync=False) as temporary:  # sync() does it later
                pq.write_table(table, temporary, row_group_size=rows)
            self.unsynced.append(path)
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror or error}") from error

    def sync(self) -> None:
        """Wait until the disk has all that was written: a checkpoint must not outlive the lines before it when the machine goes down."""
        for path in [self.folder / "metrics.jsonl", *self.unsynced, self.folder / "rollouts"]:
            fsync_path(path)
        self.unsynced = []

    def close(self) -> None:
        with suppress(
            OSError
        ):  # a line that a full disk refused is still in the buffer; the error was raised when it was written
            self.file.close()


@contextmanager
def timed(step: Step, name: str) -> Iterator[None]:
    """Time a stage into the step's metrics, and name it when it fails and in a profile."""
    start = time.perf_counter()
    try:
        with torch.profiler.record_function(name):
            yield
    except RunError as error:
        raise RunError(f"step {step.number}, stage {name}: {error}") from error
    except Exception as error:
        error.add_note(f"in step {step.number}, stage {name}")
        raise
    step.metrics[f"stage/{name.removeprefix('compute_')}_s"] = time.perf_counter() - start


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a kill cut short is left out."""
    file = folder / "metrics.jsonl"
    out: list[dict[str, Any]] = []
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            out.append(found)
    return out


def missing_steps(folder: Path, start: int) -> list[int]:
    """Steps up to `start` of which metrics.jsonl says nothing."""
    return sorted(set(range(1, start + 1)) - {line["step"] for line in read_metrics(folder)})


def describe(batch: Batch) -> dict[str, float]:
    """Metrics of a step's trajectories."""
    lengths = batch.response.lengths.double()
    out = {
        "response/length": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/truncated": sum(f == "length" for f in batch.rows["finish"]) / len(batch),
        "prompt/length": float(batch.prompt.lengths.double().mean()),
    }
    for name, column in batch.rows.items():
        if name == "reward":
            out["reward/mean"] = float(column.double().mean())
            out["reward/std"] = float(column.double().std(unbiased=False))
        elif name.startswith("reward/"):
            out[name] = float(column.double().nanmean())
    if "advantages" in batch.tokens:
        signal = batch.sum_tokens(batch.tokens["advantages"].abs()) > 0
        out["advantages/rows_with_signal"] = float(signal.double().mean())
    return out


def _table(batch: Batch) -> pa.Table:
    columns: dict[str, Any] = {
        "prompt": _lists(batch.prompt.values, batch.prompt.lengths),
        "response": _lists(batch.response.values, batch.response.lengths),
    }
    for name, column in batch.rows.items():
        values = column.tolist() if isinstance(column, torch.Tensor) else column
        columns[name] = [SOURCE_NAMES[v] for v in values] if name == "source" else values
    for name, column in batch.tokens.items():
        columns[name] = _lists(column, batch.response.lengths)
    return pa.table(columns)


def _lists(values: torch.Tensor, lengths: torch.Tensor) -> pa.Array:
    """A list a row; what is not a number, as the entropy of a row that no pass computed, is null."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets.numpy()), pa.array(values.cpu().numpy(), from_pandas=True)
    )

"""Which steps sampled a problem, and with which rewards: an index over all rollouts of a run."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from postgrad.view.reader import Unreadable, open_parquet, round_number


@dataclass(frozen=True, order=True)
class Visit:
    """One group of a problem: its step, mean and best reward, and number of responses."""

    step: int
    group: int
    reward: float | None
    best: float | None
    rows: int


class ProblemIndex:
    """The visits of every problem of a run. A thread reads the files."""

    MAX_VISITS = 2_000_000

    def __init__(self) -> None:
        self._visits: dict[str, list[Visit]] = {}
        self._read_files: dict[Path, int] = {}  # file -> modification time when it was read
        self._size = 0
        self._worker: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def num_files(self) -> int:
        """Number of files that were read."""
        return len(self._read_files)

    def update(self, files: Sequence[tuple[int, Path]], wait_s: float = 0.3) -> None:
        """Start to read new files, given as (step, file); return after at most `wait_s`."""
        with self._lock:
            if self._worker is None or not self._worker.is_alive():
                if self._has_changed_file(files):  # a resumed run wrote these steps again
                    self._visits = {}
                    self._read_files = {}
                    self._size = 0
                new = [(step, file) for step, file in files if file not in self._read_files]
                self._worker = threading.Thread(target=self._read, args=(new,), daemon=True)
                self._worker.start()
            worker = self._worker
        worker.join(wait_s)

    def _has_changed_file(self, files: Sequence[tuple[int, Path]]) -> bool:
        return any(self._read_files.get(file) not in (None, _mtime(file)) for _, file in files)

    def _read(self, files: Sequence[tuple[int, Path]]) -> None:
        for step, file in files:
            if self._size > self.MAX_VISITS:
                return
            try:
                modified = _mtime(file)
                visits = read_visits(file, step)
            except (OSError, pa.ArrowException, Unreadable):  # being written, or damaged
                continue
            for uid, visit in visits:
                self._visits.setdefault(uid, []).append(visit)
            self._size += len(visits)
            self._read_files[file] = modified

    def visits(self, uid: str) -> list[Visit]:
        """Return the visits of one problem, by step."""
        return sorted(self._visits.get(uid, []), key=lambda visit: (visit.step, visit.group))


def read_visits(file: Path, step: int) -> list[tuple[str, Visit]]:
    """(uid, visit) of each group of a step."""
    opened = open_parquet(file)
    names = [name for name in ("uid", "group", "reward") if name in opened.schema_arrow.names]
    if "uid" not in names:
        return []
    table = opened.read(columns=names)
    uids = table["uid"].to_pylist()
    groups = table["group"].to_pylist() if "group" in names else list(range(len(uids)))
    rewards = table["reward"].to_pylist() if "reward" in names else [None] * len(uids)
    counts: dict[tuple[str, int], int] = {}
    known_rewards: dict[tuple[str, int], list[float]] = {}
    for uid, group, reward in zip(uids, groups, rewards, strict=True):
        counts[uid, group] = counts.get((uid, group), 0) + 1
        if reward is not None and not math.isnan(reward):
            known_rewards.setdefault((uid, group), []).append(reward)
    visits: list[tuple[str, Visit]] = []
    for (uid, group), count in counts.items():
        values = known_rewards.get((uid, group))
        mean = round_number(sum(values) / len(values)) if values else None
        best = round_number(max(values)) if values else None
        visits.append((uid, Visit(step, group, mean, best, count)))
    return visits


def _mtime(file: Path) -> int:
    return file.stat().st_mtime_ns

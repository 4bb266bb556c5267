"""The trajectories of a run's steps. Reads only the columns and row groups a question needs."""

import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from postgrad.view.folder import NotFound
from postgrad.view.runs import Run
from postgrad.view.tokens import Pieces

pc: Any = (
    pyarrow.compute
)  # its functions are made when it is imported, so that no checker knows them
SOURCES = (
    "policy",
    "demonstration",
    "replay",
    "classmate",
    "tool",
)  # what the numbers of token_source mean
NAME = re.compile(r"step-(\d+)\.parquet")
SNIPPET = 240  # characters of a response in lists
MOST_TOKENS = 3000  # of one response, unless all are asked for
MOST_TEXT = 200_000  # characters of one text column
KEPT_STEPS = 6
KEPT_INDEXES = 3
BUDGET_S = 0.7  # a search over the whole run answers with what it has after so long, and says where to go on
# What a row is known by; everything else a method added is shown below the response.
KNOWN = {
    "prompt",
    "response",
    "uid",
    "group",
    "index",
    "source",
    "finish",
    "text",
    "question",
    "failure",
    "reward",
}

FILTERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda row: True,
    "right": lambda row: row["reward"] is not None and row["reward"] > 0,
    "wrong": lambda row: row["reward"] is not None and row["reward"] <= 0,
    "truncated": lambda row: row["finish"] == "length",
    "failed": lambda row: bool(row["failure"]),
    "given": lambda row: row["source"] not in ("", "policy"),
}
SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "order": lambda row: row["row"],
    "longest": lambda row: -row["length"],
    "shortest": lambda row: row["length"],
    "reward": lambda row: -(row["reward"] if row["reward"] is not None else -math.inf),
    "advantage": lambda row: -abs(row["advantage"] or 0.0),
}


@dataclass
class Listing:
    """The rows of one step without their tokens."""

    stamp: tuple[int, int]
    rows: list[dict[str, Any]]
    texts: "pa.ChunkedArray | None"
    questions: "pa.ChunkedArray | None"
    parts: list[str]


class Rollouts:
    """Answers about the rollouts of all runs; keeps a few listings and problem indexes."""

    def __init__(self) -> None:
        self._listings: dict[Path, Listing] = {}
        self._indexes: dict[Path, Index] = {}
        self._lock = threading.Lock()

    def steps(self, run: Run) -> list[int]:
        """Steps that have a file, in order."""
        folder = run.file("rollouts")
        if folder is None or not folder.is_dir():
            return []
        return sorted(int(m[1]) for path in folder.iterdir() if (m := NAME.fullmatch(path.name)))

    def file(self, run: Run, step: int) -> Path:
        file = run.file("rollouts", f"step-{step:06d}.parquet")
        if file is None:
            raise NotFound(f"step {step}")
        return file

    def listing(self, run: Run, step: int) -> Listing:
        file = self.file(run, step)
        stamp = (file.stat().st_mtime_ns, file.stat().st_size)
        with self._lock:
            kept = self._listings.pop(file, None)
            if kept is None or kept.stamp != stamp:
                kept = read_listing(file, stamp)
            while len(self._listings) >= KEPT_STEPS:
                self._listings.pop(next(iter(self._listings)))
            self._listings[file] = kept
        return kept

    def groups(
        self,
        run: Run,
        step: int,
        keep: str,
        sort: str,
        search: str,
        start: int,
        count: int,
        pieces: Pieces | None = None,
    ) -> dict[str, Any]:
        """The groups of a step whose rows pass, in the order asked for; rows that do not pass are marked, not hidden."""
        listing = self.listing(run, step)
        hits = matches(listing, search)
        passing = [
            row
            for row in listing.rows
            if FILTERS[keep](row) and (hits is None or row["row"] in hits)
        ]
        order = list(dict.fromkeys(row["group"] for row in sorted(passing, key=SORTS[sort])))
        chosen = {row["row"] for row in passing}
        shown = order[start : start + count]
        members: dict[Any, list[dict[str, Any]]] = {group: [] for group in shown}
        for row in listing.rows:
            if row["group"] in members:
                members[row["group"]].append({**row, "passes": row["row"] in chosen})
        if listing.texts is None and pieces and members:
            spell_out(
                self.file(run, step), [row for rows in members.values() for row in rows], pieces
            )
        return {
            "step": step,
            "rows": len(listing.rows),
            "passing": len(passing),
            "total": len(order),
            "counts": {name: sum(map(passes, listing.rows)) for name, passes in FILTERS.items()},
            "groups": [
                {"group": g, "uid": rows[0]["uid"], "question": rows[0]["question"], "rows": rows}
                for g, rows in members.items()
            ],
        }

    def group(
        self, run: Run, step: int, group: int, pieces: Pieces | None, full: bool
    ) -> dict[str, Any]:
        """One group with its tokens and all their columns."""
        listing = self.listing(run, step)
        numbers = [row["row"] for row in listing.rows if row["group"] == group]
        if not numbers:
            raise NotFound(f"group {group}")
        table = read_rows(self.file(run, step), numbers)
        columns = token_columns(table)
        rows = [row_with_tokens(table, i, columns, pieces, full) for i in range(table.num_rows)]
        prompt = table["prompt"][0].as_py() if "prompt" in table.column_names else []
        prompt = prompt if full else prompt[-MOST_TOKENS:]
        prompts = pieces.split(prompt) if pieces else None
        order = list(dict.fromkeys(row["group"] for row in listing.rows))
        at = order.index(group)
        return {
            "step": step,
            "group": group,
            "uid": listing.rows[numbers[0]]["uid"],
            "question": listing.rows[numbers[0]]["question"],
            "prompt": {"ids": prompt, "texts": prompts},
            "before": order[at - 1] if at else None,
            "after": order[at + 1] if at + 1 < len(order) else None,
            "position": [at + 1, len(order)],
            "sources": SOURCES,
            "rows": rows,
        }

    def follow(self, run: Run, uid: str) -> dict[str, Any]:
        """Every visit of one problem. The index of a long run is built in the background: `looked` of `steps` files so far."""
        with self._lock:
            index = self._indexes.pop(run.path, None) or Index()
            while len(self._indexes) >= KEPT_INDEXES:
                self._indexes.pop(next(iter(self._indexes)))
            self._indexes[run.path] = index
        steps = self.steps(run)
        index.catch_up([(step, self.file(run, step)) for step in steps])
        visits = [
            dict(zip(("step", "group", "reward", "best", "rows"), visit, strict=True))
            for visit in index.visits(uid)
        ]
        return {"uid": uid, "visits": visits, "looked": index.looked, "steps": len(steps)}

    def search(self, run: Run, words: str, start: int, most: int = 100) -> dict[str, Any]:
        """Rows anywhere in the run whose question or response has the words; `next` is the step to go on from, if any."""
        began, hits = time.monotonic(), []
        steps = [step for step in self.steps(run) if step >= start]
        for step in steps:
            if len(hits) >= most or (hits is not None and time.monotonic() - began > BUDGET_S):
                return {"hits": hits[:most], "next": step, "last": steps[-1]}
            hits += find_in(self.file(run, step), step, words)
        return {"hits": hits[:most], "next": None, "last": steps[-1] if steps else start}


class Index:
    """Which step visited which problem, and how it went."""

    MOST = 2_000_000

    def __init__(self) -> None:
        self._visits: dict[str, list[tuple[int, int, float | None, float | None, int]]] = {}
        self._seen: dict[Path, int] = {}
        self._size = 0
        self._worker: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def looked(self) -> int:
        return len(self._seen)

    def catch_up(self, files: Sequence[tuple[int, Path]], wait_s: float = 0.3) -> None:
        """Read the files not read yet in a thread; come back when it is done or after a moment."""
        with self._lock:
            if self._worker is None or not self._worker.is_alive():
                if any(self._seen.get(file) not in (None, _mtime(file)) for _, file in files):
                    self._visits, self._seen, self._size = (
                        {},
                        {},
                        0,
                    )  # a run that went on from a checkpoint wrote steps anew
                fresh = [(step, file) for step, file in files if file not in self._seen]
                self._worker = threading.Thread(target=self._read, args=(fresh,), daemon=True)
                self._worker.start()
            worker = self._worker
        worker.join(wait_s)

    def _read(self, files: Sequence[tuple[int, Path]]) -> None:
        for step, file in files:
            if self._size > self.MOST:
                return
            try:
                stamp = _mtime(file)
                found = read_visits(file, step)
            except (OSError, pa.ArrowException):
                continue
            for uid, visit in found:
                self._visits.setdefault(uid, []).append(visit)
            self._size += len(found)
            self._seen[file] = stamp

    def visits(self, uid: str) -> list[tuple[int, int, float | None, float | None, int]]:
        return sorted(self._visits.get(uid, []))


def read_listing(file: Path, stamp: tuple[int, int]) -> Listing:
    """Row columns of a step, with response lengths and mean advantages worked out from the token columns."""
    opened = pq.ParquetFile(file)
    schema = opened.schema_arrow
    wanted = [f.name for f in schema if not pa.types.is_nested(f.type)]
    lists = [name for name in ("response", "advantages") if name in schema.names]
    table = opened.read(columns=[*wanted, *lists])
    count = table.num_rows
    lengths = (
        pc.list_value_length(table["response"]).to_pylist() if "response" in lists else [0] * count
    )
    advantages = row_means(table["advantages"]) if "advantages" in lists else [None] * count
    parts = [name for name in wanted if name.startswith("reward/")]
    texts = table["text"] if "text" in wanted else None
    columns: dict[str, list[Any]] = {
        name: _column(table, name, count) for name in ("uid", "source", "finish", "failure")
    }
    snippets = (
        _column(table, "text", count)
        if texts is None
        else pc.utf8_slice_codeunits(texts, 0, SNIPPET).to_pylist()
    )
    questions = table["question"] if "question" in wanted else None
    asked = (
        _column(table, "question", count)
        if questions is None
        else pc.utf8_slice_codeunits(questions, 0, 400).to_pylist()
    )
    groups = table["group"].to_pylist() if "group" in wanted else list(range(count))
    index = table["index"].to_pylist() if "index" in wanted else [0] * count
    rewards = (
        [_number(v) for v in table["reward"].to_pylist()] if "reward" in wanted else [None] * count
    )
    by_part = {name: [_number(v) for v in table[name].to_pylist()] for name in parts}
    rows = [
        {
            "row": i,
            "group": groups[i],
            "index": index[i],
            **{name: values[i] for name, values in columns.items()},
            "question": asked[i],
            "snippet": snippets[i],
            "reward": rewards[i],
            "parts": {name.removeprefix("reward/"): values[i] for name, values in by_part.items()},
            "length": lengths[i] or 0,
            "advantage": advantages[i],
        }
        for i in range(count)
    ]
    return Listing(stamp, rows, texts, questions, parts)


def spell_out(file: Path, rows: list[dict[str, Any]], pieces: Pieces) -> None:
    """Question and snippet from the token ids, for steps that were not judged and so have no texts."""
    table = read_rows(file, [row["row"] for row in rows], ["prompt", "response"])
    for i, row in enumerate(rows):
        row["question"] = "".join(pieces.split(table["prompt"][i].as_py()[-SNIPPET:]))
        row["snippet"] = "".join(pieces.split(table["response"][i].as_py()[:SNIPPET]))[:SNIPPET]


def read_rows(file: Path, numbers: Sequence[int], columns: list[str] | None = None) -> pa.Table:
    """The given rows with all columns or the named ones, from the row groups they lie in."""
    opened = pq.ParquetFile(file)
    metadata, start, wanted, base = opened.metadata, 0, [], []
    low, high = min(numbers), max(numbers)
    for number in range(metadata.num_row_groups):
        end = start + metadata.row_group(number).num_rows
        if start <= high and low < end:
            wanted.append(number)
            base.append(start)
        start = end
    table = opened.read_row_groups(wanted, columns=columns)
    return table.take(pa.array([n - base[0] for n in numbers]))


def token_columns(table: pa.Table) -> set[str]:
    """Columns with one number for each response token in every row; a classmate's scores may have as many by chance."""
    if "response" not in table.column_names:
        return set()
    lengths = pc.list_value_length(table["response"]).to_pylist()
    out: set[str] = set()
    for column in table.schema:
        inner = column.type.value_type if pa.types.is_list(column.type) else None
        if inner is None or column.name in KNOWN or column.name.startswith("classmate"):
            continue
        if pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner):
            here = pc.list_value_length(table[column.name]).to_pylist()
            if all(n is None or n == m for n, m in zip(here, lengths, strict=True)):
                out.add(column.name)
    return out


def row_with_tokens(
    table: pa.Table, i: int, columns: set[str], pieces: Pieces | None, full: bool
) -> dict[str, Any]:
    """A trajectory as the page draws it: token texts, every token column, and whatever else the row carries."""
    row = {name: table[name][i].as_py() for name in table.column_names if name != "prompt"}
    ids = row.get("response") or []
    limit = len(ids) if full else MOST_TOKENS
    tokens: dict[str, list[Any]] = {}
    others: dict[str, Any] = {}
    for name, value in row.items():
        if name in KNOWN or name.startswith("reward/"):
            continue
        if name in columns:
            tokens[name] = [_short(v) for v in (value or [])[:limit]]
        elif value not in (None, "", []):
            others[name] = _plain(value)
    return {
        "row": i,
        "index": row.get("index", i),
        "source": row.get("source") or "",
        "finish": row.get("finish") or "",
        "failure": row.get("failure") or "",
        "reward": _number(row.get("reward")),
        "parts": {
            k.removeprefix("reward/"): _number(v) for k, v in row.items() if k.startswith("reward/")
        },
        "text": (row.get("text") or "")[:MOST_TEXT],
        "length": len(ids),
        "ids": ids[:limit],
        "texts": pieces.split(ids[:limit]) if pieces else None,
        "tokens": tokens,
        "others": others,
    }


def read_visits(
    file: Path, step: int
) -> list[tuple[str, tuple[int, int, float | None, float | None, int]]]:
    """(uid, (step, group, mean reward, best reward, rows)) of each group of a step."""
    opened = pq.ParquetFile(file)
    names = [name for name in ("uid", "group", "reward") if name in opened.schema_arrow.names]
    if "uid" not in names:
        return []
    table = opened.read(columns=names)
    uids = table["uid"].to_pylist()
    groups = table["group"].to_pylist() if "group" in names else list(range(len(uids)))
    rewards = table["reward"].to_pylist() if "reward" in names else [None] * len(uids)
    members: dict[tuple[str, int], list[float]] = {}
    counts: dict[tuple[str, int], int] = {}
    for uid, group, reward in zip(uids, groups, rewards, strict=True):
        key = (uid, group)
        counts[key] = counts.get(key, 0) + 1
        if reward is not None and reward == reward:
            members.setdefault(key, []).append(reward)
    out: list[tuple[str, tuple[int, int, float | None, float | None, int]]] = []
    for (uid, group), count in counts.items():
        seen = members.get((uid, group))
        mean, best = (_number(sum(seen) / len(seen)), _number(max(seen))) if seen else (None, None)
        out.append((uid, (step, group, mean, best, count)))
    return out


def find_in(file: Path, step: int, words: str) -> list[dict[str, Any]]:
    """Rows of one step whose question or response has the words."""
    opened = pq.ParquetFile(file)
    names = [name for name in ("text", "question") if name in opened.schema_arrow.names]
    if not names:
        return []
    table = opened.read(
        columns=[
            *names,
            *(n for n in ("uid", "group", "index", "reward") if n in opened.schema_arrow.names),
        ]
    )
    mask = np.zeros(table.num_rows, dtype=bool)
    for name in names:
        mask |= np.asarray(
            pc.fill_null(pc.match_substring(table[name], words, ignore_case=True), False)
        )
    found = table.filter(pa.array(mask)).to_pylist()
    return [
        {
            "step": step,
            "group": row.get("group", 0),
            "index": row.get("index", 0),
            "uid": row.get("uid") or "",
            "reward": _number(row.get("reward")),
            "question": (row.get("question") or "")[:SNIPPET],
            "snippet": around(row.get("text") or "", words),
        }
        for row in found
    ]


def around(text: str, words: str) -> str:
    """The part of a text near the words."""
    at = max(0, text.lower().find(words.lower()) - SNIPPET // 3)
    return ("…" if at else "") + text[at : at + SNIPPET]


def matches(listing: Listing, words: str) -> set[int] | None:
    """Row numbers whose question, response or uid has the words; None for no words: all."""
    if not words:
        return None
    hits = {row["row"] for row in listing.rows if words.lower() in str(row["uid"]).lower()}
    for column in (listing.texts, listing.questions):
        if column is not None:
            found = pc.fill_null(pc.match_substring(column, words, ignore_case=True), False)
            hits |= set(np.flatnonzero(np.asarray(found)).tolist())
    return hits


def row_means(column: pa.ChunkedArray) -> list[float | None]:
    """The mean of each row's list; None for an empty one."""
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    values = np.nan_to_num(np.asarray(pc.fill_null(pc.list_flatten(array), 0.0), dtype=float))
    lengths = np.asarray(pc.fill_null(pc.list_value_length(array), 0), dtype=int)
    ends = np.concatenate([[0.0], np.cumsum(values)])
    stops = np.cumsum(lengths)
    sums = ends[stops] - ends[stops - lengths]
    return [
        _number(s / n) if n else None for s, n in zip(sums.tolist(), lengths.tolist(), strict=True)
    ]


def _column(table: pa.Table, name: str, count: int) -> list[str]:
    return (
        [str(v or "") for v in table[name].to_pylist()]
        if name in table.column_names
        else [""] * count
    )


def _number(value: Any) -> float | None:
    return (
        float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None
    )


def _short(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """A value of any column as something JSON can carry, texts cut."""
    if isinstance(value, str):
        return value[:MOST_TEXT]
    if isinstance(value, list):
        return [_plain(v) for v in value[:200]]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in list(value.items())[:200]}
    return (
        _number(value)
        if isinstance(value, float)
        else value
        if isinstance(value, int | bool | None)
        else str(value)
    )


def _mtime(file: Path) -> int:
    return file.stat().st_mtime_ns

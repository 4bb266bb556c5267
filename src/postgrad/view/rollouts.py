"""Answers the page's requests for the rollouts of a run: groups, trajectories, problems, search."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from postgrad.data.rollout_folder import rollout_files
from postgrad.view.cache import Cache, file_stamp
from postgrad.view.folder import KEY, NotFound
from postgrad.view.problem_index import ProblemIndex
from postgrad.view.rollout_files import (
    MAX_TOKENS,
    StepRows,
    add_texts,
    find_token_columns,
    read_rows,
    read_step,
    trajectory_of,
)
from postgrad.view.rollout_search import search_file, search_step
from postgrad.view.runs import Run
from postgrad.view.tokens import TokenDecoder, find_tokenizer_file, load_decoder

# Names of the numbers in the column token_source.
SOURCES = ("policy", "demonstration", "replay", "classmate", "tool")
MAX_REPEATED = 8  # equal tokens of a picture that are shown one by one
MAX_STEPS = 6  # in the cache
MAX_INDEXES = 3  # in the cache
MAX_DECODERS = 3  # in the cache
GROUPS_PER_PAGE = 40
MAX_HITS = 100
# A search over the whole run returns after this time with its hits and the next step to search.
SEARCH_S = 0.7

FILTERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda row: True,
    "correct": lambda row: row["reward"] is not None and row["reward"] > 0,
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


class Rollouts:
    """The rollouts of all runs."""

    def __init__(self) -> None:
        self._steps: Cache[Path, StepRows] = Cache(MAX_STEPS)
        self._indexes: Cache[Path, ProblemIndex] = Cache(MAX_INDEXES)
        self._decoders: Cache[Path, TokenDecoder | None] = Cache(MAX_DECODERS)

    def steps(self, run: Run) -> list[int]:
        """Return the steps that have a file, in order."""
        folder = run.file("rollouts")
        return [] if folder is None else list(rollout_files(folder))

    def file(self, run: Run, step: int) -> Path:
        """Return the file of a step; raise NotFound."""
        file = run.file("rollouts", f"step-{step:06d}.parquet")
        if file is None:
            raise NotFound(f"step {step}")
        return file

    def _read_step(self, run: Run, step: int) -> StepRows:
        file = self.file(run, step)
        return self._steps.get(file, lambda: read_step(file), file_stamp(file))

    def decoder(self, run: Run) -> TokenDecoder | None:
        """Return the run's tokenizer, or None if the folder has none: the page then shows ids."""
        file = find_tokenizer_file(run)
        if file is None:
            return None
        return self._decoders.get(file, lambda: load_decoder(file), file_stamp(file))

    def groups(
        self, run: Run, step: int, filter_name: str, sort: str, query: str, start: int
    ) -> dict[str, Any]:
        """Return the groups of a step with at least one row that passes the filter and the search.

        Rows of such a group that do not pass are marked, not left out.

        Args:
            run: the run.
            step: the step.
            filter_name: a key of FILTERS.
            sort: a key of SORTS.
            query: a text to search for, or "".
            start: number of groups to skip.
        """
        step_rows = self._read_step(run, step)
        matching = search_step(step_rows, query)
        passes_filter = FILTERS[filter_name]
        passing: list[dict[str, Any]] = []
        for row in step_rows.rows:
            if passes_filter(row) and (matching is None or row["row"] in matching):
                passing.append(row)
        order = list(dict.fromkeys(row["group"] for row in sorted(passing, key=SORTS[sort])))
        passing_numbers = {row["row"] for row in passing}
        members: dict[Any, list[dict[str, Any]]] = {
            group: [] for group in order[start : start + GROUPS_PER_PAGE]
        }
        for row in step_rows.rows:
            if row["group"] in members:
                passes = row["row"] in passing_numbers
                members[row["group"]].append({**row, "passes": passes})
        decoder = self.decoder(run) if step_rows.texts is None and members else None
        if decoder:
            shown = [row for rows in members.values() for row in rows]
            add_texts(self.file(run, step), shown, decoder)
        return {
            "step": step,
            "rows": len(step_rows.rows),
            "passing": len(passing),
            "total": len(order),
            "counts": {name: sum(map(passes, step_rows.rows)) for name, passes in FILTERS.items()},
            "groups": [
                {
                    "group": group,
                    "uid": rows[0]["uid"],
                    "question": rows[0]["question"],
                    "rows": rows,
                }
                for group, rows in members.items()
            ],
        }

    def group(self, run: Run, step: int, group: int, full: bool) -> dict[str, Any]:
        """One group with its tokens and all token columns; `full` returns all tokens."""
        decoder = self.decoder(run)
        step_rows = self._read_step(run, step)
        numbers = [row["row"] for row in step_rows.rows if row["group"] == group]
        if not numbers:
            raise NotFound(f"group {group}")
        table = read_rows(self.file(run, step), numbers)
        token_columns = find_token_columns(table)
        trajectories = [
            trajectory_of(table, i, token_columns, decoder, full) for i in range(table.num_rows)
        ]
        prompt = table["prompt"][0].as_py() if "prompt" in table.column_names else []
        pictures = table["images"][0].as_py() or [] if "images" in table.column_names else []
        counts = [len(list(same)) for _, same in groupby(prompt)] if pictures else []
        if counts:  # a picture is many tokens of one id
            prompt = [token for token, _ in groupby(prompt)]
        if not full:
            prompt, counts = prompt[-MAX_TOKENS:], counts[-MAX_TOKENS:]
        texts = decoder.decode_each(prompt) if decoder else None
        if texts and counts:
            texts = [_repeated(text, n) for text, n in zip(texts, counts, strict=True)]
        order = list(dict.fromkeys(row["group"] for row in step_rows.rows))
        position = order.index(group)
        first = step_rows.rows[numbers[0]]
        return {
            "step": step,
            "group": group,
            "uid": first["uid"],
            "question": first["question"],
            "prompt": {"ids": prompt, "texts": texts},
            "images": [key for key in pictures if KEY.fullmatch(str(key))],
            "before": order[position - 1] if position else None,
            "after": order[position + 1] if position + 1 < len(order) else None,
            "position": [position + 1, len(order)],
            "sources": SOURCES,
            "rows": trajectories,
        }

    def problem(self, run: Run, uid: str) -> dict[str, Any]:
        """All groups of one problem over the run.

        The index of a long run is built in the background: `indexed` of `steps` files are done.
        """
        index = self._indexes.get(run.path, ProblemIndex)
        steps = self.steps(run)
        index.update([(step, self.file(run, step)) for step in steps])
        visits = [asdict(visit) for visit in index.visits(uid)]
        return {"uid": uid, "visits": visits, "indexed": index.num_files, "steps": len(steps)}

    def search(self, run: Run, query: str, start: int) -> dict[str, Any]:
        """Rows of all steps from `start` on whose question or response contains the query.

        `next` is the step to continue from, or None if all were searched.
        """
        began = time.monotonic()
        hits: list[dict[str, Any]] = []
        steps = [step for step in self.steps(run) if step >= start]
        for step in steps:
            if len(hits) >= MAX_HITS or time.monotonic() - began > SEARCH_S:
                return {"hits": hits[:MAX_HITS], "next": step, "last": steps[-1]}
            hits += search_file(self.file(run, step), step, query)
        last = steps[-1] if steps else start
        return {"hits": hits[:MAX_HITS], "next": None, "last": last}


def _repeated(text: str, count: int) -> str:
    """Return the text of equal tokens in a row: of many only their number."""
    return text * count if count <= MAX_REPEATED else f"{text} × {count}"

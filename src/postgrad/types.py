"""The things that move between stages: Problem, Trajectory, Batch, Score, Failure.

A Batch is a ragged table of trajectories. Token ids lie flat, row after row, without padding; per-token columns are flat
tensors beside them, per-trajectory columns have one entry a row. Any stage may add a column of any name, and every later
stage, the loss included, sees it.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from postgrad.problem import Failure as Failure
from postgrad.problem import Problem as Problem
from postgrad.problem import Score as Score

# Who wrote a row (column `source`) or a token (column `token_source`).
POLICY, DEMONSTRATION, REPLAY, CLASSMATE, TOOL = range(5)
SOURCE_NAMES = ("policy", "demonstration", "replay", "classmate", "tool")


@dataclass
class Trajectory:
    """Prompt and response as token ids, whoever wrote them.

    `loss_mask` says which response tokens the loss may see (all of them when None); `behavior_logprobs` holds the log-prob each
    token had when it was sampled (0 where nobody sampled it). `tokens` and `rows` hold further columns.
    """

    uid: str
    prompt: Sequence[int]
    response: Sequence[int]
    group: int = 0
    index: int = 0
    source: int = POLICY
    finish: str = "stop"  # stop, length, or given (not sampled)
    behavior_logprobs: Sequence[float] | None = None
    loss_mask: Sequence[bool] | None = None
    token_source: Sequence[int] | None = None
    tokens: dict[str, Sequence[float]] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat tensor."""

    values: Tensor  # (total,)
    lengths: Tensor  # (rows,) int64, on the CPU

    @staticmethod
    def of(rows: Iterable[Sequence[Any]], dtype: torch.dtype = torch.int64) -> "Ragged":
        rows = list(rows)
        flat = [value for row in rows for value in row]
        return Ragged(
            torch.tensor(flat, dtype=dtype),
            torch.tensor([len(row) for row in rows], dtype=torch.int64),
        )

    @property
    def offsets(self) -> Tensor:
        """Start of each row in `values`, with the total at the end."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def split(self) -> list[Tensor]:
        return list(self.values.split(self.lengths.tolist()))

    @cached_property
    def row_index(self) -> Tensor:
        """(total,) the row each value belongs to, on the CPU."""
        return torch.arange(len(self)).repeat_interleave(self.lengths)

    def positions(self, indices: Tensor) -> Tensor:
        """Where the tokens of the given rows lie in `values`, row after row."""
        lengths = self.lengths[indices]
        shift = self.offsets[:-1][indices] - (
            lengths.cumsum(0) - lengths
        )  # from its place among the picked tokens
        return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


class Columns(MutableMapping[str, Any]):
    """Named columns of one length; assigning a column of another length is an error that names both."""

    def __init__(self, kind: str, size: int, columns: dict[str, Any] | None = None) -> None:
        self.kind, self.size = kind, size
        self.data: dict[str, Any] = {}
        for name, column in (columns or {}).items():
            self[name] = column

    def __setitem__(self, name: str, column: Any) -> None:
        if len(column) != self.size:
            raise ValueError(
                f"column {name!r} has {len(column)} entries, the batch has {self.size} {self.kind}"
            )
        self.data[name] = column

    def __getitem__(self, name: str) -> Any:
        if name not in self.data:
            raise KeyError(
                f"no {self.kind} column {name!r}; there are: {', '.join(sorted(self.data)) or 'none'}"
            )
        return self.data[name]

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __contains__(self, name: object) -> bool:
        return name in self.data


def _take(column: Any, indices: Tensor) -> Any:
    return (
        column[indices.to(column.device)]
        if isinstance(column, Tensor)
        else [column[i] for i in indices.tolist()]
    )


class Batch:
    """A ragged table of trajectories. `tokens` columns are flat over all response tokens, `rows` columns have one entry a row.

    Always there: tokens `loss_mask`, `behavior_logprobs`, `token_source`; rows `uid`, `group`, `index`, `source`, `finish`.
    """

    def __init__(
        self, prompt: Ragged, response: Ragged, tokens: dict[str, Tensor], rows: dict[str, Any]
    ) -> None:
        self.prompt, self.response = prompt, response
        self.tokens = Columns("token", int(response.values.numel()), tokens)
        self.rows = Columns("row", len(response), rows)

    @staticmethod
    def of(trajectories: Sequence[Trajectory]) -> "Batch":
        """Build the table. Extra columns must be the same for all trajectories."""
        flat = list(trajectories)
        tokens: dict[str, Tensor] = {
            "loss_mask": _flat("loss_mask", flat, lambda t: t.loss_mask, True, torch.bool),
            "behavior_logprobs": _flat(
                "behavior_logprobs", flat, lambda t: t.behavior_logprobs, 0.0, torch.float32
            ),
            "token_source": _flat(
                "token_source",
                flat,
                lambda t: (
                    [t.source] * len(t.response) if t.token_source is None else t.token_source
                ),
                POLICY,
                torch.int8,
            ),
        }
        rows: dict[str, Any] = {
            "uid": [t.uid for t in flat],
            "group": torch.tensor([t.group for t in flat], dtype=torch.int64),
            "index": torch.tensor([t.index for t in flat], dtype=torch.int64),
            "source": torch.tensor([t.source for t in flat], dtype=torch.int8),
            "finish": [t.finish for t in flat],
        }
        for name in _shared_names(flat, lambda t: t.tokens):
            tokens[name] = _flat(
                name, flat, lambda t, name=name: t.tokens[name], 0.0, torch.float32
            )
        for name in _shared_names(flat, lambda t: t.rows):
            values = [t.rows[name] for t in flat]
            rows[name] = (
                torch.tensor(values) if all(isinstance(v, int | float) for v in values) else values
            )
        return Batch(
            Ragged.of(t.prompt for t in flat), Ragged.of(t.response for t in flat), tokens, rows
        )

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Put tables below each other. Columns that are not in all of them are an error."""
        first = batches[0]
        for kind in ("tokens", "rows"):
            names = [set(b.tokens if kind == "tokens" else b.rows) for b in batches]
            odd = set.union(*names) - set.intersection(*names)
            if odd:
                raise ValueError(
                    f"{kind} column {sorted(odd)[0]!r} is missing in some of the batches"
                )

        def join(ragged: Sequence[Ragged]) -> Ragged:
            return Ragged(
                torch.cat([r.values for r in ragged]), torch.cat([r.lengths for r in ragged])
            )

        def join_column(columns: Sequence[Any]) -> Any:
            return (
                torch.cat(list(columns))
                if isinstance(columns[0], Tensor)
                else [x for c in columns for x in c]
            )

        return Batch(
            join([b.prompt for b in batches]),
            join([b.response for b in batches]),
            {name: join_column([b.tokens[name] for b in batches]) for name in first.tokens},
            {name: join_column([b.rows[name] for b in batches]) for name in first.rows},
        )

    def __len__(self) -> int:
        return len(self.response)

    @property
    def num_tokens(self) -> int:
        """Number of response tokens."""
        return self.tokens.size

    @property
    def row_index(self) -> Tensor:
        """(tokens,) the row each response token belongs to."""
        return self.response.row_index.to(self.response.values.device)

    @property
    def names(self) -> list[str]:
        """A name for each row that no other row of its step has: problem, group and index. Seeds may be made from it."""
        places = zip(
            self.rows["uid"], self.rows["group"].tolist(), self.rows["index"].tolist(), strict=True
        )
        return [f"{uid}/{group}/{index}" for uid, group, index in places]

    def mask(self, spans: Sequence[tuple[int, int]]) -> Tensor:
        """(tokens,) true on the tokens [start, end) of each row's response; one span a row."""
        out = torch.zeros(self.num_tokens, dtype=torch.bool)
        for offset, (start, end) in zip(self.response.offsets[:-1].tolist(), spans, strict=True):
            out[offset + start : offset + end] = True
        return out

    def expand(self, column: Tensor) -> Tensor:
        """A row column as a token column."""
        return column[self.row_index.to(column.device)]

    def sum_tokens(self, column: Tensor) -> Tensor:
        """(rows,) sums of a token column."""
        out = torch.zeros(len(self), dtype=column.dtype, device=column.device)
        return out.index_add(0, self.row_index.to(column.device), column)

    def select(self, indices: Tensor | Sequence[int]) -> "Batch":
        """The given rows, in the given order, with all their columns."""
        picked = torch.as_tensor(indices, dtype=torch.int64)
        where = self.response.positions(picked)

        def take(ragged: Ragged, at: Tensor) -> Ragged:
            return Ragged(ragged.values[at.to(ragged.values.device)], ragged.lengths[picked])

        return Batch(
            take(self.prompt, self.prompt.positions(picked)),
            take(self.response, where),
            {name: _take(column, where) for name, column in self.tokens.items()},
            {name: _take(column, picked) for name, column in self.rows.items()},
        )

    def to(self, device: torch.device | str) -> "Batch":
        return self.moved(lambda column: column.to(device))

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Batch":
        """All columns that are tensors somewhere else, by a function that brings one there."""
        return Batch(
            replace(self.prompt, values=move(self.prompt.values)),
            replace(self.response, values=move(self.response.values)),
            {name: move(column) for name, column in self.tokens.items()},
            {
                name: move(column) if isinstance(column, Tensor) else column
                for name, column in self.rows.items()
            },
        )


def _flat(
    name: str,
    trajectories: Sequence[Trajectory],
    get: Callable[[Trajectory], Any],
    default: Any,
    dtype: torch.dtype,
) -> Tensor:
    out: list[Any] = []
    for t in trajectories:
        values = get(t)
        if values is not None and len(values) != len(t.response):
            raise ValueError(
                f"trajectory {t.uid}: token column {name!r} has {len(values)} entries for {len(t.response)} response tokens"
            )
        out.extend([default] * len(t.response) if values is None else values)
    return torch.tensor(out, dtype=dtype)


def _shared_names(
    trajectories: Sequence[Trajectory], get: Callable[[Trajectory], dict[str, Any]]
) -> list[str]:
    names = [set(get(t)) for t in trajectories]
    union: set[str] = set().union(*names)
    for name in union:
        if not all(name in n for n in names):
            raise ValueError(f"column {name!r} is missing in some of the trajectories")
    return sorted(union)

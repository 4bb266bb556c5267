"""The data that stages pass on: Problem, Trajectory, Batch, Score, Failure.

A Batch is a ragged table of trajectories. Token ids are stored flat, row after row, without
padding. Per-token columns are flat tensors of the same length; per-trajectory columns have one
entry per row. Any stage may add a column of any name; every later stage and the loss can read it.
Imports torch, and nothing of ours except problem.py.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from postgrad.pictures import Picture
from postgrad.problem import Failure as Failure
from postgrad.problem import Problem as Problem
from postgrad.problem import Score as Score

# Who wrote a row (column `source`) or a token (column `token_source`).
POLICY, DEMONSTRATION, REPLAY, CLASSMATE, TOOL = range(5)
SOURCE_NAMES = ("policy", "demonstration", "replay", "classmate", "tool")


@dataclass
class Trajectory:
    """Prompt and response as token ids, from the policy or from any other source.

    `loss_mask` marks the response tokens that enter the loss (None: all of them).
    `behavior_logprobs` are the log-probs of the tokens when they were sampled (0 for tokens that
    were not sampled). `kept_ids` has, per token, the ids that top-p, top-k or min-p sampling kept
    (none: the whole vocabulary). `images` are the pictures that its image tokens show, in order.
    `tokens` and `rows` hold further columns.
    """

    uid: str
    prompt: Sequence[int]
    response: Sequence[int]
    group: int = 0
    index: int = 0
    source: int = POLICY
    finish: str = "stop"  # stop, length (limit reached), or given (not sampled)
    behavior_logprobs: Sequence[float] | None = None
    loss_mask: Sequence[bool] | None = None
    token_source: Sequence[int] | None = None
    kept_ids: Sequence[Sequence[int]] | None = None
    images: tuple[Picture, ...] = ()
    tokens: dict[str, Sequence[float]] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths in one flat tensor."""

    values: Tensor  # (total,)
    lengths: Tensor  # (rows,) int64, on the CPU

    @staticmethod
    def of(rows: Iterable[Sequence[Any]], dtype: torch.dtype = torch.int64) -> "Ragged":
        """Return the rows concatenated into one tensor."""
        rows = list(rows)
        flat = [value for row in rows for value in row]
        lengths = [len(row) for row in rows]
        return Ragged(torch.tensor(flat, dtype=dtype), torch.tensor(lengths, dtype=torch.int64))

    @property
    def offsets(self) -> Tensor:
        """(rows + 1,) the start of each row in `values`, and the total at the end."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    def __len__(self) -> int:
        return int(self.lengths.numel())

    def split(self) -> list[Tensor]:
        """Return one tensor per row."""
        return list(self.values.split(self.lengths.tolist()))

    @cached_property
    def row_index(self) -> Tensor:
        """(total,) the row of each value, on the CPU."""
        return torch.arange(len(self)).repeat_interleave(self.lengths)

    def positions(self, indices: Tensor) -> Tensor:
        """Return the positions in `values` of all values of the given rows, row after row."""
        lengths = self.lengths[indices]
        new_offsets = lengths.cumsum(0) - lengths
        shift = self.offsets[:-1][indices] - new_offsets
        return torch.arange(int(lengths.sum())) + shift.repeat_interleave(lengths)


class ColumnError(ValueError):
    """A column does not have one entry per row or per token, or is missing in some rows."""


class MissingColumnError(ColumnError, KeyError):
    """A batch has no column `name`; `kind` is "token" or "row"."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"no {kind} column {name!r}; known: {', '.join(sorted(known)) or 'none'}")
        self.kind = kind
        self.name = name

    __str__ = Exception.__str__  # that of KeyError adds quotes


class Columns(MutableMapping[str, Any]):
    """Named columns of equal length. Assigning a column of another length raises ColumnError."""

    def __init__(self, kind: str, size: int, columns: dict[str, Any] | None = None) -> None:
        self.kind = kind  # "token" or "row", for error messages
        self.size = size
        self.data: dict[str, Any] = {}
        for name, column in (columns or {}).items():
            self[name] = column

    def __setitem__(self, name: str, column: Any) -> None:
        try:
            num_entries = len(column)
        except TypeError as error:  # None, a number, or a tensor without dimensions
            raise ColumnError(
                f"column {name!r} is a {type(column).__name__} without entries, the batch has "
                f"{self.size} {self.kind}s"
            ) from error
        if num_entries != self.size:
            raise ColumnError(
                f"column {name!r} has {num_entries} entries, the batch has {self.size} {self.kind}s"
            )
        self.data[name] = column

    def __getitem__(self, name: str) -> Any:
        if name not in self.data:
            raise MissingColumnError(self.kind, name, self.data)
        return self.data[name]

    def __delitem__(self, name: str) -> None:
        del self.data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __contains__(self, name: object) -> bool:
        return name in self.data


# Columns of every batch that are fields of a Trajectory.
_ROW_FIELDS = ("uid", "group", "index", "source", "finish")
_TOKEN_FIELDS = ("loss_mask", "behavior_logprobs", "token_source")


def _take(column: Any, indices: Tensor) -> Any:
    """Return the entries of a tensor or list at the given indices."""
    if isinstance(column, Tensor):
        return column[indices.to(column.device)]
    return [column[i] for i in indices.tolist()]


class Batch:
    """A ragged table of trajectories.

    `tokens` columns are flat over all response tokens. Every batch has `loss_mask`,
    `behavior_logprobs` and `token_source`. If sampling was truncated, `num_kept` counts the ids
    that it kept per token, and the row column `kept_ids` has one int32 tensor of them per row.
    If some row shows pictures, the row column `images` has a tuple of them per row. `rows` columns
    have one entry per row. Every batch has `uid`, `group`, `index`, `source` and `finish`.
    """

    def __init__(
        self, prompt: Ragged, response: Ragged, tokens: dict[str, Tensor], rows: dict[str, Any]
    ) -> None:
        self.prompt = prompt
        self.response = response
        self.tokens = Columns("token", int(response.values.numel()), tokens)
        self.rows = Columns("row", len(response), rows)

    @staticmethod
    def of(trajectories: Sequence[Trajectory]) -> "Batch":
        """Return the table of these trajectories, which must have the same extra columns."""
        trajectories = list(trajectories)
        tokens: dict[str, Tensor] = {
            "loss_mask": _flatten(
                "loss_mask", trajectories, lambda t: t.loss_mask, True, torch.bool
            ),
            "behavior_logprobs": _flatten(
                "behavior_logprobs",
                trajectories,
                lambda t: t.behavior_logprobs,
                0.0,
                torch.float32,
            ),
            "token_source": _flatten(
                "token_source", trajectories, _token_source, POLICY, torch.int8
            ),
        }
        rows: dict[str, Any] = {
            "uid": [t.uid for t in trajectories],
            "group": torch.tensor([t.group for t in trajectories], dtype=torch.int64),
            "index": torch.tensor([t.index for t in trajectories], dtype=torch.int64),
            "source": torch.tensor([t.source for t in trajectories], dtype=torch.int8),
            "finish": [t.finish for t in trajectories],
        }
        if any(t.kept_ids is not None for t in trajectories):
            tokens["num_kept"] = _flatten("kept_ids", trajectories, _num_kept, 0, torch.int64)
            kept = [[i for ids in t.kept_ids or () for i in ids] for t in trajectories]
            rows["kept_ids"] = [torch.tensor(ids, dtype=torch.int32) for ids in kept]
        if any(t.images for t in trajectories):
            rows["images"] = [tuple(t.images) for t in trajectories]
        for name in _shared_names(trajectories, lambda t: t.tokens):
            tokens[name] = _flatten(
                name, trajectories, lambda t, name=name: t.tokens[name], 0.0, torch.float32
            )
        for name in _shared_names(trajectories, lambda t: t.rows):
            values = [t.rows[name] for t in trajectories]
            are_numbers = all(isinstance(value, int | float) for value in values)
            rows[name] = torch.tensor(values) if are_numbers else values
        prompt = Ragged.of(t.prompt for t in trajectories)
        response = Ragged.of(t.response for t in trajectories)
        return Batch(prompt, response, tokens, rows)

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Return the rows of all batches in one. Raises ColumnError if their columns differ."""
        if any("images" in batch.rows for batch in batches):
            for batch in batches:
                batch.rows.setdefault("images", [()] * len(batch))
        _check_same_columns("tokens", [set(batch.tokens) for batch in batches])
        _check_same_columns("rows", [set(batch.rows) for batch in batches])
        first = batches[0]
        return Batch(
            _concat_ragged([batch.prompt for batch in batches]),
            _concat_ragged([batch.response for batch in batches]),
            {name: _concat_column([b.tokens[name] for b in batches]) for name in first.tokens},
            {name: _concat_column([b.rows[name] for b in batches]) for name in first.rows},
        )

    def trajectories(self) -> list[Trajectory]:
        """Return the rows one by one, to change them; `Batch.of` makes a batch of them again.

        Change `response` together with the columns of its tokens, which have one entry each.
        """
        return [_trajectory(self.select([row])) for row in range(len(self))]

    def __len__(self) -> int:
        return len(self.response)

    @property
    def num_tokens(self) -> int:
        """Number of response tokens."""
        return self.tokens.size

    @property
    def row_index(self) -> Tensor:
        """(tokens,) the row of each response token."""
        return self.response.row_index.to(self.response.values.device)

    @property
    def names(self) -> list[str]:
        """A unique name per row of a step, `uid/group/index`; seeds may be derived from it."""
        groups = self.rows["group"].tolist()
        indices = self.rows["index"].tolist()
        return [
            f"{uid}/{group}/{index}"
            for uid, group, index in zip(self.rows["uid"], groups, indices, strict=True)
        ]

    def mask(self, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Return (tokens,) true on the tokens [start, end) of each response; one span per row."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        for offset, (start, end) in zip(self.response.offsets[:-1].tolist(), spans, strict=True):
            mask[offset + start : offset + end] = True
        return mask

    def expand(self, column: Tensor) -> Tensor:
        """Return (tokens,) the value of each token's row, from a (rows,) column."""
        return column[self.row_index.to(column.device)]

    def sum_tokens(self, column: Tensor) -> Tensor:
        """Return (rows,) the sum of a token column over each row."""
        zeros = torch.zeros(len(self), dtype=column.dtype, device=column.device)
        return zeros.index_add(0, self.row_index.to(column.device), column)

    def select(self, indices: Tensor | Sequence[int]) -> "Batch":
        """Return the given rows, in the given order, with all their columns."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        prompt_positions = self.prompt.positions(chosen)
        positions = self.response.positions(chosen)
        return Batch(
            Ragged(_take(self.prompt.values, prompt_positions), self.prompt.lengths[chosen]),
            Ragged(_take(self.response.values, positions), self.response.lengths[chosen]),
            {name: _take(column, positions) for name, column in self.tokens.items()},
            {name: _take(column, chosen) for name, column in self.rows.items()},
        )

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with all tensor columns on the device."""
        return self.map_tensors(lambda column: column.to(device))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Return the batch with `function` applied to every column that is a tensor."""
        rows = {
            name: function(column) if isinstance(column, Tensor) else column
            for name, column in self.rows.items()
        }
        return Batch(
            replace(self.prompt, values=function(self.prompt.values)),
            replace(self.response, values=function(self.response.values)),
            {name: function(column) for name, column in self.tokens.items()},
            rows,
        )


def _trajectory(batch: Batch) -> Trajectory:
    """Return the only row of a batch."""
    tokens = {name: column.tolist() for name, column in batch.tokens.items()}
    rows: dict[str, Any] = {}
    for name, column in batch.rows.items():
        rows[name] = column[0].tolist() if isinstance(column, Tensor) else column[0]
    fields: dict[str, Any] = {name: rows.pop(name) for name in _ROW_FIELDS}
    fields |= {name: tokens.pop(name) for name in _TOKEN_FIELDS}
    if "kept_ids" in rows:
        kept = rows.pop("kept_ids").split(tokens.pop("num_kept"))
        fields["kept_ids"] = [ids.tolist() for ids in kept]
    if "images" in rows:
        fields["images"] = rows.pop("images")
    prompt = batch.prompt.values.tolist()
    response = batch.response.values.tolist()
    return Trajectory(prompt=prompt, response=response, tokens=tokens, rows=rows, **fields)


def _concat_ragged(parts: Sequence[Ragged]) -> Ragged:
    values = torch.cat([part.values for part in parts])
    return Ragged(values, torch.cat([part.lengths for part in parts]))


def _concat_column(parts: Sequence[Any]) -> Any:
    """Return one tensor or one list from the parts of a column."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return [value for part in parts for value in part]


def _check_same_columns(kind: str, names: Sequence[set[str]]) -> None:
    """Raise ColumnError if a column is missing in some of the batches."""
    missing = set.union(*names) - set.intersection(*names)
    if missing:
        raise ColumnError(f"{kind} column {min(missing)!r} is missing in some of the batches")


def _token_source(trajectory: Trajectory) -> Sequence[int]:
    if trajectory.token_source is not None:
        return trajectory.token_source
    return [trajectory.source] * len(trajectory.response)


def _num_kept(trajectory: Trajectory) -> Sequence[int] | None:
    return None if trajectory.kept_ids is None else [len(ids) for ids in trajectory.kept_ids]


def _flatten(
    name: str,
    trajectories: Sequence[Trajectory],
    get: Callable[[Trajectory], Any],
    default: Any,
    dtype: torch.dtype,
) -> Tensor:
    """Return (tokens,) the values of all trajectories; `default` where `get` returns None."""
    flat: list[Any] = []
    for trajectory in trajectories:
        num_tokens = len(trajectory.response)
        values = get(trajectory)
        if values is None:
            values = [default] * num_tokens
        if len(values) != num_tokens:
            raise ColumnError(
                f"trajectory {trajectory.uid}: token column {name!r} has {len(values)} entries "
                f"for {num_tokens} response tokens"
            )
        flat.extend(values)
    return torch.tensor(flat, dtype=dtype)


def _shared_names(
    trajectories: Sequence[Trajectory], get: Callable[[Trajectory], dict[str, Any]]
) -> list[str]:
    """Return the names of the extra columns. Raises ColumnError if a trajectory lacks one."""
    names = [set(get(trajectory)) for trajectory in trajectories]
    all_names: set[str] = set().union(*names)
    for name in all_names:
        if not all(name in present for present in names):
            raise ColumnError(f"column {name!r} is missing in some of the trajectories")
    return sorted(all_names)

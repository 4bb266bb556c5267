"""A streaming engine without a model: the log-prob of a token is minus the weights' version."""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from postgrad.rollout.engine import Completion, Request, Sampling


@dataclass
class FakeRow:
    length: int
    versions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class FakeStream:
    """Each poll samples one token per row; `length(prompt, seed)` is a row's length."""

    batch_wait_s = 0.0

    def __init__(self, engine: "FakeStreamingEngine") -> None:
        self.engine = engine
        self.rows: dict[Hashable, FakeRow] = {}
        self.version = engine.version
        self.num_updates = 0

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.rows = {}

    @property
    def busy(self) -> bool:
        return bool(self.rows)

    def add(self, request: Request, keys: Sequence[Hashable]) -> None:
        for key, seed in zip(keys, request.seeds, strict=True):
            self.rows[key] = FakeRow(self.engine.length(request.prompt, seed))

    def poll(self) -> list[tuple[Hashable, Completion]]:
        finished = []
        for key, row in list(self.rows.items()):
            row.logprobs.append(-float(self.version))
            row.versions.append(self.num_updates)
            if len(row.logprobs) == row.length:
                tokens = [1] * row.length
                finished.append((key, Completion(tokens, row.logprobs, versions=row.versions)))
                del self.rows[key]
        return finished

    def forget(self, key: Hashable) -> None:
        pass

    def refresh_weights(self) -> int:
        self.version = self.engine.version
        self.num_updates += 1
        return self.num_updates

    def cancel(self, keys: Collection[Hashable]) -> None:
        for key in keys:
            self.rows.pop(key, None)


class FakeStreamingEngine:
    """Publishing {"version": n} makes n the version of its weights."""

    shares_weights = False

    def __init__(self, length: Callable[[list[int], int], int]) -> None:
        self.length = length
        self.version = 0

    def open_stream(self, sampling: Sampling, num_rows: int) -> FakeStream:
        return FakeStream(self)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return [[Completion([1], [0.0]) for _ in request.seeds] for request in requests]

    def publish(self, weights: dict[str, torch.Tensor]) -> None:
        self.version = int(weights["version"])

"""The driver's ports of models in another process: same methods and same numbers as local ones."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from postgrad.model.port import FULL, View
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.types import Batch

START_S = 300.0  # time limit of a worker's start, which imports torch and loads the model


class Caller(Protocol):
    """Sends calls to a child process or to actors on Ray."""

    def call(self, port: str, method: str, *arguments: Any) -> Any: ...


class RemoteModel:
    """The port of a policy, reference or critic in another process."""

    def __init__(self, caller: Caller, role: str) -> None:
        self.caller = caller
        self.role = role

    def logprobs(self, batch: Batch, view: View = FULL) -> dict[str, Tensor]:
        return self.caller.call(self.role, "logprobs", batch, view)

    def top_logprobs(self, batch: Batch, num_top: int) -> dict[str, Tensor]:
        return self.caller.call(self.role, "top_logprobs", batch, num_top)

    def values(self, batch: Batch) -> Tensor:
        return self.caller.call(self.role, "values", batch)

    def scores(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return self.caller.call(self.role, "scores", [list(row) for row in rows])

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        return self.caller.call(self.role, "update", batch, step)

    def token_stats(self) -> dict[str, Tensor]:
        return self.caller.call(self.role, "token_stats")

    def weights(self) -> dict[str, Tensor]:
        return self.caller.call(self.role, "weights")

    def publish(self, weights: Mapping[str, Tensor]) -> None:
        self.caller.call(self.role, "publish", weights)

    def save(self, folder: str) -> None:
        self.caller.call(self.role, "save", folder)

    def load(self, folder: str) -> None:
        self.caller.call(self.role, "load", folder)

    def begin_save(self, folder: str) -> None:
        self.caller.call(self.role, "begin_save", folder)

    def saved(self, wait: bool) -> bool:
        return self.caller.call(self.role, "saved", wait)


class RemoteEngine:
    """The port of an engine in another process, or of a role that generates text."""

    def __init__(self, caller: Caller, shares_weights: bool, role: str = "engine") -> None:
        self.caller = caller
        self.shares_weights = shares_weights
        self.role = role

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.caller.call(self.role, "generate", list(requests), sampling)

    def publish(self, weights: dict[str, Tensor]) -> None:
        self.caller.call(self.role, "publish", weights)

    def poll(
        self, version: int, names: Sequence[str], added: Mapping[str, Request]
    ) -> dict[str, list[Any]]:
        """See ContinuousEngine.poll; the engine of a run has it with rollout.stream."""
        return self.caller.call(self.role, "poll", version, list(names), dict(added))

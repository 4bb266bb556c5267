"""The groups of a stream: those that wait, those that are being sampled, and complete ones."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from postgrad.methods.method import Group
from postgrad.rollout.engine import Completion, Request


@dataclass(eq=False)
class StreamGroup:
    """One problem's group.

    Attributes:
        number: counts the groups of a run; seeds are made from it.
        started: the version of the weights when the engine got the request.
        completions: the finished rows, by index.
    """

    number: int
    plan: Group
    request: Request
    started: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.number)

    @property
    def is_complete(self) -> bool:
        return len(self.completions) == len(self.request.seeds)

    @property
    def rows(self) -> list[Completion]:
        """The completions in the order of the seeds."""
        return [self.completions[index] for index in sorted(self.completions)]

    @property
    def oldest(self) -> int:
        """The version of the weights that sampled the oldest token."""
        if not self.is_complete:
            return self.started
        versions = [version for row in self.rows for version in row.versions or ()]
        return min(versions, default=self.started)


class GroupQueue:
    """Groups in the order in which they were drawn, until a step takes them."""

    def __init__(self) -> None:
        self.waiting: deque[StreamGroup] = deque()
        self.running: dict[str, StreamGroup] = {}  # by name
        self.ready: deque[StreamGroup] = deque()  # in the order in which they were completed

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.ready)

    def start(self, max_rows: int, version: int) -> dict[str, Request]:
        """Start waiting groups while fewer than `max_rows` rows run; return their requests.

        Further groups wait here: rows that wait in the engine would count as older than they are.
        """
        requests: dict[str, Request] = {}
        num_rows = sum(len(group.request.seeds) for group in self.running.values())
        while self.waiting:
            group = self.waiting[0]
            num_rows += len(group.request.seeds)
            if self.running and num_rows > max_rows:
                break
            self.waiting.popleft()
            group.started = version
            group.completions.clear()
            self.running[group.name] = group
            requests[group.name] = group.request
        return requests

    def collect(self, result: dict[str, list[Any]]) -> None:
        """Take the result of a poll: complete groups are ready, missing ones start again.

        Rows of groups that were dropped during the poll are ignored.
        """
        for name, index, completion in result["finished"]:
            if name not in self.running:
                continue
            group = self.running[name]
            group.completions[index] = completion
            if group.is_complete:
                self.ready.append(self.running.pop(name))
        for name in reversed(result["missing"]):
            if name in self.running:
                self.waiting.appendleft(self.running.pop(name))

    def drop_older(self, version: int) -> list[StreamGroup]:
        """Remove and return the groups with a token that weights before `version` sampled."""
        dropped = [group for group in self.running.values() if group.oldest < version]
        for group in dropped:
            del self.running[group.name]
        dropped += [group for group in self.ready if group.oldest < version]
        self.ready = deque(group for group in self.ready if group.oldest >= version)
        return dropped

    def take(self, count: int) -> list[StreamGroup]:
        """Remove and return the groups that were completed first."""
        return [self.ready.popleft() for _ in range(count)]

"""A decode loop that stays open: jobs join while others decode, and leave when nobody wants them any more."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from postgrad.rollout.native.engine import Job, NativeEngine, Row, Run

Top = list[tuple[int, float]]  # the likeliest tokens at one place, with their log-probs


@dataclass(eq=False)
class LiveJob(Job):
    """A job that somebody waits for; `num_top` likeliest tokens are noted beside each token."""

    num_top: int = 0
    owner: Any = None
    tops: dict[int, list[Top]] = field(default_factory=dict)  # by row


class LiveRun(Run):
    """`took(row, finish)` tells of every token as it comes."""

    def __init__(
        self, engine: NativeEngine, capacity: int, longest: int, tell: Callable[[Row, str], None]
    ) -> None:
        super().__init__(engine, capacity, longest)
        self.tell = tell

    @property
    def busy(self) -> bool:
        return bool(self.active or self.waiting or self.to_prefill)

    def sample(
        self, logits: Tensor, first: int = 0
    ) -> tuple[list[int], list[float], list[bool], int]:
        picked = super().sample(logits, first)
        for i, row in enumerate(self.active[first : first + len(logits)]):
            job = row.job
            if isinstance(job, LiveJob) and job.num_top:
                logprobs = logits[i].div(job.sampling.temperature or 1.0).log_softmax(-1)
                values, tokens = logprobs.topk(min(job.num_top, len(logprobs)))
                job.tops.setdefault(row.index, []).append(
                    list(zip(tokens.tolist(), values.tolist(), strict=True))
                )
        return picked

    def took(self, row: Row, finish: str) -> None:
        super().took(row, finish)
        self.tell(row, finish)

    def drop(self, jobs: set[Job]) -> None:
        """Forget these jobs, wherever they are; their rows make room."""
        if not jobs:
            return
        self.to_prefill = type(self.to_prefill)(job for job in self.to_prefill if job not in jobs)
        self.waiting = type(self.waiting)(entry for entry in self.waiting if entry.job not in jobs)
        self.remove([i for i, row in enumerate(self.active) if row.job in jobs])

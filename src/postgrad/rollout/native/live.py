"""The decode loop of a server: jobs join and leave while others decode."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from postgrad.rollout.native.engine import DecodeLoop, Job, NativeEngine, Row, Sampled

TopTokens = list[tuple[int, float]]  # the most likely tokens at one position, with log-probs


@dataclass(eq=False)
class LiveJob(Job):
    """A job of a server's request; keeps the `num_top` most likely tokens at each position."""

    num_top: int = 0
    owner: Any = None
    top_tokens: dict[int, list[TopTokens]] = field(default_factory=dict)  # by the row's index


class LiveDecodeLoop(DecodeLoop):
    """Calls `report(row, finish)` for every new token."""

    def __init__(
        self,
        engine: NativeEngine,
        capacity: int,
        longest: int,
        report: Callable[[Row, str], None],
    ) -> None:
        super().__init__(engine, capacity, longest)
        self.report = report

    @property
    def busy(self) -> bool:
        return bool(self.active or self.prefilled or self.to_prefill)

    def sample(self, logits: Tensor, first: int = 0) -> Sampled:
        sampled = super().sample(logits, first)
        for i, row in enumerate(self.active[first : first + len(logits)]):
            job = row.job
            if isinstance(job, LiveJob) and job.num_top:
                top = _top_tokens(logits[i], job.sampling.temperature, job.num_top)
                job.top_tokens.setdefault(row.index, []).append(top)
        return sampled

    def on_token(self, row: Row, finish: str) -> None:
        super().on_token(row, finish)
        self.report(row, finish)

    def drop(self, jobs: set[Job]) -> None:
        """Remove these jobs with all their rows, decoding or not."""
        if not jobs:
            return
        self.to_prefill = deque(job for job in self.to_prefill if job not in jobs)
        self.prefilled = deque(prompt for prompt in self.prefilled if prompt.job not in jobs)
        self.remove([slot for slot, row in enumerate(self.active) if row.job in jobs])


def _top_tokens(logits: Tensor, temperature: float, count: int) -> TopTokens:
    """Return the most likely tokens of one position (vocabulary,) and their log-probs."""
    logprobs = logits.div(temperature or 1.0).log_softmax(-1)
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return list(zip(tokens.tolist(), values.tolist(), strict=True))

"""The decode loop of a server: jobs join and leave while others decode."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from postgrad.rollout.native.decode_loop import DecodeLoop, Job, Row, Sampled
from postgrad.rollout.native.engine import NativeEngine

TopTokens = list[tuple[int, float]]  # the most likely tokens at one position, with log-probs


PROMPT_CHUNK = 512  # prompt tokens whose logits exist at the same time


@dataclass(eq=False)
class LiveJob(Job):
    """A job of a server's request; keeps the `num_top` most likely tokens at each position.

    Its rows also end with one of `stop_token_ids`. With `scores_prompt` it keeps the log-probs of
    the prompt's tokens from the second on: the first has no token before it.
    """

    num_top: int = 0
    scores_prompt: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    owner: Any = None
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_tokens: list[TopTokens] = field(default_factory=list)
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
            if not isinstance(job, LiveJob):
                continue
            if sampled.tokens[i] in job.stop_token_ids:
                sampled.is_stop[i] = True
            if job.num_top:
                logprobs = _logprobs(logits[i], job.sampling.temperature)
                top = _top_tokens(logprobs, job.num_top)
                job.top_tokens.setdefault(row.index, []).append(top)
        return sampled

    def on_prefill(self, jobs: Sequence[Job], hidden: Tensor) -> None:
        for job, states in zip(jobs, hidden, strict=True):
            if isinstance(job, LiveJob) and job.scores_prompt:
                self._score_prompt(job, states)

    def _score_prompt(self, job: LiveJob, states: Tensor) -> None:
        """Set the log-probs of a prompt's tokens from the hidden states (tokens, width)."""
        targets = torch.tensor(job.request.prompt[1:], device=states.device)
        for start in range(0, len(targets), PROMPT_CHUNK):
            chunk = targets[start : start + PROMPT_CHUNK]
            logits = self.compute_logits(states[start : start + len(chunk)])
            logprobs = _logprobs(logits, job.sampling.temperature)
            job.prompt_logprobs += logprobs.gather(1, chunk[:, None])[:, 0].tolist()
            job.prompt_top_tokens += [_top_tokens(row, job.num_top) for row in logprobs]

    def on_token(self, row: Row, finish: str) -> None:
        super().on_token(row, finish)
        self.report(row, finish)

    def drop(self, jobs: set[Job]) -> None:
        """Remove these jobs with all their rows, decoding or not."""
        drop_jobs(self, jobs)


def drop_jobs(loop: DecodeLoop, jobs: Collection[Job]) -> None:
    """Remove jobs with all their rows, decoding or not, from a decode loop."""
    if not jobs:
        return
    loop.to_prefill = deque(job for job in loop.to_prefill if job not in jobs)
    loop.prefilled = deque(prompt for prompt in loop.prefilled if prompt.job not in jobs)
    loop.remove([slot for slot, row in enumerate(loop.active) if row.job in jobs])


def _logprobs(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probs at this temperature; at 1 for temperature 0."""
    return logits.div(temperature or 1.0).log_softmax(-1)


def _top_tokens(logprobs: Tensor, count: int) -> TopTokens:
    """Return the most likely tokens of one position (vocabulary,) and their log-probs."""
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return list(zip(tokens.tolist(), values.tolist(), strict=True))

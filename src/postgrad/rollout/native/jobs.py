"""What the decode loops schedule: jobs, which are requests with sampling parameters, and rows.

Both stores of keys and values have them: slots (decode_loop.py) and pages (paged.py). `LiveLoop`
is the scheduler as a server sees it, over either store.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from postgrad.rollout.engine import Completion, Request, Sampling, token_limit
from postgrad.rollout.native.sampling import RowRandom
from postgrad.rollout.stops import StopStrings

MAX_TOP_LOGPROBS = 20  # most likely tokens that are kept per position
PROMPT_CHUNK = 512  # prompt tokens whose logits exist at the same time

TopTokens = list[tuple[int, float]]  # the most likely tokens at one position, with log-probs


@dataclass(eq=False)
class Job:
    """One request with its sampling parameters and its completions, one per seed."""

    request: Request
    sampling: Sampling
    completions: list[Completion] = field(default_factory=list)
    stops: StopStrings | None = None
    num_started: int = 0  # rows that got a slot, in the order of the seeds

    def __post_init__(self) -> None:
        self.completions = [Completion()] * len(self.request.seeds)

    @property
    def limit(self) -> int:
        """The largest number of tokens per completion."""
        return token_limit(self.request, self.sampling)


@dataclass(eq=False)
class StreamJob(Job):
    """A job of a stream: its rows have keys; `version` is that of the weights."""

    keys: list[Hashable] = field(default_factory=list)
    version: int = 0


@dataclass(eq=False)
class LiveJob(Job):
    """A job of a server's request; keeps the `num_top` most likely tokens at each position.

    With `scores_prompt` it keeps the log-probs of the prompt's tokens from the second on: the
    first has no token before it.
    """

    num_top: int = 0
    scores_prompt: bool = False
    owner: Any = None
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_tokens: list[TopTokens] = field(default_factory=list)
    top_tokens: dict[int, list[TopTokens]] = field(default_factory=dict)  # by the row's index

    def score_prompt(self, states: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """Add the log-probs of the prompt's next tokens.

        Args:
            states: the last hidden states (tokens, width) of the tokens before them; that of the
                prompt's last token is not needed. A long prompt comes in several calls.
            compute_logits: returns the logits of some of them.
        """
        first = 1 + len(self.prompt_logprobs)
        targets = torch.tensor(self.request.prompt[first : first + len(states)])
        targets = targets.to(states.device)
        for start in range(0, len(targets), PROMPT_CHUNK):
            chunk = targets[start : start + PROMPT_CHUNK]
            logits = compute_logits(states[start : start + len(chunk)])
            logprobs = logprobs_at(logits, self.sampling.temperature)
            self.prompt_logprobs += logprobs.gather(1, chunk[:, None])[:, 0].tolist()
            self.prompt_top_tokens += find_top_tokens(logprobs, self.num_top)

    def forget_prompt(self) -> None:
        """Forget the log-probs of the prompt, which other weights will compute again."""
        self.prompt_logprobs = []
        self.prompt_top_tokens = []


@dataclass(eq=False)
class Row:
    """One trajectory that is being sampled."""

    job: Job
    index: int  # which of the job's seeds
    random: RowRandom
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)

    def completion(self, finish: str) -> Completion:
        """Return the completion of a row that has ended."""
        kept_ids = self.kept_ids if self.job.sampling.record_kept else None
        return Completion(self.tokens, self.logprobs, finish, kept_ids=kept_ids)

    def finish_reason(self, is_stop_token: bool) -> str:
        """Return why the row ends with its last token: stop or length; "" when it continues."""
        if is_stop_token or self._completes_stop_string():
            return "stop"
        return "length" if len(self.tokens) == self.job.limit else ""

    def _completes_stop_string(self) -> bool:
        stops = self.job.stops
        return stops is not None and stops.find_end(self.tokens, len(self.tokens) - 1) > 0


# Called with a row, the number of its new tokens, and why it has ended: stop, length, or "" when
# it continues.
Report = Callable[[Row, int, str], None]


class LiveLoop(Protocol):
    """The scheduler of a server: jobs join and leave while others decode."""

    def add(self, job: Job) -> Job:
        """Queue a job; returns it."""
        ...

    def drop(self, jobs: Collection[Job]) -> None:
        """Remove jobs with all their rows, decoding or not."""
        ...

    def step(self) -> None:
        """Let waiting rows join, decode a few tokens, and report the new tokens of each row."""
        ...

    def warm_up(self) -> None:
        """Capture graphs, if there are any, so that no request waits for it."""
        ...

    def close(self) -> None:
        """Give the memory of keys and values back; the loop is not used any more."""
        ...

    @property
    def busy(self) -> bool:
        """Whether there are rows that have not ended."""
        ...

    @property
    def decoding_jobs(self) -> set[Job]:
        """The jobs that have decoding rows."""
        ...

    @property
    def waiting_jobs(self) -> set[Job]:
        """The jobs that have waiting rows."""
        ...


def logprobs_at(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probs at this temperature; at 1 for temperature 0."""
    return logits.div(temperature or 1.0).log_softmax(-1)


def find_top_tokens(logprobs: Tensor, count: int) -> list[TopTokens]:
    """Return the most likely tokens and their log-probs at each position (tokens, vocabulary)."""
    values, tokens = logprobs.topk(min(count, logprobs.shape[1]))
    return [pair_tokens(*pair) for pair in zip(tokens.tolist(), values.tolist(), strict=True)]


def pair_tokens(tokens: Sequence[int], logprobs: Sequence[float]) -> TopTokens:
    return list(zip(tokens, logprobs, strict=True))

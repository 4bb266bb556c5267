"""What the scheduler schedules: jobs, which are requests with sampling parameters, and sequences.

A sequence is one row, from the request to its completion, in a batch, a stream or a server.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.rollout.engine import Completion, Request, Sampling, token_limit
from postgrad.rollout.native.sampling import (
    BLOCK,
    RowRandom,
    TopTokens,
    find_top_tokens,
    logprobs_at,
)
from postgrad.rollout.stops import StopStrings

PROMPT_CHUNK = 512  # prompt tokens whose logits exist at the same time


@dataclass(eq=False)
class Job:
    """One request with its sampling parameters; it has one sequence per seed.

    Attributes:
        keys: names of the sequences in a stream; a later request of the same key continues one.
        num_top: the most likely tokens to record at each position.
        scores_prompt: record the log-probs of the prompt's tokens from the second on; the first
            has no token before it.
        owner: whose job it is; for the caller.
        num_waiting: sequences that do not decode yet; their store may share the prompt.
    """

    request: Request
    sampling: Sampling
    stops: StopStrings | None = None
    keys: Iterable[Hashable] = ()
    num_top: int = 0
    scores_prompt: bool = False
    owner: Any = None
    version: int = 0  # of the weights that compute its prompt in pages
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_tokens: list[TopTokens] = field(default_factory=list)
    sequences: "list[Sequence]" = field(init=False)
    num_waiting: int = field(init=False)

    def __post_init__(self) -> None:
        num_sequences = len(self.request.seeds)
        keys = list(self.keys) or [None] * num_sequences
        self.sequences = [Sequence(self, index, keys[index]) for index in range(num_sequences)]
        self.num_waiting = num_sequences

    @property
    def limit(self) -> int:
        """The largest number of tokens per completion."""
        return token_limit(self.request, self.sampling)

    @property
    def completions(self) -> list[Completion]:
        """The completions, in the order of the seeds."""
        return [sequence.completion() for sequence in self.sequences]

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
class Sequence:
    """One prompt with the tokens that are sampled after it.

    Attributes:
        tokens: sampled tokens that the host has read. Over pages they stay on the device until
            somebody looks; `num_tokens` is always known.
        versions: the version of the weights from each of these tokens on.
        slot: the store's line for it; -1 while it waits.
        num_computed: tokens of the text that have keys and values.
        num_read: tokens that a client already has.
        finish: why it ended: stop or length; "" until then.
    """

    job: Job
    index: int
    key: Hashable
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    top_tokens: list[TopTokens] = field(default_factory=list)
    versions: dict[int, int] = field(default_factory=dict)
    num_tokens: int = 0
    slot: int = -1
    num_computed: int = 0
    num_read: int = 0
    finish: str = ""

    def __post_init__(self) -> None:
        self.random = RowRandom(self.job.request.seeds[self.index])
        self.num_blocks = 0  # of random numbers that were drawn; `uniforms` is the last
        self.uniforms = np.empty(0)

    @property
    def text(self) -> list[int]:
        """The prompt and the sampled tokens."""
        return [*self.job.request.prompt, *self.tokens]

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.job.request.prompt[-1]

    @property
    def num_missing(self) -> int:
        """The tokens to compute before it can decode: a decode step computes the last one."""
        return len(self.job.request.prompt) + self.num_tokens - 1 - self.num_computed

    def uniform(self) -> float:
        """Return the random number of the next token: token n always gets the seed's number n."""
        block, place = divmod(self.num_tokens, BLOCK)
        if block == self.num_blocks:
            self.uniforms = self.random.block()
            self.num_blocks += 1
        return float(self.uniforms[place])

    def append(self, token: int, logprob: float, is_stop_id: bool) -> None:
        """Add a sampled token; it may be the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.num_tokens += 1
        if is_stop_id or self._completes_stop_string():
            self.finish = "stop"
        elif self.num_tokens == self.job.limit:
            self.finish = "length"

    def _completes_stop_string(self) -> bool:
        stops = self.job.stops
        return stops is not None and stops.find_end(self.tokens, self.num_tokens - 1) > 0

    def token_versions(self) -> list[int]:
        """Return the version of the weights that sampled each token."""
        versions: list[int] = []
        for first in sorted(self.versions):
            versions[first:] = [self.versions[first]] * (self.num_tokens - first)
        return versions

    def completion(self) -> Completion:
        """Return the completion of a sequence that has ended.

        Raises: RunError if a log-prob is NaN.
        """
        kept_ids = self.kept_ids if self.job.sampling.record_kept else None
        return Completion(self.tokens, self.logprobs, self.finish, kept_ids=kept_ids)

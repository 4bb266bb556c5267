"""What the scheduler schedules: jobs, which are requests with sampling parameters, and sequences.

A sequence is one row, from the request to its completion, in a batch, a stream or a server.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from postgrad.model.passes.support import vision_of
from postgrad.rollout.engine import Completion, Request, Sampling, StopStrings, token_limit
from postgrad.rollout.native.sampling import (
    TopTokens,
    find_top_tokens,
    logprobs_at,
)

if TYPE_CHECKING:  # imported by runs with pictures
    from postgrad.model.vision import RowPictures

PROMPT_CHUNK = 512  # prompt tokens whose logits exist at the same time


@dataclass(eq=False)
class Job:
    """One request with its sampling parameters; it has one sequence per seed.

    Attributes:
        keys: names of the sequences in a stream; a later request of the same key continues one.
        num_top: the most likely tokens to record at each position.
        scores_prompt: record the log-probs of the prompt's tokens from the second on; the first
            has no token before it.
        is_watched: somebody reads the tokens while they are sampled.
        owner: whose job it is; for the caller.
        num_waiting: sequences that do not decode yet; their store may share the prompt.
        pictures: where the prompt's pictures are; see find_pictures.
    """

    request: Request
    sampling: Sampling
    stops: StopStrings | None = None
    keys: Iterable[Hashable] = ()
    num_top: int = 0
    scores_prompt: bool = False
    is_watched: bool = False
    owner: Any = None
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top_tokens: list[TopTokens] = field(default_factory=list)
    sequences: "list[Sequence]" = field(init=False)
    num_waiting: int = field(init=False)
    pictures: "RowPictures | None" = None

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

    def find_pictures(self, model: Any) -> None:
        """Note where the pictures of the prompt are. Raises ConfigError if the model sees none."""
        if self.request.images and self.pictures is None:
            prompt = torch.tensor(self.request.prompt)
            self.pictures = vision_of(model).read_row(model, prompt, self.request.images)

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

    @property
    def seed(self) -> int:
        return self.job.request.seeds[self.index]

    @property
    def text(self) -> list[int]:
        """The prompt and the sampled tokens."""
        return [*self.job.request.prompt, *self.tokens]

    @property
    def last_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.job.request.prompt[-1]

    @property
    def num_before(self) -> int:
        """The tokens of the text before the last one, which the next decode step computes."""
        return len(self.job.request.prompt) + self.num_tokens - 1

    @property
    def num_missing(self) -> int:
        """The tokens to compute before it can decode."""
        return self.num_before - self.num_computed

    def append(self, tokens: list[int], logprobs: list[float], stop_ids: Collection[int]) -> None:
        """Add sampled tokens, up to the one that ends the sequence.

        None but the last may be a stop id of the model or the last one that the job allows.
        """
        num_checked = len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        stops = self.job.stops
        if stops is not None and (end := stops.find_end(self.tokens, num_checked)):
            for column in (self.tokens, self.logprobs, self.top_tokens, self.kept_ids):
                del column[end:]
            self.finish = "stop"
        elif self.tokens[-1] in stop_ids:
            self.finish = "stop"
        elif len(self.tokens) == self.job.limit:
            self.finish = "length"
        self.num_tokens = len(self.tokens)

    def restart(self) -> None:
        """Forget what was sampled; the seed gives the same tokens again."""
        for column in (self.tokens, self.logprobs, self.top_tokens, self.kept_ids):
            column.clear()
        self.versions.clear()
        self.num_tokens = 0

    def read(self) -> int:
        """Return the number of tokens since the last call; they are the last ones."""
        num_new = self.num_tokens - self.num_read
        self.num_read = self.num_tokens
        return num_new

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

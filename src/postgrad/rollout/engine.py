"""The engine port: prompts in, sampled token ids with their exact log-probs out.

Every trajectory has its own seed, made from (run seed, step, uid, index). Results therefore depend
on neither the order nor the size of batches.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from postgrad.config.schema import RolloutConfig
from postgrad.errors import RunError, Unsupported
from postgrad.model.load.context import check_token_id
from postgrad.model.passes.support import sees_pictures, vision_of
from postgrad.pictures import Picture
from postgrad.problem import Failure, Message


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy.

    Log-probs are those of the distribution at this temperature (at temperature 1 when greedy). A
    response also ends with the token that completes one of the `stop` strings; the response keeps
    that token. `stop_ids` are further ids that end a response; only the native engine reads them.
    With `record_kept`, completions have the ids that top-p, top-k and min-p kept, and
    log-probs are those of the distribution over them; engines that cannot do so are refused by
    methods/support/checks.py.
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    record_kept: bool = False

    def __post_init__(self) -> None:
        # A tuple becomes a list when it crosses a process boundary.
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))

    @property
    def filters(self) -> bool:
        """Whether top-p, top-k or min-p excludes unlikely tokens."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def make_sampling(rollout: RolloutConfig, temperature: float | None = None) -> Sampling:
    """Return the sampling parameters of a run; `temperature` replaces rollout.temperature."""
    return Sampling(
        temperature=rollout.temperature if temperature is None else temperature,
        max_new_tokens=rollout.max_response_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop or ()),
    )


@dataclass(frozen=True)
class Request:
    """One prompt with one seed per wanted continuation.

    `max_new_tokens` lowers the sampling's limit for this prompt; None keeps it. `images` are the
    pictures that the prompt's image tokens show, in order.
    """

    prompt: list[int]
    seeds: list[int]
    max_new_tokens: int | None = None
    images: tuple[Picture, ...] = ()

    def __post_init__(self) -> None:
        # A tuple becomes a list when it crosses a process boundary.
        object.__setattr__(self, "images", tuple(self.images))


def token_limit(request: Request, sampling: Sampling) -> int:
    """Return the largest number of tokens a continuation of this request may have."""
    if request.max_new_tokens is None:
        return sampling.max_new_tokens
    return min(request.max_new_tokens, sampling.max_new_tokens)


def max_row_tokens(request: Request, sampling: Sampling) -> int:
    """Return the largest number of tokens of the prompt and one continuation together."""
    return len(request.prompt) + token_limit(request, sampling)


def check_requests(
    requests: Sequence[Request], sampling: Sampling, max_context: int, model_config: Any
) -> None:
    """Raise RunError for token ids without an embedding, and for rows beyond the context."""
    for request in requests:
        check_token_id(max(request.prompt, default=0), model_config)
    check_context(requests, sampling, max_context)


def refuse_pictures(requests: Sequence[Request], who: str) -> None:
    """Raise Unsupported for requests with pictures, which `who` would not see."""
    if any(request.images for request in requests):
        raise Unsupported(
            f"the data have pictures, and {who} shown none; use rollout.engine=native"
        )


def check_context(requests: Sequence[Request], sampling: Sampling, max_context: int) -> None:
    """Raise RunError when a prompt and its continuation may exceed the model's context."""
    for request in requests:
        if max_row_tokens(request, sampling) > max_context:
            raise RunError(
                f"a prompt of {len(request.prompt)} tokens and {token_limit(request, sampling)} "
                f"new ones exceed the model's context of {max_context}; "
                "lower rollout.max_response_tokens or data.max_prompt_tokens"
            )


@dataclass(frozen=True)
class Completion:
    """One continuation of a prompt.

    Attributes:
        tokens: sampled token ids, the stop token included.
        logprobs: one per token; empty when a server gives none.
        finish: `stop` (the last token is a stop token or completes a stop string) or `length`.
        policy_mask: which tokens the policy wrote; None means all. The other tokens come from
            tools (turns.py) and have log-prob 0.
        turns: number of turns of the policy.
        calls: number of tool calls.
        errors: number of tool calls that failed.
        messages: the turns of the policy and what followed each, if there may be several.
        images: the pictures of the prompt and the response, if there may be several turns; None
            means those of the request.
        episode: what an environment did, if there was one (turns.py).
        kept_ids: per token, the ids that top-p, top-k and min-p kept, with Sampling.record_kept;
            none for tokens that the policy did not write.
        versions: per token, the version of the weights that sampled it, with rollout.stream.

    Raises:
        RunError: a log-prob is NaN.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = "stop"
    policy_mask: list[bool] | None = None
    turns: int = 1
    calls: int = 0
    errors: int = 0
    messages: list[Message] | None = None
    images: tuple[Picture, ...] | None = None
    episode: "Episode | None" = None
    kept_ids: list[list[int]] | None = None
    versions: list[int] | None = None

    def __post_init__(self) -> None:
        if self.images is not None:
            object.__setattr__(self, "images", tuple(self.images))  # JSON has made it a list
        if math.isnan(sum(self.logprobs)):
            raise RunError(
                "sampled tokens have log-probs that are not numbers (NaN): the model's weights are "
                "damaged; start from other weights or an earlier checkpoint"
            )

    def cut(self, end: int) -> "Completion":
        """Return the first `end` tokens of a single turn, which end with a stop."""
        kept_ids = None if self.kept_ids is None else self.kept_ids[:end]
        return Completion(self.tokens[:end], self.logprobs[:end], "stop", kept_ids=kept_ids)

    @property
    def policy_tokens(self) -> list[int]:
        """The tokens that the policy wrote."""
        if self.policy_mask is None:
            return self.tokens
        pairs = zip(self.tokens, self.policy_mask, strict=True)
        return [token for token, is_policy in pairs if is_policy]


@dataclass
class Episode:
    """What an environment did in one trajectory.

    Attributes:
        prompt: the prompt's tokens, with the text of reset().
        question: the last message of the prompt.
        rewards: the reward of each turn of the policy.
        turn_ends: the position in the response after the last token of each turn.
        states: a name of what the policy saw last before each turn; equal for equal texts.
        reward: the sum of `rewards` and of score().
        parts: named parts of the reward.
        state: the result of get_state().
        done: the environment ended the trajectory.
        failure: why there is no reward; None if there is one.
        answer: what verifiers score instead of the response: the last reply of an agent.
    """

    prompt: list[int] = field(default_factory=list)
    question: str = ""
    rewards: list[float] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    state: Any = None
    done: bool = False
    failure: Failure | None = None
    answer: str | None = None


class Engine(Protocol):
    """Turns prompts into completions, in this process or elsewhere."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of each request, in the order of its seeds."""
        ...

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Load these weights. An engine that samples from the trainer's own model ignores them.

        On Ray they are a mapping that fetches tensors as they are read (cluster/stored.py).
        """
        ...

    @property
    def shares_weights(self) -> bool:
        """True when the engine samples from the trainer's own parameters: nothing is published."""
        ...


@torch.no_grad()
def copy_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy a trainer's weights into the model's parameters of the same names."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
    if sees_pictures(model):
        vision_of(model).kept.clear()  # features of the weights before


def trajectory_seed(run_seed: int, step: int, uid: str, index: int) -> int:
    """Return a 64-bit seed for one trajectory of one run."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{uid}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


# ---- stop strings and ids: only the end of a row is decoded

# Tokens decoded beyond the longest string's bytes: the first decoded token may lose its leading
# space or be part of a character.
MARGIN = 4


class StopStrings:
    """Finds the token that completes one of `strings` or is one of `ids`.

    Special tokens count as the text that names them.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.ids = frozenset(ids)
        # A token has at least one byte, so this many tokens hold the longest string.
        self.window = max((len(string.encode()) for string in strings), default=0) + MARGIN

    def find_end(self, tokens: Sequence[int], num_checked: int) -> int:
        """Return the number of tokens up to the first stop string or id; 0 if there is none.

        The first `num_checked` tokens are known to complete no stop string and to be no stop id.
        """
        for position in range(num_checked, len(tokens) if self.ids else 0):
            if tokens[position] in self.ids:
                return self._find_string_end(tokens[:position], num_checked) or position + 1
        return self._find_string_end(tokens, num_checked)

    def _find_string_end(self, tokens: Sequence[int], num_checked: int) -> int:
        if not self.strings:
            return 0
        start = max(0, num_checked - self.window)
        if not self._contains_stop(tokens[start:]):
            return 0
        for end in range(num_checked + 1, len(tokens)):
            if self._contains_stop(tokens[start:end]):
                return end
        return len(tokens)

    def cut(self, completion: Completion) -> Completion:
        """Cut a completion after its first stop string, for engines that cannot stop there."""
        end = self.find_end(completion.tokens, 0)
        return completion.cut(end) if end else completion

    def _contains_stop(self, tokens: Sequence[int]) -> bool:
        text = self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(string in text for string in self.strings)


def make_stops(tokenizer: Any, sampling: Sampling) -> StopStrings | None:
    """Return what finds the stop strings and ids of the sampling; None if it has neither."""
    if not sampling.stop and not sampling.stop_ids:
        return None
    return StopStrings(tokenizer, sampling.stop, sampling.stop_ids)

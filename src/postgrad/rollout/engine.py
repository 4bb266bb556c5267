"""The engine port: prompts in, sampled token ids with their exact log-probs out.

Every trajectory has a seed of its own, made from (run seed, step, uid, index), so results depend on neither the order nor the size
of batches.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from postgrad.config.schema import RolloutConfig
from postgrad.errors import RunError


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy. Log-probs are those of the distribution at this temperature (at 1 when greedy).

    A response also ends with the token that completes one of the `stop` strings; that token belongs to it.
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "stop", tuple(self.stop)
        )  # a list where it has crossed a process boundary

    @property
    def filters(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def sampling_of(rollout: RolloutConfig, temperature: float | None = None) -> Sampling:
    """A run's sampling, at another temperature where one is given."""
    chosen = rollout.temperature if temperature is None else temperature
    return Sampling(
        chosen,
        rollout.max_response_tokens,
        rollout.top_p,
        rollout.top_k,
        rollout.min_p,
        tuple(rollout.stop or ()),
    )


@dataclass(frozen=True)
class Request:
    """One prompt to be continued once for each seed, by at most `max_new_tokens` where that is less than the sampling's."""

    prompt: list[int]
    seeds: list[int]
    max_new_tokens: int | None = None


def limit_of(request: Request, sampling: Sampling) -> int:
    """Most tokens a continuation of this request may have."""
    own = request.max_new_tokens
    return sampling.max_new_tokens if own is None else min(own, sampling.max_new_tokens)


def check_room(requests: Sequence[Request], sampling: Sampling, max_context: int) -> None:
    """Raises RunError when a prompt and what may follow it exceed the context."""
    worst = max(requests, key=lambda r: len(r.prompt) + limit_of(r, sampling), default=None)
    if worst is not None and len(worst.prompt) + limit_of(worst, sampling) > max_context:
        raise RunError(
            f"a prompt of {len(worst.prompt)} tokens and {limit_of(worst, sampling)} new ones exceed the model's context of "
            f"{max_context}; lower rollout.max_response_tokens or data.max_prompt_tokens"
        )


@dataclass(frozen=True)
class Completion:
    """One continuation. `finish` is stop (the last token is a stop token, or completes a stop string) or length.

    Of several turns (turns.py): `written` says which tokens the policy wrote (None: all), the others have log-prob 0; `calls` counts its
    calls of tools, `errors` those that failed.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = "stop"
    written: list[bool] | None = None
    turns: int = 1
    calls: int = 0
    errors: int = 0

    @property
    def own_tokens(self) -> list[int]:
        """What the policy wrote."""
        return (
            self.tokens
            if self.written is None
            else [token for token, own in zip(self.tokens, self.written, strict=True) if own]
        )


class Engine(Protocol):
    """What turns prompts into trajectories, wherever it lives."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """For each request its completions, in the order of its seeds."""
        ...

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Take these weights. An engine that samples from the trainer's own ignores them."""
        ...

    @property
    def shares_weights(self) -> bool:
        """True when the engine samples from the trainer's own parameters: nothing needs publishing."""
        ...


@torch.no_grad()
def take_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy a trainer's weights into the parameters of the same names."""
    for name, p in model.named_parameters():
        p.copy_(weights[name])


def trajectory_seed(run_seed: int, step: int, uid: str, index: int) -> int:
    """64 bits that name one trajectory of one run."""
    digest = hashlib.blake2b(f"{run_seed}/{step}/{uid}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")

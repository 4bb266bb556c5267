"""Models beside the policy that talk: one that continues text, one that answers messages."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from postgrad.problem import Failure, Problem
from postgrad.rollout.engine import Completion, Engine, Request, Sampling
from postgrad.rollout.respond import Prompts


class Chat(Protocol):
    """A model that answers messages."""

    def reply(
        self, chats: Sequence[list[dict[str, str]]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[str | Failure]: ...


@dataclass
class Generator:
    """A model that continues text: an engine, the tokenizer's side of it, and its context length where that is known."""

    engine: Engine
    prompts: Prompts
    context: int | None = None

    def generate(
        self, prompts: Sequence[list[int]], seeds: Sequence[list[int]], sampling: Sampling
    ) -> list[list[Completion] | None]:
        """Continuations of each prompt, one a seed; None where there is no prompt or no room left in the context."""
        room = [
            min(sampling.max_new_tokens, (self.context or sys.maxsize) - len(prompt))
            for prompt in prompts
        ]
        able = [i for i, prompt in enumerate(prompts) if prompt and room[i] > 0]
        out: list[list[Completion] | None] = [None] * len(prompts)
        requests = [Request(prompts[i], seeds[i], room[i]) for i in able]
        for i, completions in zip(
            able, self.engine.generate(requests, sampling) if able else [], strict=True
        ):
            out[i] = completions
        return out

    def reply(
        self, chats: Sequence[list[dict[str, str]]], sampling: Sampling, seeds: Sequence[int]
    ) -> list[str | Failure]:
        """Its answer to each list of messages; a Failure where the messages fill the context."""
        prompts = [self.prompts.encode(Problem("", tuple(messages), "")) for messages in chats]
        said = self.generate(prompts, [[seed] for seed in seeds], sampling)
        full = Failure("judge", f"the messages leave no room in a context of {self.context} tokens")
        return [full if done is None else self.prompts.decode(done[0].tokens) for done in said]

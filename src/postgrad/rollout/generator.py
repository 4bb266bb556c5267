"""Models other than the policy that generate text: they continue a prompt or answer messages."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from postgrad.pictures import Picture
from postgrad.problem import Failure, Problem
from postgrad.rollout.engine import Completion, Engine, Request, Sampling
from postgrad.rollout.respond import Encoder

Messages = list[dict[str, str]]


class Chat(Protocol):
    """A model that answers messages."""

    def reply(
        self, chats: Sequence[Messages], sampling: Sampling, seeds: Sequence[int]
    ) -> list[str | Failure]: ...


@dataclass
class Generator:
    """An engine with its own tokenizer and, where it is known, its context length in tokens."""

    engine: Engine
    encoder: Encoder
    context: int | None = None

    def generate(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[list[int]],
        sampling: Sampling,
        images: Sequence[tuple[Picture, ...]] = (),
    ) -> list[list[Completion] | None]:
        """Return the continuations of each prompt, one per seed.

        The entry is None for an empty prompt and for a prompt that fills the context. `images` are
        the pictures of each prompt; () if none has any.
        """
        context = self.context or sys.maxsize
        rows: list[int] = []
        requests: list[Request] = []
        for i, prompt in enumerate(prompts):
            limit = min(sampling.max_new_tokens, context - len(prompt))
            if prompt and limit > 0:
                rows.append(i)
                shown = images[i] if images else ()
                requests.append(Request(prompt, seeds[i], limit, shown))
        results: list[list[Completion] | None] = [None] * len(prompts)
        if requests:
            groups = self.engine.generate(requests, sampling)
            for i, completions in zip(rows, groups, strict=True):
                results[i] = completions
        return results

    def reply(
        self, chats: Sequence[Messages], sampling: Sampling, seeds: Sequence[int]
    ) -> list[str | Failure]:
        """Return the answer to each list of messages; a Failure if they fill the context."""
        prompts = [self.encoder.prompt(Problem("", tuple(messages), "")) for messages in chats]
        results = self.generate(prompts, [[seed] for seed in seeds], sampling)
        too_long = Failure(
            "judge", f"the messages leave no space in a context of {self.context} tokens"
        )
        return [
            too_long if completions is None else self.encoder.decode(completions[0].tokens)
            for completions in results
        ]

"""A response of several turns as it grows: the policy's tokens, and those between its turns.

What answers, and what the chat template writes between two turns, is part of the response but not
of the policy: it has no log-probs, no loss, and verifiers do not see it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from postgrad.pictures import Picture
from postgrad.problem import Message
from postgrad.rollout.engine import Completion, Episode


@dataclass(eq=False)
class Transcript:
    """One response, turn by turn; `messages` are those after the prompt.

    `images` are the pictures of the prompt and the response.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_mask: list[bool] = field(default_factory=list)
    kept_ids: list[list[int]] = field(default_factory=list)
    has_logprobs: bool = True  # False: the engine gives none
    finish: str = "stop"
    messages: list[Message] = field(default_factory=list)
    images: tuple[Picture, ...] = ()
    episode: Episode = field(default_factory=Episode)
    num_calls: int = 0
    num_errors: int = 0

    @property
    def all_tokens(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    @property
    def num_turns(self) -> int:
        return len(self.episode.turn_ends)

    def add_turn(self, completion: Completion, text: str, last_seen: str) -> None:
        """Append a turn of the policy: its decoded text, and the text that stood before it."""
        self.tokens += completion.tokens
        self.logprobs += completion.logprobs
        self.has_logprobs &= len(completion.logprobs) == len(completion.tokens)
        self.policy_mask += [True] * len(completion.tokens)
        self.kept_ids += completion.kept_ids or [[]] * len(completion.tokens)
        self.finish = completion.finish
        self.messages.append({"role": "assistant", "content": text})
        self.episode.turn_ends.append(len(self.tokens))
        self.episode.rewards.append(0.0)
        name = hashlib.blake2b(last_seen.encode(), digest_size=8).hexdigest()
        self.episode.states.append(name)

    def add_context(self, tokens: list[int], messages: Sequence[Message]) -> None:
        """Append what stands between two turns."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.policy_mask += [False] * len(tokens)
        self.kept_ids += [[]] * len(tokens)
        self.messages += messages

    def completion(self, with_episode: bool = True) -> Completion:
        """Return the response so far."""
        self.episode.prompt = self.prompt
        return Completion(
            tokens=self.tokens,
            logprobs=self.logprobs if self.has_logprobs else [],
            finish=self.finish,
            policy_mask=self.policy_mask,
            turns=self.num_turns,
            calls=self.num_calls,
            errors=self.num_errors,
            messages=self.messages,
            images=self.images,
            episode=self.episode if with_episode else None,
            kept_ids=self.kept_ids if any(self.kept_ids) else None,
        )

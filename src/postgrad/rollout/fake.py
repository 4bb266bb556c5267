"""An engine that says what it is told to: stands for a model in tests."""

from collections.abc import Callable, Sequence

from torch import Tensor

from postgrad.rollout.engine import Completion, Request, Sampling, limit_of

Reply = Callable[[list[int], int], list[int]]  # the tokens that follow a prompt, for a seed


class FakeEngine:
    """Answers every prompt with `reply(prompt, seed)`, cut at the limit of tokens, at log-probs of 0."""

    shares_weights = False

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked: list[Request] = []

    def publish(self, weights: dict[str, Tensor]) -> None:
        """There are none."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self.asked += requests
        return [
            [self._complete(r, seed, limit_of(r, sampling)) for seed in r.seeds] for r in requests
        ]

    def _complete(self, request: Request, seed: int, limit: int) -> Completion:
        tokens = self.reply(request.prompt, seed)
        return Completion(
            tokens[:limit],
            [0.0] * min(limit, len(tokens)),
            "length" if len(tokens) > limit else "stop",
        )

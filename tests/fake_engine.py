"""An engine with fixed responses; it stands in for a model."""

from collections.abc import Callable, Sequence

from torch import Tensor

from postgrad.rollout.engine import Completion, Request, Sampling, token_limit

ReplyFunction = Callable[[list[int], int], list[int]]  # (prompt, seed) -> response tokens


class FakeEngine:
    """Answers every prompt with `reply(prompt, seed)`, cut at the token limit, with log-probs 0."""

    shares_weights = False

    def __init__(self, reply: ReplyFunction) -> None:
        self.reply = reply
        self.requests: list[Request] = []  # all requests so far

    def publish(self, weights: dict[str, Tensor]) -> None:
        """Do nothing: there are no weights."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self.requests += requests
        return [
            [
                self._complete(request, seed, token_limit(request, sampling))
                for seed in request.seeds
            ]
            for request in requests
        ]

    def _complete(self, request: Request, seed: int, limit: int) -> Completion:
        response = self.reply(request.prompt, seed)
        tokens = response[:limit]
        finish = "length" if len(response) > limit else "stop"
        return Completion(tokens, [0.0] * len(tokens), finish)

"""Samples responses to problems and scores them, for evaluation and for validation in training.

Seeds come from (seed, uid, sample) alone, so neither the order nor the number of problems in a
call changes a response.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Completion, Engine, Episode, Request, Sampling, trajectory_seed
from postgrad.rollout.episodes import episode_problem
from postgrad.rollout.turns import TurnRunner, run_turns

STEP = 0  # the step in the seeds of responses that belong to no training step


class Scorer(Protocol):
    """Verifiers or judges behind one call."""

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        token_ids: Callable[[], list[list[int]]] | None = None,
    ) -> list[Score | Failure]: ...


class Encoder(Protocol):
    """Text to token ids and back."""

    def prompt(self, problem: Problem) -> list[int]: ...

    def encode_response(self, text: str, with_end: bool = True) -> list[int]: ...

    def reply(self, problem: Problem, text: str) -> list[int]: ...

    def demonstrations(self, problem: Problem) -> list[list[int]]: ...

    def encode_prefilled(
        self, problem: Problem, opening: str, text: str, closing: str
    ) -> list[int]: ...

    def without_special_tokens(self, text: str) -> str: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_raw(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Response:
    """One response to one problem. `tokens` include the stop token, `text` does not.

    `policy_text` is what the policy itself wrote: `text` without what tools or an environment said;
    of an agent, its last reply.
    """

    problem: Problem
    sample: int
    seed: int
    tokens: list[int]
    text: str
    policy_text: str
    finish: str  # stop or length
    episode: Episode | None = field(default=None, kw_only=True)  # what an environment did


@dataclass(frozen=True)
class Answer(Response):
    """One scored response."""

    verdict: Score | Failure

    @property
    def score(self) -> float:
        """The verifier's score; 0 for a Failure, which is counted separately."""
        return self.verdict.value if isinstance(self.verdict, Score) else 0.0


def generate(
    engine: Engine,
    encoder: Encoder,
    problems: Sequence[Problem],
    sampling: Sampling,
    samples: int,
    seed: int,
    turns: TurnRunner | None = None,
) -> list[Response]:
    """Return `samples` responses per problem, ordered by problem, then by sample."""
    requests: list[Request] = []
    for problem in problems:
        seeds = [trajectory_seed(seed, STEP, problem.uid, i) for i in range(samples)]
        prompt = encoder.prompt(problem)
        requests.append(Request(prompt, seeds, images=problem.prompt_images))
    groups = run_turns(engine, requests, problems, sampling, turns)
    responses: list[Response] = []
    for problem, request, group in zip(problems, requests, groups, strict=True):
        for i, completion in enumerate(group[:samples]):  # an agent may have further trajectories
            responses.append(
                Response(
                    problem=problem,
                    sample=i,
                    seed=request.seeds[i],
                    tokens=completion.tokens,
                    text=encoder.decode(completion.tokens),
                    policy_text=_policy_text(encoder, completion),
                    finish=completion.finish,
                    episode=completion.episode,
                )
            )
    return responses


def _policy_text(encoder: Encoder, completion: Completion) -> str:
    if completion.episode is not None and completion.episode.answer is not None:
        return completion.episode.answer
    return encoder.decode(completion.policy_tokens)


def respond(
    engine: Engine,
    scorer: Scorer,
    encoder: Encoder,
    problems: Sequence[Problem],
    sampling: Sampling,
    samples: int,
    seed: int,
    turns: TurnRunner | None = None,
) -> list[Answer]:
    """Return `samples` scored responses per problem, ordered by problem, then by sample."""
    responses = generate(engine, encoder, problems, sampling, samples, seed, turns)
    verdicts = scorer.score(
        [episode_problem(response.problem, response.episode) for response in responses],
        [response.policy_text for response in responses],
        lambda: [list(response.tokens) for response in responses],  # a reward may change its own
    )
    for i, response in enumerate(responses):
        if response.episode is not None and response.episode.failure is not None:
            verdicts[i] = response.episode.failure
    pairs = zip(responses, verdicts, strict=True)
    return [Answer(**vars(response), verdict=verdict) for response, verdict in pairs]

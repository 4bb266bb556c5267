"""Let an engine answer problems and let verifiers judge the answers: what evaluation and validation during training share.

Seeds come from (seed, uid, sample) alone, so neither the order nor the number of problems in a call changes an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Engine, Request, Sampling, trajectory_seed
from postgrad.rollout.turns import Turns, run_turns

STEP = 0  # answers outside the steps of a run have seeds as if they came before its first step


class Scorer(Protocol):
    """Verifiers, behind one call."""

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[Score | Failure]: ...


class Prompts(Protocol):
    """Text to tokens and back."""

    def encode(self, problem: Problem) -> list[int]: ...

    def encode_response(self, text: str, with_end: bool = True) -> list[int]: ...

    def encode_demonstrations(self, problem: Problem) -> list[list[int]]: ...

    def encode_prefilled(
        self, problem: Problem, opening: str, text: str, closing: str
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def decode_raw(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Answer:
    """One judged response to one problem. `tokens` holds the stop token too, `text` does not."""

    problem: Problem
    sample: int
    seed: int
    tokens: list[int]
    text: str
    finish: str  # stop or length
    verdict: Score | Failure

    @property
    def score(self) -> float:
        """The verifier's score; 0 for what could not be judged, which is counted apart."""
        return self.verdict.value if isinstance(self.verdict, Score) else 0.0


def respond(
    engine: Engine,
    scorer: Scorer,
    prompts: Prompts,
    problems: Sequence[Problem],
    sampling: Sampling,
    samples: int,
    seed: int,
    turns: Turns | None = None,
) -> list[Answer]:
    """`samples` judged responses to each problem, in the order of the problems and then of the samples."""
    seeds = [
        [trajectory_seed(seed, STEP, problem.uid, i) for i in range(samples)]
        for problem in problems
    ]
    requests = [
        Request(prompts.encode(problem), own) for problem, own in zip(problems, seeds, strict=True)
    ]
    completions = [
        done for group in run_turns(engine, requests, problems, sampling, turns) for done in group
    ]
    places = [
        (problem, i, own[i])
        for problem, own in zip(problems, seeds, strict=True)
        for i in range(samples)
    ]
    texts = [prompts.decode(done.tokens) for done in completions]
    verdicts = scorer.score(
        [problem for problem, _, _ in places],
        [prompts.decode(done.own_tokens) for done in completions],
    )
    return [
        Answer(problem, sample, own, done.tokens, text, done.finish, verdict)
        for (problem, sample, own), done, text, verdict in zip(
            places, completions, texts, verdicts, strict=True
        )
    ]

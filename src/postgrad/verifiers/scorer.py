"""The scorer that the score stage uses: the right verifier for each problem, inline or in the pool."""

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.verifiers.pool import VerifierPool
from postgrad.verifiers.verifier import choose, find_verifier

AUTO, LLM_JUDGE = "auto", "llm_judge"


class JudgeModel(Protocol):
    """A model that judges (judge/llm.py), once it can be reached."""

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[Score | Failure]: ...


class VerifierBackend(Protocol):
    """Verifiers at work: child processes of this one (verifiers/pool.py), or actors of a cluster."""

    def verify(
        self, items: Sequence[tuple[str, Problem]], verifier_names: Sequence[str]
    ) -> list[Score | Failure]: ...


class Scorer:
    """Scores responses with one verifier, or with the one that fits each problem's data source (`auto`).

    Args:
        verifier: `auto`, a built-in name, `package.module:function`, `path/to/file.py:function`, a sum: `auto + 0.1*format`, or
            `llm_judge`: then whoever starts the models sets `llm`.
        timeout_s: time limit for judging one response.
        workers: child processes for the verifiers that need one; they start with the first response that does.
        minimize: turn the sign of every score, so that a run trains away from what the verifier looks for. Named parts stay as they are.

    Raises:
        ConfigError: there is no such verifier, or a limit is not positive.
    """

    def __init__(
        self, verifier: str = AUTO, timeout_s: float = 5.0, workers: int = 2, minimize: bool = False
    ) -> None:
        if not timeout_s > 0 or workers < 1:
            raise ConfigError(
                f"reward.timeout_s={timeout_s} must be above 0 and reward.workers={workers} at least 1"
            )
        if verifier not in (AUTO, LLM_JUDGE):
            find_verifier(_with_auto(verifier, "exact"))
        self.verifier, self.minimize = verifier, minimize
        self.judge: JudgeModel | None = None
        self.own = VerifierPool(workers, timeout_s)
        self.pool: VerifierBackend = (
            self.own
        )  # whoever places verifiers elsewhere sets it, and ends them

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def name_for(self, problem: Problem) -> str:
        """The verifier this problem is judged with."""
        return (
            _with_auto(self.verifier, choose(problem)) if AUTO in self.verifier else self.verifier
        )

    def check(self, problems: Iterable[Problem]) -> None:
        """Raise ConfigError now, before a run starts, if some problem has no verifier."""
        for problem in problems:
            self.name_for(problem)

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """One Score or Failure for each response, in order; `problems` has the problem of each response."""
        if len(problems) != len(responses):
            raise ValueError(f"{len(problems)} problems for {len(responses)} responses")
        if self.verifier == LLM_JUDGE:
            assert self.judge is not None, (
                "a judge that is a model is set when the models are there"
            )
            verdicts = self.judge.score(problems, responses)
        else:
            names = [self.name_for(problem) for problem in problems]
            verdicts = self.pool.verify(list(zip(responses, problems, strict=True)), names)
        return [_turned(verdict) for verdict in verdicts] if self.minimize else verdicts

    def close(self) -> None:
        """Stop the pool's processes."""
        self.own.close()


def _with_auto(verifier: str, chosen: str) -> str:
    """The setting with the verifier that was chosen where it says auto."""
    return re.sub(r"(?<![\w./:-])auto(?![\w./:-])", lambda _: chosen, verifier)


def _turned(verdict: Score | Failure) -> Score | Failure:
    return Score(-verdict.value, verdict.parts) if isinstance(verdict, Score) else verdict

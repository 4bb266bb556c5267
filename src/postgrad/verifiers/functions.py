"""Rewards that score in this process: Python objects, and TRL's functions (trl.py).

A reward is a function `(response, problem)`, also `async def`, or an object with
`score(problems, responses)` that scores a batch at once.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from typing import Any, Protocol

from postgrad.errors import ConfigError, RunError, UserCode, WrongValue
from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import place_of
from postgrad.verifiers.loading import as_verifier, required_arguments
from postgrad.verifiers.port import Verifier, as_score, one_line, run_verifier

TokenIds = Callable[[], list[list[int]]]  # returns those of the responses


class BatchReward(Protocol):
    """Scores a batch of responses at once, for example with a reward model."""

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> Sequence[Any]:
        """Return one number, Score or Failure per response."""
        ...


class FunctionReward:
    """A function `(response, problem)` of this process, as a BatchReward.

    Calls run one after another without a time limit. Calls of an async function run concurrently,
    and each has `timeout_s` seconds.
    """

    def __init__(self, function: Verifier, timeout_s: float) -> None:
        self.function = function
        self.timeout_s = timeout_s

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """Return one Score or Failure per response."""
        pairs = list(zip(responses, problems, strict=True))
        if not is_async(self.function):
            return [run_verifier(self.function, response, problem) for response, problem in pairs]

        async def score_all() -> list[Score | Failure]:
            return list(await asyncio.gather(*(self._score_async(*pair) for pair in pairs)))

        return run_in_thread(score_all)

    async def _score_async(self, response: str, problem: Problem) -> Score | Failure:
        try:
            call = self.function(response, problem)
            return as_score(await asyncio.wait_for(call, self.timeout_s))
        except TimeoutError:
            return Failure("timeout", f"no score within {self.timeout_s:g} s")
        except Exception as error:
            return Failure("error", one_line(error) + place_of(error))


def as_batch_reward(reward: Any, label: str, timeout_s: float) -> BatchReward:
    """Return a Python object as a BatchReward; `label` starts the error message.

    Raises:
        ConfigError: it cannot be called as function(response, problem).
    """
    if callable(reward):
        function = as_verifier(reward, label)
        if needed := required_arguments(function):
            raise UserCode(
                f"{label} also needs {', '.join(needed)}, which no reward is given; "
                "define it with (response, problem), and read columns of the row in problem.extra",
                at="reward",
            )
        return FunctionReward(function, timeout_s)
    if callable(getattr(reward, "score", None)):
        return reward
    raise WrongValue(
        f"{label}: {type(reward).__name__} is not a reward; give a function "
        "(response, problem), the name of a verifier, or an object with score(problems, responses)",
        at="reward",
    )


def score_batch(
    label: str, count: int, score: Callable[[], Any], none: Failure | None = None
) -> list[Score | Failure]:
    """Return what `score` returns as `count` Scores or Failures; `none` is the one for None.

    Raises:
        RunError: it returns another number of scores.
    """
    try:
        returned = score()
        if isinstance(returned, str | Mapping | Set) or not hasattr(returned, "__len__"):
            raise TypeError(f"it returned {type(returned).__name__}, not a list of rewards")
        results = list(returned)
    except (ConfigError, RunError):
        raise
    except Exception as error:
        return [Failure("error", one_line(error) + place_of(error))] * count
    if len(results) != count:
        raise RunError(
            f"{label} returned {len(results)} scores for {count} responses; "
            "return one per response, in order"
        )
    return [as_score(none if result is None else result) for result in results]


def is_async(function: Any) -> bool:
    """Return whether a function or an object's __call__ is `async def`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object with `async def __call__`
    )


def run_in_thread(function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of an async function.

    Its event loop runs in another thread: the main thread of a notebook has a running loop.
    """
    results: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(asyncio.run(function()))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    if not results:
        raise RunError("the async reward stopped its event loop; see its output above")
    return results[0]

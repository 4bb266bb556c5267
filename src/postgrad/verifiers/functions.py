"""Rewards given as Python objects: they score responses in this process.

A reward is a function `(response, problem)`, also `async def`, an object with
`score(problems, responses)` that scores a batch at once, or a reward function of TRL. Several are
summed with weights; a term that is None (TRL) is left out of the sum.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from postgrad.errors import ConfigError, RunError
from postgrad.problem import Failure, Problem, Score
from postgrad.user_code import place_of
from postgrad.verifiers.combine import Term, add_term
from postgrad.verifiers.loading import as_verifier, required_arguments
from postgrad.verifiers.port import as_score, one_line, run_verifier
from postgrad.verifiers.reward_log import RewardLog
from postgrad.verifiers.trl_rewards import (
    NO_ARGUMENTS,
    NO_REWARD,
    LazyArguments,
    TrlReward,
    is_trl_reward,
)


class BatchReward(Protocol):
    """Scores a batch of responses at once, for example with a reward model."""

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> Sequence[Any]:
        """Return one number, Score or Failure per response."""
        ...


@dataclass(frozen=True)
class WeightedReward:
    """One term of a sum of rewards."""

    weight: float
    name: str
    reward: Any  # a verifier's name, a function, also async, a BatchReward or a FunctionScorer


class FunctionScorer:
    """Scores with rewards that are Python objects.

    Functions run one after another without a time limit. Calls of an async function run
    concurrently, and each has `timeout_s` seconds.

    Raises:
        ConfigError: a reward cannot be called as function(response, problem).
    """

    def __init__(self, rewards: Sequence[WeightedReward], timeout_s: float) -> None:
        self.rewards = [_wrap_trl(reward, timeout_s) for reward in rewards]
        self.timeout_s = timeout_s
        self.functions = [_as_function(reward) for reward in self.rewards]

    def num_rewards(self) -> int:
        """Return the number of rewards, with those of sums inside of sums."""
        inner = [reward.reward for reward in self.rewards]
        return sum(r.num_rewards() if isinstance(r, FunctionScorer) else 1 for r in inner)

    def check(self, problems: Sequence[Problem], available: Collection[str] = ()) -> None:
        """Raise ConfigError if a row lacks a column that a reward function of TRL needs.

        Also if such a function needs completion_ids or trainer_state, and it is not `available`.
        """
        for reward in self.rewards:
            if isinstance(reward.reward, TrlReward | FunctionScorer):
                reward.reward.check(problems, available)

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        lazy_arguments: LazyArguments = NO_ARGUMENTS,
        log: RewardLog | None = None,
    ) -> list[Score | Failure]:
        """Return one Score or Failure per response; the first Failure of a sum counts.

        `lazy_arguments` are for reward functions of TRL, and `log` gets what they log.
        """
        log = log or RewardLog()
        columns = [
            self._score_one(reward, function, problems, responses, lazy_arguments, log)
            for reward, function in zip(self.rewards, self.functions, strict=True)
        ]
        if len(columns) == 1 and self.rewards[0].weight == 1.0:
            return columns[0]
        return [self._sum(row) for row in zip(*columns, strict=True)]

    def _score_one(
        self,
        reward: WeightedReward,
        function: Callable[..., Any] | None,
        problems: Sequence[Problem],
        responses: Sequence[str],
        lazy_arguments: LazyArguments,
        log: RewardLog,
    ) -> list[Score | Failure]:
        if function is None:
            return _score_batch(reward, problems, responses, lazy_arguments, log)
        if _is_async(function):
            return _run_async(function, problems, responses, self.timeout_s)
        pairs = zip(responses, problems, strict=True)
        return [run_verifier(function, response, problem) for response, problem in pairs]

    def _sum(self, scores: Sequence[Score | Failure]) -> Score | Failure:
        total = 0.0
        parts: dict[str, float] = {}
        none = [isinstance(score, Failure) and score.kind == NO_REWARD for score in scores]
        if all(none):
            return scores[0]
        for reward, score, is_none in zip(self.rewards, scores, none, strict=True):
            if is_none:
                continue
            value = add_term(Term(reward.weight, reward.name), score, parts)
            if isinstance(value, Failure):
                return value
            total += value
        return Score(total, parts)


def _wrap_trl(reward: WeightedReward, timeout_s: float) -> WeightedReward:
    """Return the reward; a reward function of TRL as a TrlReward."""
    function = reward.reward
    if not callable(function) or not is_trl_reward(function):
        return reward
    return replace(reward, reward=TrlReward(function, f"reward {reward.name}", timeout_s))


def _as_function(reward: WeightedReward) -> Callable[..., Any] | None:
    """Return the checked function of a reward; None for a BatchReward."""
    if callable(reward.reward):
        function = as_verifier(reward.reward, f"reward {reward.name}")
        if needed := required_arguments(function):
            raise ConfigError(
                f"reward {reward.name} also needs {', '.join(needed)}, which no reward is given; "
                "define it with (response, problem), and read columns of the row in problem.extra"
            )
        return function
    if callable(getattr(reward.reward, "score", None)):
        return None
    raise ConfigError(
        f"reward {reward.name}: {type(reward.reward).__name__} is not a reward; give a function "
        "(response, problem), the name of a verifier, or an object with score(problems, responses)"
    )


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # an object with `async def __call__`
    )


def _score_batch(
    reward: WeightedReward,
    problems: Sequence[Problem],
    responses: Sequence[str],
    lazy_arguments: LazyArguments,
    log: RewardLog,
) -> list[Score | Failure]:
    arguments: list[Any] = [problems, responses]
    own_log = RewardLog()  # what a function logs before it raises is dropped
    if isinstance(reward.reward, TrlReward | FunctionScorer):
        arguments += [lazy_arguments, own_log]
    try:
        returned = reward.reward.score(*arguments)
        if isinstance(returned, Mapping | Set):
            raise TypeError(f"it returned {type(returned).__name__}, not a list of rewards")
        results = list(returned)
    except (ConfigError, RunError):
        raise
    except Exception as error:
        return [Failure("error", one_line(error) + place_of(error))] * len(responses)
    if len(results) != len(responses):
        raise RunError(
            f"reward {reward.name} returned {len(results)} scores for {len(responses)} responses; "
            "return one per response, in order"
        )
    own_log.check(f"reward {reward.name}", len(responses))
    log.add(own_log)
    return [as_score(result) for result in results]


def _run_async(
    function: Callable[..., Any],
    problems: Sequence[Problem],
    responses: Sequence[str],
    timeout_s: float,
) -> list[Score | Failure]:
    """Return the scores of an async function, all calls at once.

    The event loop runs in a thread of its own: a notebook's main thread has a running loop.
    """

    async def score(response: str, problem: Problem) -> Score | Failure:
        try:
            return as_score(await asyncio.wait_for(function(response, problem), timeout_s))
        except TimeoutError:
            return Failure("timeout", f"no score within {timeout_s:g} s")
        except Exception as error:
            return Failure("error", one_line(error) + place_of(error))

    async def score_all() -> list[Score | Failure]:
        pairs = zip(responses, problems, strict=True)
        return list(await asyncio.gather(*(score(one, problem) for one, problem in pairs)))

    results: list[list[Score | Failure]] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(score_all())), daemon=True)
    thread.start()
    thread.join()
    if not results:
        raise RunError("the async reward stopped its event loop; see its output above")
    return results[0]

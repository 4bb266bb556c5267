"""Rewards of the Python API: a verifier's name, a function, or several with weights."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from postgrad.api.settings import object_name
from postgrad.errors import Conflict, Missing, WrongValue
from postgrad.problem import Problem
from postgrad.user_code import PythonObject
from postgrad.verifiers.expression import Term, scaled, sum_text
from postgrad.verifiers.functions import BatchReward

# What a reward may be: a verifier's name, a function (response, problem), or a batch reward.
RewardFunction = Callable[[str, Problem], Any]
Reward = str | RewardFunction | BatchReward


def as_verifier_setting(
    reward: Reward | Sequence[Reward] | None, weights: Sequence[float] | None = None
) -> str | None:
    """Return the value of reward.verifier; None leaves the recipe's.

    Names stay text, so their verifiers run in child processes with time limits. Functions become
    a PythonObject and run in this process. Raises ConfigError.
    """
    if reward is None:
        if weights is not None:
            raise Missing("reward_weights has no rewards to weigh; give reward=[...]", at="reward")
        return None
    rewards: list[Any] = list(reward) if isinstance(reward, list | tuple) else [reward]
    factors = _check_weights(rewards, weights)
    if len(rewards) == 1 and isinstance(rewards[0], str) and factors == [1.0]:
        return rewards[0]
    terms = [
        term for one, weight in zip(rewards, factors, strict=True) for term in _terms(one, weight)
    ]
    labels = [term.label for term in terms if term.name]
    for label in labels:
        if labels.count(label) > 1:
            raise Conflict(
                f"two rewards are called {label}, so their metrics would have one name; rename one",
                at="reward",
            )
    if all(isinstance(one, str) for one in rewards):
        return sum_text(terms)
    if len(terms) == 1 and factors == [1.0]:
        return PythonObject(labels[0], terms)
    return PythonObject(sum_text(terms), terms)


def _terms(reward: Reward, weight: float) -> list[Term]:
    if isinstance(reward, str):
        return scaled(weight, reward)
    return [Term(weight, object_name(reward), function=reward)]


def _is_finite(weight: Any) -> bool:
    try:
        return math.isfinite(weight)
    except TypeError:  # a text, None, a list
        return False


def _check_weights(rewards: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    if not rewards:
        raise Missing("reward is an empty list; give at least one reward", at="reward")
    if weights is None:
        return [1.0] * len(rewards)
    if len(weights) != len(rewards):
        raise Conflict(
            f"{len(rewards)} rewards and {len(weights)} reward_weights; give one weight per reward",
            at="reward_weights",
        )
    if not all(_is_finite(weight) for weight in weights):
        raise WrongValue(f"reward_weights={list(weights)}: every weight must be a finite number")
    return [float(weight) for weight in weights]

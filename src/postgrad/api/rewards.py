"""Rewards of the Python API: a verifier's name, a function, or several with weights."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from postgrad.api.settings import object_name
from postgrad.errors import ConfigError
from postgrad.problem import Problem
from postgrad.user_code import PythonObject
from postgrad.verifiers.functions import BatchReward, WeightedReward

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
            raise ConfigError("reward_weights has no rewards to weigh; give reward=[...]")
        return None
    rewards = list(reward) if isinstance(reward, list | tuple) else [reward]
    factors = _check_weights(rewards, weights)
    if all(isinstance(one, str) for one in rewards):
        return _sum_text([str(one) for one in rewards], factors)
    terms = [
        WeightedReward(weight, _name(one), one)
        for one, weight in zip(rewards, factors, strict=True)
    ]
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"two rewards are called {name}, so their metrics would have one name; rename one"
            )
    if len(terms) == 1 and factors == [1.0]:
        return PythonObject(names[0], terms)
    parts = [f"{weight:g}*{name}" for name, weight in zip(names, factors, strict=True)]
    return PythonObject(" + ".join(parts), terms)


def _is_finite(weight: Any) -> bool:
    try:
        return math.isfinite(weight)
    except TypeError:  # a text, None, a list
        return False


def _check_weights(rewards: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    if not rewards:
        raise ConfigError("reward is an empty list; give at least one reward")
    if weights is None:
        return [1.0] * len(rewards)
    if len(weights) != len(rewards):
        raise ConfigError(
            f"{len(rewards)} rewards and {len(weights)} reward_weights; give one weight per reward"
        )
    if not all(_is_finite(weight) for weight in weights):
        raise ConfigError(f"reward_weights={list(weights)}: every weight must be a finite number")
    return [float(weight) for weight in weights]


def _sum_text(names: list[str], weights: list[float]) -> str:
    """Return verifiers and weights as the text of a sum; a single one without weight as it is."""
    if len(names) == 1 and weights == [1.0]:
        return names[0]
    text = ""
    for name, weight in zip(names, weights, strict=True):
        sign = "-" if weight < 0 else "+"
        text += f" {sign} {abs(weight):g}*{name}" if text else f"{weight:g}*{name}"
    return text


def _name(reward: Any) -> str:
    return reward if isinstance(reward, str) else object_name(reward)

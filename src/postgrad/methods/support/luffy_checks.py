"""Checks of settings and data for tokens of others. They raise ConfigError or RunError."""

import math
from collections.abc import Sequence
from typing import Any

from postgrad.algorithms.prefixes import prefix_ratio
from postgrad.algorithms.shaping import (
    OFF_OPTIONS,
    OFF_READS,
    ON_OPTIONS,
    ON_READS,
    check_options,
)
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import ConfigError, RunError
from postgrad.methods.method import Supply
from postgrad.problem import named
from postgrad.types import Problem

MAX_COUNTED = 1000  # problems whose demonstrations are encoded before the run


def check_shapes(settings: Any, off_shape: str) -> None:
    """Refuse options that the chosen shapes do not take."""
    off_reads = () if settings.sft_coef else OFF_READS[off_shape]
    reason = "method.sft_coef" if settings.sft_coef else f"method.off_shape={off_shape}"
    check_options("method.off_options", settings.off_options, OFF_OPTIONS, off_reads, reason)
    on_reads = ON_READS[settings.on_shape]
    reason = f"method.on_shape={settings.on_shape}"
    check_options("method.on_options", settings.on_options, ON_OPTIONS, on_reads, reason)


def check(config: Any) -> None:
    """Refuse numbers that do not fit together."""
    settings = config.method
    samples = config.rollout.samples
    if settings.num_demonstrations > samples:
        raise ConfigError(
            f"method.num_demonstrations={settings.num_demonstrations} exceeds "
            f"rollout.samples={samples}; set it to at most {samples}"
        )
    if settings.prefix_min > settings.prefix_max:
        raise ConfigError(
            f"method.prefix_min={settings.prefix_min} exceeds "
            f"method.prefix_max={settings.prefix_max}; lower it"
        )
    uses_parts = settings.prefix_strategy != "random" or settings.prefix_min < 1
    if uses_parts and settings.num_demonstrations and config.rollout.tools:
        raise ConfigError(
            "rollout.tools needs whole demonstrations, because a part of one may end inside a tool "
            "call; use method.prefix_strategy=random method.prefix_min=1, or remove rollout.tools"
        )
    if settings.demonstration_probs and (uses_parts or settings.sft_coef):
        raise ConfigError(
            "method.demonstration_probs needs whole demonstrations (method.prefix_min=1) and "
            "method.sft_coef=0"
        )


def count_demonstrations(config: Any, encoder: Encoder, problems: Sequence[Problem]) -> Supply:
    """Count the problems that have a demonstration of which a row gets at least one token.

    Counts in the first problems only, unless none of them has one: encoding takes time.
    """
    limit = config.rollout.max_response_tokens
    largest = _largest_prefix(config)
    num_counted, num, shortest = 0, 0, math.inf
    for problem in problems:
        if num and num_counted == MAX_COUNTED:
            break
        num_counted += 1
        lengths = [len(trace) for trace in encoder.demonstrations(problem)]
        num += any(length <= limit and int(length * largest) > 0 for length in lengths)
        shortest = min([shortest, *lengths])
    if math.isinf(shortest):
        fix = "add a column target, or set method.num_demonstrations=0"
    elif shortest > limit:
        fix = f"the shortest has {shortest}: raise rollout.max_response_tokens"
    else:
        fix = f"the largest prefix is {largest:.2g} of one: raise method.prefix_*"
    those = "" if num_counted == len(problems) else "the first "
    line = (
        f"demonstrations: {num:,} of {those}{num_counted:,} problems have one that fits in "
        f"{limit} tokens (rollout.max_response_tokens)"
    )
    return Supply(num, line, fix)


def _largest_prefix(config: Any) -> float:
    """Return the largest share of a demonstration's tokens that a row of the run can get."""
    settings = config.method
    num_copies = settings.num_demonstrations
    if num_copies < 0:
        num_copies = config.rollout.samples
    ratios = [
        prefix_ratio(
            settings.prefix_strategy,
            1.0,
            step=step,
            copy=num_copies - 1,
            num_copies=num_copies,
            low=settings.prefix_min,
            high=settings.prefix_max,
            peak=settings.prefix_peak,
            steps=settings.prefix_steps,
        )
        for step in (1, config.training.steps)
    ]
    return max(ratios)


def author_probs(problem: Problem, name: str, num_tokens: int) -> list[float]:
    """Return the author's probability of each token. Raises RunError if their number is wrong."""
    probs = problem.extra.get(name) or []
    if len(probs) != num_tokens:
        raise RunError(
            f"{named(problem)} has {len(probs)} numbers in the column {name} "
            f"(method.demonstration_probs) for {num_tokens} tokens, with the end token; "
            "correct the data"
        )
    return probs

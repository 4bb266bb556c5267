"""Episodes as columns of a batch, and the results of environments for verifiers.

A verifier finds what an environment did in `problem.extra["environment"]`: `reward`, `parts`,
`rewards` (one per turn), `done` and `state` (the result of get_state()).
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Completion, Episode

KEY = "environment"  # the row column, and the key of problem.extra


def episode_row(episode: Episode) -> dict[str, Any]:
    """Return the row columns of an episode."""
    failure = episode.failure
    answer = {} if episode.answer is None else {"answer": episode.answer}
    return answer | {
        KEY: json.dumps(_as_extra(episode), default=str),
        "environment_failure": f"{failure.kind}: {failure.reason}" if failure else "",
        "question": episode.question,
        "turn_rewards": list(episode.rewards),
        "turn_states": list(episode.states),
    }


def turn_column(completion: Completion) -> list[float]:
    """Return the turn of each token, from 0; -1 for tokens that the policy did not write."""
    assert completion.episode is not None and completion.policy_mask is not None
    turns: list[float] = []
    ends = completion.episode.turn_ends
    turn = 0
    for position, is_policy in enumerate(completion.policy_mask):
        while turn < len(ends) and position >= ends[turn]:
            turn += 1
        turns.append(float(turn) if is_policy else -1.0)
    return turns


def row_problems(problems: Sequence[Problem], columns: Sequence[str]) -> list[Problem]:
    """Return the problems with what their environments did, from the row column KEY."""
    return [
        replace(problem, extra={**problem.extra, KEY: json.loads(text)})
        for problem, text in zip(problems, columns, strict=True)
    ]


def episode_problem(problem: Problem, episode: Episode | None) -> Problem:
    """Return the problem with what its environment did; unchanged if there was none."""
    if episode is None:
        return problem
    extra = json.loads(json.dumps(_as_extra(episode), default=str))
    return replace(problem, extra={**problem.extra, KEY: extra})


def failed_environments(
    results: Sequence[Score | Failure], failures: Sequence[str]
) -> list[Score | Failure]:
    """Return the results, with a Failure for each trajectory whose environment failed."""
    merged: list[Score | Failure] = []
    for result, failure in zip(results, failures, strict=True):
        kind, _, reason = failure.partition(": ")
        merged.append(Failure(f"environment {kind}", reason) if failure else result)
    return merged


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return means over completions: turns, tool calls, failed calls, ended episodes."""
    count = max(1, len(completions))
    metrics: dict[str, float] = {}
    for name in ("turns", "calls", "errors"):
        metrics[f"tools/{name}"] = sum(vars(one)[name] for one in completions) / count
    episodes = [one.episode for one in completions if one.episode is not None]
    if episodes:
        metrics["environment/done"] = sum(episode.done for episode in episodes) / count
        failed = sum(episode.failure is not None for episode in episodes)
        metrics["environment/failures"] = failed / count
    return metrics


def _as_extra(episode: Episode) -> dict[str, Any]:
    return {
        "reward": episode.reward,
        "parts": episode.parts,
        "rewards": episode.rewards,
        "done": episode.done,
        "state": episode.state,
    }

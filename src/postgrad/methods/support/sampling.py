"""Sampling of responses, and the rows that they become."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from postgrad.methods.ports import Ports
from postgrad.rollout.engine import Completion, Request, Sampling, trajectory_seed
from postgrad.rollout.episodes import episode_row, turn_column
from postgrad.rollout.turns import run_turns
from postgrad.types import DEMONSTRATION, POLICY, TOOL, Problem, Trajectory

# A problem, the indices of its samples, and prefixes for the first of them.
SampleRequest = tuple[Problem, Sequence[int], Sequence[list[int]]]


def sample_requests(
    ports: Ports, requests: Sequence[SampleRequest], sampling: Sampling, run_seed: int, step: int
) -> list[list[Completion]]:
    """Completions per request, over several turns if there are tools or an environment.

    The seed of a sample follows from run, step, problem and index. A problem that occurs twice, as
    at the end of an epoch, has other seeds the second time.
    """
    engine_requests: list[Request] = []
    owners: list[int] = []
    counts: Counter[str] = Counter()
    for owner, (problem, indices, prefixes) in enumerate(requests):
        uid = problem.uid
        name = f"{uid}#{counts[uid]}" if counts[uid] else uid
        counts[uid] += 1
        if not indices:  # a group of given rows only
            continue
        prompt = ports.encoder.prompt(problem)
        seeds = [trajectory_seed(run_seed, step, name, i) for i in indices]
        for prefix, seed in zip(prefixes, seeds, strict=False):
            limit = sampling.max_new_tokens - len(prefix)
            request = Request([*prompt, *prefix], [seed], limit, problem.prompt_images)
            engine_requests.append(request)
            owners.append(owner)
        if len(seeds) > len(prefixes):
            left = seeds[len(prefixes) :]
            engine_requests.append(Request(prompt, left, images=problem.prompt_images))
            owners.append(owner)
    problems = [requests[owner][0] for owner in owners]
    engine, turns = ports.engine, ports.turns
    completions = run_turns(engine, engine_requests, problems, sampling, turns)
    per_request: list[list[Completion]] = [[] for _ in requests]
    for owner, some in zip(owners, completions, strict=True):
        per_request[owner] += some
    return per_request


def sampled_row(
    problem: Problem, prompt: list[int], prefix: list[int], completion: Completion
) -> Trajectory:
    """Return a sampled response as a row. Its prefix, if any, counts as a demonstration."""
    num_sampled = len(completion.tokens)
    written = [True] * num_sampled if completion.policy_mask is None else completion.policy_mask
    sampled_source = [POLICY if own else TOOL for own in written]
    loss_mask = None if all(written) else [*[True] * len(prefix), *written]
    kept_ids = completion.kept_ids
    if kept_ids is not None:
        kept_ids = [*[[]] * len(prefix), *kept_ids]
    tokens: dict[str, Sequence[float]] = {}
    if completion.versions is not None:
        tokens["version"] = completion.versions
    rows: dict[str, Any] = {}
    if completion.messages is not None:
        rows["messages"] = json.dumps(completion.messages)
    if completion.episode is not None:
        prompt = completion.episode.prompt
        tokens = {"turn": turn_column(completion)}
        rows |= episode_row(completion.episode)
    return Trajectory(
        problem.uid,
        prompt,
        [*prefix, *completion.tokens],
        source=POLICY,
        finish=completion.finish,
        behavior_logprobs=[*[0.0] * len(prefix), *completion.logprobs],
        loss_mask=loss_mask,
        token_source=[*[DEMONSTRATION] * len(prefix), *sampled_source],
        kept_ids=kept_ids,
        images=problem.prompt_images,
        tokens=tokens,
        rows=rows,
    )

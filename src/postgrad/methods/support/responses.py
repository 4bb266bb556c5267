"""Sampled responses: the rows that they become, their scores, and rows without a score."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from postgrad.errors import RunError
from postgrad.methods.ports import Ports
from postgrad.methods.step import Step
from postgrad.rollout.engine import Completion, Request, Sampling, trajectory_seed
from postgrad.rollout.episodes import episode_row, turn_column
from postgrad.rollout.turns import run_turns
from postgrad.types import DEMONSTRATION, POLICY, TOOL, Batch, Failure, Problem, Score, Trajectory

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
    if ports.turns is None:
        completions = ports.engine.generate(engine_requests, sampling)
    else:
        completions = run_turns(ports.engine, engine_requests, problems, sampling, ports.turns)
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
        images=problem.prompt_images if completion.images is None else completion.images,
        tokens=tokens,
        rows=rows,
    )


def policy_texts(ports: Ports, batch: Batch) -> Sequence[str | None]:
    """Return what the policy wrote in each row, without tool output; None if there is nothing.

    All rows of one agent have the text of its last reply.
    """
    if "answer" in batch.rows:
        return batch.rows["answer"]
    own = batch.tokens["token_source"] != TOOL
    if bool(own.all()):
        return batch.rows["text"]
    rows = zip(batch.response.split(), own.split(batch.response.lengths.tolist()), strict=True)
    return [ports.encoder.decode(ids[keep].tolist()) for ids, keep in rows]


def score_texts(
    ports: Ports,
    batch: Batch,
    problems: Sequence[Problem],
    texts: Sequence[str | None],
    no_output_score: float,
) -> list[Score | Failure]:
    """Return the verifier's result per row's text; `no_output_score` where the text is None."""
    indices = [i for i, text in enumerate(texts) if text is not None]

    def token_ids() -> list[list[int]]:
        rows = batch.response.split()
        return [rows[i].tolist() for i in indices]

    written = [text for text in texts if text is not None]
    results = ports.scorer.score([problems[i] for i in indices], written, token_ids)
    scores: list[Score | Failure] = [Score(no_output_score) for _ in texts]
    for i, result in zip(indices, results, strict=True):
        scores[i] = result
    return scores


def add_scores(batch: Batch, results: Sequence[Score | Failure]) -> None:
    """Set the row columns `reward`, `reward/PART` and `failure`; NaN where there is no number."""
    nan = float("nan")
    batch.rows["failure"] = [
        f"{one.kind}: {one.reason}" if isinstance(one, Failure) else "" for one in results
    ]
    batch.rows["reward"] = torch.tensor(
        [one.value if isinstance(one, Score) else nan for one in results]
    )
    scores = [one for one in results if isinstance(one, Score)]
    for name in sorted({name for score in scores for name in score.parts}):
        parts = [one.parts.get(name, nan) if isinstance(one, Score) else nan for one in results]
        batch.rows[f"reward/{name}"] = torch.tensor(parts)


def reward_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of the rows' rewards and their parts."""
    metrics: dict[str, float] = {}
    for name, column in batch.rows.items():
        if name == "reward":
            metrics["reward/mean"] = float(column.double().mean())
            metrics["reward/std"] = float(column.double().std(unbiased=False))
        elif name.startswith("reward/"):
            metrics[name] = float(column.double().nanmean())
    return metrics


class NoRowsLeft(Exception):
    """All rows of a refill failed; the rows of the step that have a score are enough to go on."""


def drop_failures(batch: Batch, step: Step, max_rate: float) -> Batch:
    """Return the rows without a `failure`. The others are recorded in the step and counted.

    Raises: RunError if all failed, or more than `max_rate` of them (reward.max_failure_rate). In a
        refill this counts all rows of the step, and NoRowsLeft is raised if all of its own failed.
    """
    failed = torch.tensor([bool(reason) for reason in batch.rows["failure"]])
    before = step.metrics.get("reward/failures", 0.0)
    step.metrics["reward/failures"] = before + float(failed.sum())
    if not bool(failed.any()):
        return batch
    rate = float(failed.sum()) / (len(batch) + step.num_scored)
    all_failed = bool(failed.all())
    if rate > max_rate or (all_failed and not step.num_scored):
        example = next(reason for reason in batch.rows["failure"] if reason)
        raise RunError(
            f"{rate:.0%} of the responses could not be scored "
            f"(reward.max_failure_rate={max_rate:g}); the first: {example}"
        )
    step.failed.append(batch.select(torch.nonzero(failed)[:, 0]))
    if all_failed:
        raise NoRowsLeft
    return batch.select(torch.nonzero(~failed)[:, 0])

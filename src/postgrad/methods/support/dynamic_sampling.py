"""DAPO's dynamic sampling: groups without a difference are replaced by other groups."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from postgrad.errors import RunError, did_you_mean
from postgrad.methods.method import Method
from postgrad.methods.step import Group, Step
from postgrad.methods.support.responses import NoRowsLeft
from postgrad.types import Batch, Problem


def refill(method: Method, batch: Batch, step: Step) -> tuple[Batch, Batch]:
    """Sample more problems until the step has enough groups that differ in method.refill_by.

    Tries at most method.max_refills times. Returns the rows of those groups, and all scored rows.
    If no group differs, no token of the step is trained; the driver's guard counts such steps.
    """
    metric = method.settings.refill_by
    num_groups = method.config.training.problems_per_step
    num_refills = 0
    kept = _informative_rows(batch, metric)
    while _count_groups(kept) < num_groups and num_refills < method.settings.max_refills:
        num_refills += 1
        before = dict(step.metrics)
        step.num_scored = len(batch)
        problems = step.data.draw(num_groups - _count_groups(kept))
        first_index = num_refills * method.config.rollout.samples
        try:
            fresh = _sample_more(method, problems, batch, step, first_index)
        except NoRowsLeft:
            step.metrics |= _means(method.counts, before, len(batch), before, 0)
            continue
        step.metrics |= _means(method.counts, before, len(batch), step.metrics, len(fresh))
        fresh.rows["group"] += (num_refills + 1) * num_groups
        batch = Batch.concat(_with_equal_parts([batch, fresh]))
        kept = _informative_rows(batch, metric)
    step.num_scored = 0
    step.metrics["refill/times"] = float(num_refills)
    step.metrics["refill/groups"] = float(_count_groups(kept))
    if not len(kept):  # stages need rows, the loss gets none
        kept = batch.select(torch.arange(len(batch)))
        kept.tokens["loss_mask"] = torch.zeros_like(kept.tokens["loss_mask"])
    step.num_left_out = len(batch) - len(kept)
    step.metrics["refill/kept_reward"] = float(kept.rows["reward"].double().mean())
    return kept, batch


def _sample_more(
    method: Method, problems: Sequence[Problem], batch: Batch, step: Step, first_index: int
) -> Batch:
    """Return the rows of other problems, by all stages between draw and refill."""
    learning = method.learning_stages()
    names = [getattr(stage, "__name__", "") for stage in learning]
    before_refill = learning[: names.index("refill")]
    work: Any = problems
    for stage in [*method.sampling_stages()[1:], *before_refill]:
        work = stage(work, step)
        if stage == method.compose:
            _set_indices(work, batch, step, first_index)
    return work


def _set_indices(groups: Sequence[Group], batch: Batch, step: Step, first: int) -> None:
    """Give problems that the step has sampled before other indices, hence other responses."""
    sampled = {uid for rows in (batch, *step.failed) for uid in rows.rows["uid"]}
    for group in groups:
        if group.problem.uid in sampled:
            group.first_index = first


def _means(
    counts: Sequence[str],
    before: dict[str, float],
    num_before: int,
    fresh: dict[str, float],
    num_fresh: int,
) -> dict[str, float]:
    """Return the metrics that sampling and scoring set, as means over the rows of all refills."""
    share = num_fresh / (num_before + num_fresh)
    return {
        name: value + share * (fresh[name] - value)
        for name, value in before.items()
        if name not in counts
    }


def _count_groups(batch: Batch) -> int:
    return len(batch.rows["group"].unique())


def _metric(batch: Batch, name: str) -> Tensor:
    """(rows,) what the rows of a group are compared by. Raises RunError for an unknown part."""
    if name == "reward":
        return batch.rows["reward"]
    if name == "score":
        penalty = batch.rows.get("reward/overlong")
        return batch.rows["reward"] if penalty is None else batch.rows["reward"] - penalty
    if f"reward/{name}" not in batch.rows:
        parts = [key.removeprefix("reward/") for key in batch.rows if key.startswith("reward/")]
        raise RunError(
            f"method.refill_by={name}: the verifier reports no such part; "
            f"{did_you_mean(name, ['score', 'reward', *parts])}"
        )
    return batch.rows[f"reward/{name}"].nan_to_num()


def _informative_rows(batch: Batch, metric: str) -> Batch:
    """Return the rows of groups that differ in the metric."""
    _, group = batch.rows["group"].unique(return_inverse=True)
    rewards = _metric(batch, metric)
    num_groups = int(group.max()) + 1
    lowest = torch.full((num_groups,), torch.inf).scatter_reduce(0, group, rewards, "amin")
    highest = torch.full((num_groups,), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    differs = (highest > lowest)[group]
    return batch.select(torch.nonzero(differs)[:, 0])


def _with_equal_parts(batches: list[Batch]) -> list[Batch]:
    """Add reward parts that only some of the batches have to the others, as NaN.

    Rewards that a method set as a list become tensors, as the driver makes them after a stage.
    """
    names = {name for batch in batches for name in batch.rows if name.startswith("reward/")}
    for batch in batches:
        for name in {"reward", *names} & set(batch.rows):
            if not isinstance(batch.rows[name], Tensor):
                batch.rows[name] = torch.as_tensor(batch.rows[name], dtype=torch.float32)
        for name in names - set(batch.rows):
            batch.rows[name] = torch.full((len(batch),), torch.nan)
    return batches

"""DAPO's dynamic sampling: groups whose rewards are all equal are replaced by other groups."""

import torch

from postgrad.methods.base import Method, Step
from postgrad.types import Batch


def refill(method: Method, batch: Batch, step: Step) -> Batch:
    """Samples more problems until the step has enough groups with different rewards.

    Tries at most method.max_refills times. If no group has different rewards, all rows are
    returned; the driver's guard counts such steps.
    """
    num_groups = method.config.training.problems_per_step
    num_refills = 0
    kept = _informative_rows(batch)
    while _count_groups(kept) < num_groups and num_refills < method.settings.max_refills:
        num_refills += 1
        problems = step.data.draw(num_groups - _count_groups(kept))
        fresh = method.sample(method.compose(problems, step), step)
        fresh = method.score(method.enrich(fresh, step), step)
        fresh.rows["group"] += (num_refills + 1) * num_groups
        batch = Batch.concat(_with_equal_parts([batch, fresh]))
        kept = _informative_rows(batch)
    step.metrics["refill/times"] = float(num_refills)
    step.metrics["refill/groups"] = float(_count_groups(kept))
    return kept if len(kept) else batch


def _count_groups(batch: Batch) -> int:
    return len(batch.rows["group"].unique())


def _informative_rows(batch: Batch) -> Batch:
    """The rows of groups whose rewards differ."""
    _, group = batch.rows["group"].unique(return_inverse=True)
    rewards = batch.rows["reward"]
    num_groups = int(group.max()) + 1
    lowest = torch.full((num_groups,), torch.inf).scatter_reduce(0, group, rewards, "amin")
    highest = torch.full((num_groups,), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    differs = (highest > lowest)[group]
    return batch.select(torch.nonzero(differs)[:, 0])


def _with_equal_parts(batches: list[Batch]) -> list[Batch]:
    """Adds the reward parts that only some of the batches have, as NaN, to the others."""
    names = {name for batch in batches for name in batch.rows if name.startswith("reward/")}
    for batch in batches:
        for name in names - set(batch.rows):
            batch.rows[name] = torch.full((len(batch),), torch.nan)
    return batches

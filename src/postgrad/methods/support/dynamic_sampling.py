"""DAPO's dynamic sampling: groups whose rewards are all equal teach nothing, so others are sampled in their place."""

import torch

from postgrad.methods.base import Method, Step
from postgrad.types import Batch


def refill(method: Method, batch: Batch, step: Step) -> Batch:
    """Sample more problems until the batch is full of groups that teach something, at most method.max_refills times.

    Where none does, the rows are returned as they are: there is nothing to learn, and the guard counts such steps.
    """
    wanted, tries, kept = method.config.training.problems_per_step, 0, _informative(batch)
    while (found := _num_groups(kept)) < wanted and tries < method.settings.max_refills:
        tries += 1
        fresh = method.sample(method.compose(step.data.draw(wanted - found), step), step)
        fresh = method.score(method.enrich(fresh, step), step)
        fresh.rows["group"] += (tries + 1) * wanted
        batch = Batch.concat(_with_equal_parts([batch, fresh]))
        kept = _informative(batch)
    step.metrics |= {"refill/times": float(tries), "refill/groups": float(_num_groups(kept))}
    return kept if len(kept) else batch


def _num_groups(batch: Batch) -> int:
    return len(batch.rows["group"].unique())


def _informative(batch: Batch) -> Batch:
    """Rows of groups whose rewards differ."""
    _, group = batch.rows["group"].unique(return_inverse=True)
    rewards, count = batch.rows["reward"], int(group.max()) + 1
    low = torch.full((count,), torch.inf).scatter_reduce(0, group, rewards, "amin")
    high = torch.full((count,), -torch.inf).scatter_reduce(0, group, rewards, "amax")
    return batch.select(torch.nonzero((high > low)[group])[:, 0])


def _with_equal_parts(batches: list[Batch]) -> list[Batch]:
    """A part of the reward that the verifier named in only some of the batches is not a number in the others."""
    names = {name for batch in batches for name in batch.rows if name.startswith("reward/")}
    for batch in batches:
        for name in names - set(batch.rows):
            batch.rows[name] = torch.full((len(batch),), torch.nan)
    return batches

"""Online DPO: pairs are sampled from the policy and judged by the verifier, then trained on by DPO.

Per problem, the response with the highest reward is the chosen one and the response with the
lowest reward the rejected one. Groups whose rewards are all equal give no pair. The verifier may
be a rule, a reward model (`model:PATH`) or a judge.
"""

from collections.abc import Sequence

import torch

from postgrad.errors import WrongValue
from postgrad.methods.dpo import Dpo, DpoObjective
from postgrad.methods.method import Method, Traits
from postgrad.methods.step import Group, Stage, Step
from postgrad.types import Batch, Problem


class OnlineDpoObjective(DpoObjective):
    def prepare(self, batch: Batch) -> Batch:
        """Keep the rows of pairs, with index 0 for chosen and 1 for rejected."""
        pairs = batch.select(torch.nonzero(batch.rows["preference"] != 0)[:, 0])
        pairs.rows["index"] = (pairs.rows["preference"] < 0).long()
        return super().prepare(pairs)


class OnlineDpo(Dpo):
    Objective = OnlineDpoObjective
    traits = Traits(rows_per_loss=2, given_per_problem=2)

    def check(self) -> None:
        super().check()
        samples = self.config.rollout.samples
        if samples < 2:
            raise WrongValue(
                f"rollout.samples={samples}: online_dpo compares the responses of a group; "
                "use rollout.samples=2 or more"
            )

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Accept every problem that has a verifier."""

    check_validation_problems = check_problems

    def needs_verifier(self) -> bool:
        return True

    # ---- stages, on the driver

    def learning_stages(self) -> list[Stage]:
        *before, update, publish = Method.learning_stages(self)
        return [*before, self.compute_reference_logprobs, update, publish]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        return Method.compose(self, problems, step)

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Set `preference` per row: 1 chosen, -1 rejected, 0 neither; `advantages` repeat it."""
        preference = torch.zeros(len(batch))
        rewards = batch.rows["reward"]
        groups = batch.rows["group"]
        for group in groups.unique():
            rows = torch.nonzero(groups == group)[:, 0]
            best = rows[rewards[rows].argmax()]
            worst = rows[rewards[rows].argmin()]
            if rewards[best] > rewards[worst]:
                preference[best] = 1.0
                preference[worst] = -1.0
        batch.rows["preference"] = preference
        batch.tokens["advantages"] = preference[batch.row_index]
        num_groups = len(groups.unique())
        step.metrics["dpo/groups_with_pair"] = float((preference > 0).sum()) / num_groups
        return batch

    validate = Method.validate

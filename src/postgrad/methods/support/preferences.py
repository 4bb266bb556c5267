"""What methods share that learn from given responses: labeled ones, or pairs of two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from postgrad.algorithms.preference import row_logprobs
from postgrad.data.render import Prompts
from postgrad.methods.base import Method
from postgrad.methods.step import Step
from postgrad.methods.support.given_rows import (
    check_equal_weights,
    check_pairs,
    has_equal_sides,
)
from postgrad.types import Batch, Problem


class GivenResponses(Method):
    """Learns from responses of the data, each of which counts equally. Asks no verifier."""

    trains_on_samples = False
    trains_on_demonstrations = True

    def check(self) -> None:
        super().check()
        check_equal_weights(self)

    def needs_verifier(self) -> bool:
        return False

    def compute_reference_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Adds the reference's log-probs, if the method has a reference."""
        if "reference" in self.roles():
            batch.tokens["reference_logprobs"] = self.ports.reference.logprobs(batch)["logprobs"]
        return batch


class GivenPairs(GivenResponses):
    """Learns from pairs of a chosen and a rejected response, which one loss reads jointly.

    The two rows of a pair have the same `group`; `index` is 0 for chosen and 1 for rejected.
    """

    rows_per_loss = 2
    given_per_problem = 2

    def check_problems(self, problems: Sequence[Problem]) -> None:
        check_pairs(self, problems, "data.train")

    def check_validation_problems(self, problems: Sequence[Problem]) -> None:
        check_pairs(self, problems, "data.validation")

    def data_notes(self, prompts: Prompts, problems: Sequence[Problem]) -> list[str]:
        num_equal = sum(has_equal_sides(problem) for problem in problems)
        if not num_equal:
            return []
        return [
            f"warning: {num_equal} of {len(problems)} pairs of data.train have the same chosen and "
            "rejected response; nothing can be learned from them"
        ]

    def prepare(self, batch: Batch) -> Batch:
        """Sets the weight of a pair: 1 / number of pairs of the optimizer step."""
        batch.rows["pair_weight"] = torch.full((len(batch),), 2.0 / max(1, len(batch)))
        return batch

    def row_groups(self, batch: Batch) -> Sequence[int]:
        return batch.rows["group"].tolist()


def split_pairs(batch: Batch, values: Tensor) -> tuple[Tensor, Tensor]:
    """(pairs,) the values of chosen rows and of rejected rows. `values` has one per row."""
    order = torch.argsort(batch.rows["group"] * 2 + batch.rows["index"])
    ordered = values[order]
    return ordered[0::2], ordered[1::2]


def response_logprobs(batch: Batch, logprobs: Tensor, average: bool = False) -> Tensor:
    """(rows,) the sum, or the mean, of the log-probs of each response."""
    mask = batch.tokens["loss_mask"]
    return row_logprobs(logprobs, mask, batch.row_index, len(batch), average=average)

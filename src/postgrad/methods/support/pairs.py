"""What methods share that learn from responses of the data: labeled ones, or pairs of two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from postgrad.algorithms.preference import row_logprobs
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import Missing, NoEffect, RunError
from postgrad.methods.method import Method, MethodSettings, Traits
from postgrad.methods.objective import Objective
from postgrad.methods.step import Step
from postgrad.problem import problem_label
from postgrad.types import DEMONSTRATION, Batch, Problem, Trajectory

PAIR = ("chosen", "rejected")


def is_pair(problem: Problem) -> bool:
    return all(name in problem.extra for name in PAIR)


def check_pairs(method: Method, problems: Sequence[Problem], key: str) -> None:
    """Refuses problems without a chosen and a rejected response. Raises ConfigError."""
    for problem in problems:
        if not is_pair(problem):
            raise Missing(
                f"{problem_label(problem)} has no chosen and rejected response; "
                f"{method.settings.name} needs both in every row of {key} "
                "(`postgrad data prepare own kind=pairs` keeps only the rows that have them)",
                at="chosen",
            )


def has_equal_sides(problem: Problem) -> bool:
    """Whether a problem is a pair whose chosen response is the rejected one."""
    return is_pair(problem) and len({str(problem.extra[name]) for name in PAIR}) == 1


def check_equal_weights(method: Method) -> None:
    """Refuses method.aggregation, which losses over whole responses do not read."""
    aggregation = method.settings.aggregation
    if aggregation != MethodSettings.aggregation:
        raise NoEffect(
            f"method.aggregation={aggregation} has no effect: {method.settings.name} weighs all "
            "rows equally; remove it"
        )


def pair_rows(method: Method, problem: Problem) -> list[Trajectory]:
    """Return the chosen row, then the rejected one."""
    return [
        given_row(method, problem, str(problem.extra[name]), name, index)
        for index, name in enumerate(PAIR)
    ]


def given_row(method: Method, problem: Problem, text: str, name: str, index: int) -> Trajectory:
    """Return a response of the data as a row. Raises RunError if it is too long."""
    tokens = method.ports.encoder.reply(problem, text)
    limit = method.config.rollout.max_response_tokens
    if len(tokens) > limit:
        raise RunError(
            f"the {name} response of {problem_label(problem)} has {len(tokens)} tokens; "
            f"raise rollout.max_response_tokens (now {limit})"
        )
    prompt = method.ports.encoder.prompt(problem)
    row = Trajectory(problem.uid, prompt, tokens, source=DEMONSTRATION, finish="given")
    row.index = index
    row.images = problem.prompt_images
    return row


class GivenResponses(Method):
    """Learns from responses of the data, each of which counts equally. Asks no verifier."""

    traits = Traits(samples=False, demonstrations=True)

    def check(self) -> None:
        super().check()
        check_equal_weights(self)

    def needs_verifier(self) -> bool:
        return False

    def compute_reference_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Add the reference's log-probs, if the method has a reference."""
        if "reference" in self.roles():
            batch.tokens["reference_logprobs"] = self.ports.reference.logprobs(batch)["logprobs"]
        return batch


class GivenPairsObjective(Objective):
    def prepare(self, batch: Batch) -> Batch:
        """Set the weight of a pair: 1 / number of pairs of the optimizer step."""
        batch.rows["pair_weight"] = torch.full((len(batch),), 2.0 / max(1, len(batch)))
        return batch

    def row_groups(self, batch: Batch) -> Sequence[int]:
        return batch.rows["group"].tolist()


class GivenPairs(GivenResponses):
    """Learns from pairs of a chosen and a rejected response, which one loss reads jointly.

    The two rows of a pair have the same `group`; `index` is 0 for chosen and 1 for rejected.
    """

    Objective = GivenPairsObjective
    traits = Traits(False, True, rows_per_loss=2, given_per_problem=2)

    def check_problems(self, problems: Sequence[Problem]) -> None:
        check_pairs(self, problems, "data.train")

    def check_validation_problems(self, problems: Sequence[Problem]) -> None:
        check_pairs(self, problems, "data.validation")

    def data_notes(self, encoder: Encoder, problems: Sequence[Problem]) -> list[str]:
        num_equal = sum(has_equal_sides(problem) for problem in problems)
        if not num_equal:
            return []
        return [
            f"warning: {num_equal} of {len(problems)} pairs of data.train have the same chosen and "
            "rejected response; nothing can be learned from them"
        ]


def split_pairs(batch: Batch, values: Tensor) -> tuple[Tensor, Tensor]:
    """(pairs,) the values of chosen rows and of rejected rows. `values` has one per row."""
    order = torch.argsort(batch.rows["group"] * 2 + batch.rows["index"])
    ordered = values[order]
    return ordered[0::2], ordered[1::2]


def response_logprobs(batch: Batch, logprobs: Tensor, average: bool = False) -> Tensor:
    """(rows,) the sum, or the mean, of the log-probs of each response."""
    mask = batch.tokens["loss_mask"]
    return row_logprobs(logprobs, mask, batch.row_index, len(batch), average=average)

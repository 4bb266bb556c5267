"""KTO: learn from single responses that are labeled desirable or undesirable; no pairs needed.

A row of the data has a response and a `label` (true or false). A pair of a chosen and a rejected
response becomes two rows. The loss compares the policy's log-ratio to the reference with an
estimate of their KL divergence. That estimate uses mismatched rows: each prompt of the step with
the response of the next one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.algorithms.preference import kto, mismatched_kl
from postgrad.config.schema import setting
from postgrad.data.encode.encoder import Encoder
from postgrad.data.rows.labels import label_of, label_value
from postgrad.errors import Conflict, Missing, WrongValue
from postgrad.methods.method import MethodSettings, Traits
from postgrad.methods.objective import Objective
from postgrad.methods.ports import Role
from postgrad.methods.step import Group, Stage, Step
from postgrad.methods.support.pairs import (
    GivenResponses,
    given_row,
    is_pair,
    pair_rows,
    response_logprobs,
)
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.problem import problem_label
from postgrad.types import Batch, Problem


@dataclass
class KtoSettings(MethodSettings):
    beta: float = setting(
        0.1, "strength of the KL constraint to the reference", above=0.0, at_most=1e4
    )
    desirable_weight: float = setting(1.0, "weight of desirable responses", at_least=0.0)
    undesirable_weight: float = setting(
        1.0,
        "weight of undesirable responses; balance so that weight times count is similar for both",
        at_least=0.0,
    )


class KtoObjective(Objective):
    def prepare(self, batch: Batch) -> Batch:
        """Set the weight of a row: 1 / number of rows of the optimizer step."""
        batch.rows["row_weight"] = torch.full((len(batch),), 1.0 / max(1, len(batch)))
        return batch

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        settings = self.settings
        result = kto(
            response_logprobs(batch, current.logprobs),
            response_logprobs(batch, batch.tokens["reference_logprobs"]),
            batch.rows["desirable"] > 0,
            batch.rows["kl"],
            beta=settings.beta,
            desirable_weight=settings.desirable_weight,
            undesirable_weight=settings.undesirable_weight,
        )
        metrics.mean("kto/accuracy", result.metrics["accuracy"])
        metrics.mean("entropy", current.entropy, batch.tokens["loss_mask"])
        return (result.values * batch.rows["row_weight"]).sum()


class Kto(GivenResponses):
    Settings = KtoSettings
    Objective = KtoObjective
    traits = Traits(False, True, given_per_problem=2, mixes_rows=True)  # two rows of a pair

    # ---- checks

    def check(self) -> None:
        super().check()
        num_problems = self.config.training.problems_per_step
        if num_problems < 2:
            raise WrongValue(
                f"training.problems_per_step={num_problems}: kto estimates the KL from prompts "
                "with the response of another problem; use at least 2"
            )

    def check_problems(self, problems: Sequence[Problem]) -> None:
        self.check_validation_problems(problems)
        label = _only_label(problems)
        weights = {True: self.settings.desirable_weight, False: self.settings.undesirable_weight}
        if label is not None and weights[label] == 0:
            name = "desirable" if label else "undesirable"
            raise Conflict(
                f"method.{name}_weight=0, but all responses of data.train are {name}, so the loss "
                "is always 0; raise the weight, or add responses with the other label"
            )

    def check_validation_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            label = label_value(problem)
            if is_pair(problem) or (problem.demonstrations and label_of(problem) is not None):
                continue
            if problem.demonstrations and label is not None:
                raise WrongValue(
                    f"{problem_label(problem)}: its label is {label!r}; kto needs true or false",
                    at="label",
                )
            raise Missing(
                f"{problem_label(problem)} has neither a response with a label (true or false) "
                "nor a chosen and a rejected response; kto needs the columns prompt, "
                "completion, label, or prompt, chosen, rejected",
                at="label",
            )

    def data_notes(self, encoder: Encoder, problems: Sequence[Problem]) -> list[str]:
        notes = super().data_notes(encoder, problems)
        label = _only_label(problems)
        return notes if label is None else [*notes, _one_label_note(label, len(problems))]

    def roles(self) -> dict[str, Role]:
        return {"reference": Role("frozen")}

    # ---- stages, on the driver

    def learning_stages(self) -> list[Stage]:
        return [self.compute_reference_logprobs, self.compute_kl, self.update, self.publish]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        groups: list[Group] = []
        for problem in problems:
            if is_pair(problem):
                rows = pair_rows(self, problem)
                labels = [True, False]
            else:
                rows = [given_row(self, problem, problem.demonstrations[0], "labeled", 0)]
                labels = [label_of(problem)]
            for row, label in zip(rows, labels, strict=True):
                row.rows["desirable"] = float(bool(label))
            groups.append(Group(problem, 0, rows))
        return groups

    def compute_kl(self, batch: Batch, step: Step) -> Batch:
        """Set the row column `kl`: one estimate for all rows, before the step's updates."""
        mismatched = mismatch(batch)
        policy = self.ports.policy.logprobs(mismatched)["logprobs"]
        reference = self.ports.reference.logprobs(mismatched)["logprobs"]
        kl = mismatched_kl(
            response_logprobs(mismatched, policy), response_logprobs(mismatched, reference)
        )
        batch.rows["kl"] = torch.full((len(batch),), kl)
        step.metrics["kto/kl"] = kl
        return batch

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Return the share of rows on the right side of the KL: desirable above, others below."""
        batch = self.sample(self.compose(problems, Step(0)), Step(0))
        batch = self.compute_kl(self.compute_reference_logprobs(batch, Step(0)), Step(0))
        outputs = TokenOutputs(**self.ports.policy.logprobs(batch))
        metrics = MetricAccumulator()
        self.objective.loss(self.objective.prepare(batch), outputs, metrics)
        return {"validation/accuracy": metrics.result()["kto/accuracy"]}


def mismatch(batch: Batch) -> Batch:
    """Each row's prompt with the response of the next group's row, in a circle."""
    groups = batch.rows["group"].tolist()
    first_rows = {group: groups.index(group) for group in dict.fromkeys(groups)}
    order = list(first_rows)
    successors = dict(zip(order, [*order[1:], order[0]], strict=True))
    others = batch.select([first_rows[successors[group]] for group in groups])
    return Batch(batch.prompt, others.response, dict(others.tokens), dict(batch.rows))


def _only_label(problems: Sequence[Problem]) -> bool | None:
    """Return the label of all responses; None if there are both labels, as in a pair."""
    labels = {None if is_pair(problem) else label_of(problem) for problem in problems}
    return labels.pop() if len(labels) == 1 else None


def _one_label_note(label: bool, count: int) -> str:
    """Return a warning that all responses have one label: the loss pulls in one direction."""
    if label:
        return (
            f"warning: all {count} responses of data.train are desirable, so KTO only raises their "
            "probability, as SFT does; add responses with the label false"
        )
    return (
        f"warning: all {count} responses of data.train are undesirable, so KTO only lowers their "
        "probability, and nothing says what to write instead; the model may end in nonsense; add "
        "responses with the label true"
    )

"""Supervised fine-tuning: rows are conversations, the loss is the assistant's negative log-prob.

Only the tokens of assistant turns count, and the mean is over all of them. Of a plain text (TRL's
column `text`) all tokens count. `method.loss=dft` weighs
each token by the policy's own probability of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from postgrad.algorithms.supervised import SFT_LOSSES, sft_loss
from postgrad.config.schema import setting
from postgrad.data.encode.encoder import EncodedRow, Encoder
from postgrad.data.rows.labels import is_undesirable
from postgrad.data.rows.messages import conversation_of
from postgrad.errors import Conflict, Missing, RunError, WrongValue
from postgrad.methods.method import Method, MethodSettings, Traits
from postgrad.methods.objective import Objective
from postgrad.methods.step import Group, Stage, Step
from postgrad.model.load.eos import describe_end
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.problem import problem_label
from postgrad.types import DEMONSTRATION, Batch, Problem, Trajectory


@dataclass
class SftSettings(MethodSettings):
    loss: str = setting(
        "nll", "loss of a token: nll, or dft (weighted by its probability)", choices=SFT_LOSSES
    )
    train_on: str = setting(
        "all",
        "assistant turns of a conversation that the loss reads: all or the last",
        ("all", "last"),
    )
    validate_accuracy: bool = setting(
        False,
        "also generate responses to the validation problems and score them",
        only_with="data.validation",
    )


class SftObjective(Objective):
    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        metrics.mean("sft/loss", -current.logprobs, batch.tokens["loss_mask"])
        metrics.mean("entropy", current.entropy, batch.tokens["loss_mask"])
        if self.settings.loss == "dft":  # what its gradient raises
            mask = batch.tokens["loss_mask"]
            metrics.mean("sft/probability", current.logprobs.exp(), mask)
        values = sft_loss(current.logprobs, self.settings.loss)
        return (values * batch.tokens["loss_weight"]).sum()


class Sft(Method):
    Settings = SftSettings
    Objective = SftObjective
    traits = Traits(samples=False, demonstrations=True)

    def encode_row(self, encoder: Encoder, problem: Problem) -> EncodedRow:
        if conversation_of(problem) is None:
            return encoder.prompt_row(problem)
        return encoder.conversation(problem, self.settings.train_on)

    def data_notes(self, encoder: Encoder, problems: Sequence[Problem]) -> list[str]:
        rows = [self.encode_row(encoder, problem) for problem in problems]
        notes: list[str] = []
        num_texts = sum(bool(one.conversation and one.conversation.text) for one in problems)
        if num_texts:
            notes.append(
                f"{num_texts} of {len(problems)} rows of data.train are plain texts: SFT trains on "
                "every token of them, without a chat template"
            )
        notes += filter(None, [describe_end(self.config, encoder, rows[0].response[-1])])
        num_undesirable = sum(is_undesirable(problem) for problem in problems)
        if num_undesirable:
            notes.append(
                f"warning: {num_undesirable} of {len(problems)} responses of data.train have the "
                "label false, and SFT trains on them, too; kto learns from labels"
            )
        count = sum(row.is_rewritten for row in rows)
        if not count:
            return notes
        return [
            *notes,
            f"the chat template renders assistant turns of {count} of {len(problems)} "
            "conversations in data.train differently than for generation (for example without "
            "their thinking); SFT trains on the conversation as the template renders it, "
            "method.train_on=last trains on the last turn only",
        ]

    def needs_verifier(self) -> bool:
        return self.settings.validate_accuracy and bool(self.config.data.validation)

    def scores_training_rows(self) -> bool:
        return False

    def check(self) -> None:
        super().check()
        stop_at = self.config.training.stop_at
        if stop_at is not None and not self.settings.validate_accuracy:
            raise Conflict(
                f"training.stop_at={stop_at:g} needs validation accuracy; "
                "add method.validate_accuracy=true"
            )

    def check_problems(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if problem.conversation is not None and conversation_of(problem) is None:
                raise WrongValue(
                    f"{problem_label(problem)}: all its assistant messages have the weight 0, so "
                    "there is nothing to train on; remove the row",
                    at="messages",
                )
            if conversation_of(problem) is None:
                raise Missing(
                    f"{problem_label(problem)} has no demonstration; "
                    "sft needs a response for every row of data.train (FILE:COLUMN=response "
                    "names its column, FILE:COLUMN.KEY=response one inside another)",
                    at="response",
                )

    def learning_stages(self) -> list[Stage]:
        return [self.update, self.publish]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        return [Group(problem, 0, [self.conversation_row(problem)]) for problem in problems]

    def conversation_row(self, problem: Problem) -> Trajectory:
        """Return the conversation as a row whose loss mask selects the trained turns.

        Raises:
            RunError: it is longer than rollout.max_response_tokens.
        """
        row = cast(Encoder, self.ports.encoder).conversation(problem, self.settings.train_on)
        limit = self.config.rollout.max_response_tokens
        if len(row.response) > limit:
            raise RunError(
                f"the response of {problem_label(problem)} has {len(row.response)} tokens; "
                f"raise rollout.max_response_tokens (now {limit})"
            )
        return Trajectory(
            problem.uid,
            row.prompt,
            row.response,
            source=DEMONSTRATION,
            finish="given",
            loss_mask=row.loss_mask,
            images=row.images,
        )

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Return the loss on held-out rows, and the accuracy if method.validate_accuracy."""
        metrics: dict[str, float] = {}
        with_response = [problem for problem in problems if conversation_of(problem)]
        rows = [self.conversation_row(problem) for problem in with_response]
        if rows:
            batch = Batch.of(rows)
            logprobs = self.ports.policy.logprobs(batch)["logprobs"].double()
            metrics["validation/loss"] = -float(logprobs[batch.tokens["loss_mask"]].mean())
        if self.settings.validate_accuracy:
            metrics |= super().validate(problems)
        return metrics

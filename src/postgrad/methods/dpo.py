"""DPO: learn from pairs of a chosen and a rejected response. Both are given rows of one group; a pair is never cut apart."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.algorithms.preference import PREFERENCE_LOSSES, dpo, row_logprobs
from postgrad.config.schema import setting
from postgrad.errors import ConfigError, RunError
from postgrad.methods.base import Group, Method, MethodSettings, Role, Stage, Step
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.policy import MetricAccumulator
from postgrad.types import DEMONSTRATION, Batch, Problem, Trajectory


@dataclass
class DpoSettings(MethodSettings):
    loss: str = setting(
        "sigmoid",
        "sigmoid is DPO; ipo works on mean log-probs; hinge is SLiC's",
        choices=PREFERENCE_LOSSES,
    )
    beta: float = setting(0.1, "strength of the tie to the reference", above=0.0)
    label_smoothing: float = setting(
        0.0, "share of pairs taken to be labeled wrongly (sigmoid only)", at_least=0.0, at_most=0.5
    )
    reference_free: bool = setting(
        False, "compare with a uniform reference instead of the starting model"
    )


class Dpo(Method):
    Settings = DpoSettings
    trains_on_samples = False
    learns_demonstrations = True

    def check(self) -> None:
        super().check()
        if self.settings.label_smoothing and self.settings.loss != "sigmoid":
            raise ConfigError(
                f"method.label_smoothing={self.settings.label_smoothing} is for method.loss=sigmoid only"
            )
        if self.settings.aggregation != MethodSettings.aggregation:
            raise ConfigError(
                f"method.aggregation={self.settings.aggregation} has no effect: dpo weighs all pairs alike; remove it"
            )
        if self.settings.label_smoothing >= 0.5:
            raise ConfigError(
                f"method.label_smoothing={self.settings.label_smoothing} must be below 0.5"
            )

    def check_problems(self, problems: Sequence[Problem], key: str = "data.train") -> None:
        for problem in problems:
            if not {"chosen", "rejected"} <= problem.extra.keys():
                raise ConfigError(
                    f"problem {problem.uid} has no chosen and rejected response; dpo needs both in every row of {key}"
                )

    def check_held_out(self, problems: Sequence[Problem]) -> None:
        self.check_problems(problems, "data.validation")

    def judges(self) -> bool:
        return False

    def roles(self) -> dict[str, Role]:
        return {} if self.settings.reference_free else {"reference": Role("frozen")}

    def stages(self) -> list[Stage]:
        return [
            self.draw,
            self.compose,
            self.sample,
            self.compute_reference_logprobs,
            self.update,
            self.publish,
        ]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        return [Group(problem, num_samples=0, given=self.pair(problem)) for problem in problems]

    def pair(self, problem: Problem) -> list[Trajectory]:
        """The chosen row, then the rejected one."""
        prompt, limit = self.ports.prompts.encode(problem), self.config.rollout.max_response_tokens
        rows = []
        for index, name in enumerate(("chosen", "rejected")):
            tokens = self.ports.prompts.encode_response(str(problem.extra[name]))
            if len(tokens) > limit:
                raise RunError(
                    f"problem {problem.uid}: its {name} response has {len(tokens)} tokens; raise rollout.max_response_tokens"
                )
            rows.append(
                Trajectory(
                    problem.uid, prompt, tokens, index=index, source=DEMONSTRATION, finish="given"
                )
            )
        return rows

    def compute_reference_logprobs(self, batch: Batch, step: Step) -> Batch:
        if not self.settings.reference_free:
            batch.tokens["reference_logprobs"] = self.ports.reference.logprobs(batch)["logprobs"]
        return batch

    def prepare(self, batch: Batch) -> Batch:
        batch.rows["pair_weight"] = torch.full((len(batch),), 2.0 / max(1, len(batch)))
        return batch

    def row_groups(self, batch: Batch) -> Sequence[int]:
        return batch.rows["group"].tolist()

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        pairs = self.pairs(batch, current.logprobs)
        settings = self.settings
        out = dpo(
            *pairs, beta=settings.beta, loss=settings.loss, label_smoothing=settings.label_smoothing
        )
        for name, column in out.metrics.items():
            metrics.mean(f"dpo/{name}", column)
        return (out.values * batch.rows["pair_weight"][: len(out.values)]).sum()

    def pairs(self, batch: Batch, logprobs: Tensor) -> list[Tensor]:
        """(pairs,) log-probs of the chosen and the rejected responses, then the reference's."""
        order = torch.argsort(batch.rows["group"] * 2 + batch.rows["index"])
        columns = [logprobs] + (
            [batch.tokens["reference_logprobs"]] if "reference_logprobs" in batch.tokens else []
        )
        out = []
        for column in columns:
            place = (batch.tokens["loss_mask"], batch.row_index, len(batch))
            rows = row_logprobs(column, *place, average=self.settings.loss == "ipo")[order]
            out += [rows[0::2], rows[1::2]]
        return out

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """Accuracy: how often the policy prefers the chosen response more than the reference does; and the margin."""
        groups = [Group(problem, 0, self.pair(problem)) for problem in problems]
        batch = self.compute_reference_logprobs(self.sample(groups, Step(0)), Step(0))
        out = dpo(
            *self.pairs(batch, self.ports.policy.logprobs(batch)["logprobs"]),
            beta=self.settings.beta,
        )
        return {
            f"validation/{name}": float(out.metrics[name].mean()) for name in ("accuracy", "margin")
        }

"""DPO: learn from pairs of a chosen and a rejected response.

Both responses of a pair are given rows of one group, and one loss reads them jointly.
"""

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
        "sigmoid is DPO; ipo uses mean log-probs; hinge is SLiC's",
        choices=PREFERENCE_LOSSES,
    )
    beta: float = setting(0.1, "strength of the KL constraint to the reference", above=0.0)
    label_smoothing: float = setting(
        0.0, "assumed share of pairs with a wrong label (sigmoid only)", at_least=0.0, at_most=0.5
    )
    reference_free: bool = setting(False, "use a uniform reference instead of the starting model")


class Dpo(Method):
    Settings = DpoSettings
    trains_on_samples = False
    trains_on_demonstrations = True

    def check(self) -> None:
        super().check()
        settings = self.settings
        key = f"method.label_smoothing={settings.label_smoothing}"
        if settings.label_smoothing and settings.loss != "sigmoid":
            raise ConfigError(f"{key} works with method.loss=sigmoid only; remove it")
        if settings.label_smoothing >= 0.5:
            raise ConfigError(f"{key} is out of range; it must be below 0.5")
        if settings.aggregation != MethodSettings.aggregation:
            raise ConfigError(
                f"method.aggregation={settings.aggregation} has no effect: dpo weighs all pairs "
                "equally; remove it"
            )

    def check_problems(self, problems: Sequence[Problem], key: str = "data.train") -> None:
        for problem in problems:
            if not {"chosen", "rejected"} <= problem.extra.keys():
                raise ConfigError(
                    f"problem {problem.uid} has no chosen and rejected response; "
                    f"dpo needs both in every row of {key}"
                )

    def check_validation_problems(self, problems: Sequence[Problem]) -> None:
        self.check_problems(problems, "data.validation")

    def needs_verifier(self) -> bool:
        return False

    def roles(self) -> dict[str, Role]:
        return {} if self.settings.reference_free else {"reference": Role("frozen")}

    # ---- stages, on the driver

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
        return [Group(problem, 0, self.pair_rows(problem)) for problem in problems]

    def pair_rows(self, problem: Problem) -> list[Trajectory]:
        """The chosen row, then the rejected one."""
        prompt = self.ports.prompts.encode(problem)
        limit = self.config.rollout.max_response_tokens
        rows: list[Trajectory] = []
        for index, name in enumerate(("chosen", "rejected")):
            tokens = self.ports.prompts.encode_response(str(problem.extra[name]))
            if len(tokens) > limit:
                raise RunError(
                    f"the {name} response of problem {problem.uid} has {len(tokens)} tokens; "
                    f"raise rollout.max_response_tokens (now {limit})"
                )
            row = Trajectory(problem.uid, prompt, tokens, source=DEMONSTRATION, finish="given")
            row.index = index
            rows.append(row)
        return rows

    def compute_reference_logprobs(self, batch: Batch, step: Step) -> Batch:
        if not self.settings.reference_free:
            batch.tokens["reference_logprobs"] = self.ports.reference.logprobs(batch)["logprobs"]
        return batch

    # ---- beside the model

    def prepare(self, batch: Batch) -> Batch:
        """Sets the weight of a pair: 1 / number of pairs of the optimizer step."""
        batch.rows["pair_weight"] = torch.full((len(batch),), 2.0 / max(1, len(batch)))
        return batch

    def row_groups(self, batch: Batch) -> Sequence[int]:
        return batch.rows["group"].tolist()

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        settings = self.settings
        result = dpo(
            *self.pair_logprobs(batch, current.logprobs),
            beta=settings.beta,
            loss=settings.loss,
            label_smoothing=settings.label_smoothing,
        )
        for name, column in result.metrics.items():
            metrics.mean(f"dpo/{name}", column)
        num_pairs = len(result.values)
        return (result.values * batch.rows["pair_weight"][:num_pairs]).sum()

    def pair_logprobs(self, batch: Batch, logprobs: Tensor) -> list[Tensor]:
        """(pairs,) log-probs of chosen and rejected responses; then the reference's, if any."""
        order = torch.argsort(batch.rows["group"] * 2 + batch.rows["index"])
        columns = [logprobs]
        if "reference_logprobs" in batch.tokens:
            columns.append(batch.tokens["reference_logprobs"])
        mask = batch.tokens["loss_mask"]
        average = self.settings.loss == "ipo"
        pairs: list[Tensor] = []
        for column in columns:
            rows = row_logprobs(column, mask, batch.row_index, len(batch), average=average)[order]
            pairs += [rows[0::2], rows[1::2]]
        return pairs

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """How often the policy prefers the chosen response more than the reference does."""
        groups = [Group(problem, 0, self.pair_rows(problem)) for problem in problems]
        batch = self.compute_reference_logprobs(self.sample(groups, Step(0)), Step(0))
        logprobs = self.ports.policy.logprobs(batch)["logprobs"]
        metrics = dpo(*self.pair_logprobs(batch, logprobs), beta=self.settings.beta).metrics
        return {
            "validation/accuracy": float(metrics["accuracy"].mean()),
            "validation/margin": float(metrics["margin"].mean()),
        }

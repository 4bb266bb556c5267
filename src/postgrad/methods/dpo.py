"""DPO and its family: learn from pairs of a chosen and a rejected response.

Both responses of a pair are given rows of one group, and one loss reads them jointly. IPO, SimPO
and ORPO are this method with other settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from postgrad.algorithms.preference import MEAN_LOSSES, PREFERENCE_LOSSES, dpo
from postgrad.config.schema import setting
from postgrad.errors import Conflict
from postgrad.methods.method import MethodSettings
from postgrad.methods.ports import Role
from postgrad.methods.step import Group, Stage, Step
from postgrad.methods.support.pairs import (
    GivenPairs,
    GivenPairsObjective,
    pair_rows,
    response_logprobs,
    split_pairs,
)
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.types import Batch, Problem


@dataclass
class DpoSettings(MethodSettings):
    loss: str = setting(
        "sigmoid",
        "sigmoid is DPO's; ipo uses mean log-probs; hinge is SLiC's; odds_ratio is ORPO's",
        choices=PREFERENCE_LOSSES,
    )
    beta: float = setting(
        0.1, "strength of the KL constraint to the reference", above=0.0, at_most=1e4
    )
    reference_free: bool = setting(False, "use a uniform reference instead of the starting model")
    length_normalized: bool = setting(
        False,
        "use mean log-probs per token instead of sums (ipo and odds_ratio always do)",
        only_with=f"method.loss!={','.join(MEAN_LOSSES)}",
    )
    target_margin: float = setting(
        0.0,
        "SimPO's gamma: margin that beta times the difference must exceed",
        at_least=0.0,
        only_with="method.loss=sigmoid",
    )
    sft_coef: float = setting(
        0.0,
        "coefficient of the SFT term: the mean negative log-prob per token of the chosen response",
        at_least=0.0,
    )


class DpoObjective(GivenPairsObjective):
    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        settings = self.settings
        result = dpo(
            *self.pair_logprobs(batch, current.logprobs),
            beta=settings.beta,
            loss=settings.loss,
            target_margin=settings.target_margin,
        )
        for name, column in result.metrics.items():
            metrics.mean(f"dpo/{name}", column)
        metrics.mean("entropy", current.entropy, batch.tokens["loss_mask"])
        values = result.values
        if settings.sft_coef:
            chosen, _ = split_pairs(batch, response_logprobs(batch, current.logprobs, average=True))
            metrics.mean("dpo/sft_loss", -chosen)
            values = values - settings.sft_coef * chosen
        return (values * batch.rows["pair_weight"][: len(values)]).sum()

    def pair_logprobs(self, batch: Batch, logprobs: Tensor) -> list[Tensor]:
        """(pairs,) log-probs of chosen and rejected responses; then the reference's, if any."""
        average = self.settings.length_normalized or self.settings.loss in MEAN_LOSSES
        pairs = [*split_pairs(batch, response_logprobs(batch, logprobs, average))]
        if "reference_logprobs" in batch.tokens:
            reference = batch.tokens["reference_logprobs"]
            pairs += split_pairs(batch, response_logprobs(batch, reference, average))
        return pairs


class Dpo(GivenPairs):
    Settings = DpoSettings
    Objective = DpoObjective

    def check(self) -> None:
        super().check()
        settings = self.settings
        if settings.loss == "odds_ratio" and not settings.reference_free:
            raise Conflict(
                "method.loss=odds_ratio compares with no reference; add method.reference_free=true"
            )

    def roles(self) -> dict[str, Role]:
        return {} if self.settings.reference_free else {"reference": Role("frozen")}

    # ---- stages, on the driver

    def learning_stages(self) -> list[Stage]:
        return [self.compute_reference_logprobs, self.update, self.publish]

    def compose(self, problems: Sequence[Problem], step: Step) -> list[Group]:
        return [Group(problem, 0, pair_rows(self, problem)) for problem in problems]

    def validate(self, problems: Sequence[Problem]) -> dict[str, float]:
        """How often the policy prefers the chosen response more than the reference does."""
        batch = self.sample(self.compose(problems, Step(0)), Step(0))
        batch = self.compute_reference_logprobs(batch, Step(0))
        logprobs = self.ports.policy.logprobs(batch)["logprobs"]
        metrics = dpo(
            *self.objective.pair_logprobs(batch, logprobs), beta=self.settings.beta
        ).metrics
        return {
            "validation/accuracy": float(metrics["accuracy"].mean()),
            "validation/margin": float(metrics["margin"].mean()),
        }

"""GRPO and its family: sample a group per problem, turn rewards into advantages, train the policy.

    advantage of a response = (reward - mean of its group) / (std of its group)
    loss of a token         = -min(ratio · A, clip(ratio, 1 - low, 1 + high) · A)

`method.advantage` and `method.loss` name entries of algorithms.ADVANTAGES and algorithms.LOSSES, or
a function of your own. RLOO, ReMax, REINFORCE++, OPO, GSPO, CISPO and DAPO are this method with
other settings. support/policy_objective.py has the loss.

If one update follows each rollout, the old policy is the current policy. Its log-probs are then the
current ones without gradient, and no second forward pass runs.
"""

from typing import Any, ClassVar

import torch

from postgrad.algorithms.shaping import overlong_penalty
from postgrad.config.schema import Config
from postgrad.methods.method import Method, Traits
from postgrad.methods.ports import Role
from postgrad.methods.step import Stage, Step
from postgrad.methods.support.advantage_columns import advantage_columns, is_singleton_group
from postgrad.methods.support.correction import (
    check_correction,
    correct,
    correction_on,
    needs_trainer_logprobs,
)
from postgrad.methods.support.declarations import call_advantage, find_advantage
from postgrad.methods.support.dynamic_sampling import refill
from postgrad.methods.support.grpo_settings import (
    OFFERS,
    GrpoSettings,
    aggregation_note,
    check_grpo,
    reward_parts,
)
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.methods.support.responses import reward_metrics
from postgrad.model.metrics import MetricAccumulator
from postgrad.rollout.engine import make_sampling
from postgrad.types import Batch, Failure, Score


class Grpo(Method):
    """Group-relative advantages; the objective is a policy loss of the family."""

    Settings = GrpoSettings
    Objective = PolicyObjective
    objective: PolicyObjective
    traits = Traits(tools=True, environments=True, truncated_sampling=True)
    offers: ClassVar[tuple[str, ...]] = OFFERS  # what an advantage may need

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.advantage = find_advantage(self.settings.advantage)
        self.kl_coef: float = self.settings.kl_coef  # changes if method.kl_target is set

    # ---- the stages of a step

    def learning_stages(self) -> list[Stage]:
        """Score, add the log-probs that something reads, estimate advantages, update, publish."""
        learn: list[Stage] = [self.estimate, self.update, self.publish]
        return [*self.scoring_stages(), *self.logprob_stages(), *learn]

    def scoring_stages(self) -> list[Stage]:
        """Return the stages that lead from responses to rewards."""
        stages: list[Stage] = [self.enrich, self.score]
        if self.settings.max_refills:
            stages.append(self.refill)
        if "greedy" in self.advantage.needs:
            stages.append(self.sample_greedy)
        return stages

    def logprob_stages(self) -> list[Stage]:
        """Return the stages that run other models, or this one before its updates."""
        stages: list[Stage] = []
        if self.needs_old_logprobs():
            stages.append(self.compute_old_logprobs)
        if self.settings.kl != "none":
            stages.append(self.compute_reference_logprobs)
        if correction_on(self.settings, self.ports.engine):
            stages.append(self.correct)
        return stages

    def needs_old_logprobs(self) -> bool:
        """Return whether a stage before the update, or a second update, reads the old log-probs."""
        settings = self.settings
        has_second_update = self.objective.num_updates() > 1 and settings.correction != "bypass"
        return (
            has_second_update
            or "old_logprobs" in self.advantage.reads
            or "cov_selected" in self.objective.policy_loss.reads
            or settings.kl == "reward"
            or needs_trainer_logprobs(settings, self.ports.engine)
        )

    def score(self, batch: Batch, step: Step) -> Batch:
        """Add DAPO's length penalty to the verifier's reward; mask truncated responses."""
        batch = super().score(batch, step)
        if self.settings.mask_truncated:
            truncated = torch.tensor([finish == "length" for finish in batch.rows["finish"]])
            batch.tokens["loss_mask"] = batch.tokens["loss_mask"] & ~batch.expand(truncated)
            step.metrics["response/masked"] = float(truncated.float().mean())
        if self.settings.overlong_buffer:
            limit, buffer = self.config.rollout.max_response_tokens, self.settings.overlong_buffer
            penalty = overlong_penalty(batch.response.lengths, max_length=limit, buffer=buffer)
            batch.rows["reward/overlong"] = penalty.float()
            batch.rows["reward"] = batch.rows["reward"] + batch.rows["reward/overlong"]
        return batch

    def refill(self, batch: Batch, step: Step) -> Batch:
        """Replace groups without a difference (DAPO). Rewards are logged over all scored rows."""
        kept, scored = refill(self, batch, step)
        self.log_rewards(scored, step)
        return kept

    def log_rewards(self, batch: Batch, step: Step) -> None:
        """Log the mean rewards over the scored rows of all refills."""
        step.metrics |= reward_metrics(batch)

    def sample_greedy(self, batch: Batch, step: Step) -> Batch:
        """Add ReMax's baseline, `greedy_reward`: that of one greedy response per problem.

        Rows of a problem whose greedy response could not be scored leave the batch.
        """
        uids = list(dict.fromkeys(batch.rows["uid"]))
        problems = [step.data.find(uid) for uid in uids]
        sampling = make_sampling(self.config.rollout, temperature=0.0)
        requests = [(problem, [0], []) for problem in problems]
        completions = self.generate(requests, sampling, step.number)
        texts = [self.ports.encoder.decode(each[0].policy_tokens) for each in completions]
        results = self.ports.scorer.score(
            problems, texts, lambda: [list(each[0].tokens) for each in completions]
        )
        verdicts = dict(zip(uids, results, strict=True))
        rewards: list[float] = []
        failures: list[str] = []
        for uid in batch.rows["uid"]:
            verdict = verdicts[uid]
            rewards.append(verdict.value if isinstance(verdict, Score) else float("nan"))
            failed = isinstance(verdict, Failure)
            failures.append(f"greedy response: {verdict.kind}: {verdict.reason}" if failed else "")
        batch.rows["greedy_reward"] = torch.tensor(rewards)
        batch.rows["failure"] = failures
        return self.drop_failures(batch, step)

    def compute_old_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Add the log-probs of the policy before its updates, of the view that is trained."""
        old = self.ports.policy.logprobs(batch, self.objective.view(step.number))
        batch.tokens["old_logprobs"] = old["logprobs"]
        batch.tokens["sum_probs_squared"] = old["sum_squares"]
        batch.tokens["entropy"] = old["entropy"]
        metrics = MetricAccumulator()
        self.objective.log_gap(batch, old["logprobs"], metrics)
        step.metrics |= metrics.result()
        return batch

    def compute_reference_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Add the log-probs of the reference, of the same view."""
        reference = self.ports.reference.logprobs(batch, self.objective.view(step.number))
        batch.tokens["reference_logprobs"] = reference["logprobs"]
        return batch

    def correct(self, batch: Batch, step: Step) -> Batch:
        """Add importance weights for an engine with its own weights."""
        return correct(self.settings, batch, step)

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Call the advantage with the columns and options that it declares."""
        columns = self.advantage_columns(batch, step)
        options = {name: getattr(self.settings, name) for name in self.advantage.options}
        key = f"method.advantage={self.settings.advantage}"
        result = call_advantage(self.advantage, key, batch, columns, options)
        batch.tokens["advantages"] = result.advantages
        if step.failed and "groups" in self.advantage.reads:
            lone = batch.expand(is_singleton_group(batch))
            batch.tokens["advantages"] = torch.where(lone, 0.0, result.advantages)
        if self.advantage.level == "token":
            batch.tokens["returns"] = result.returns
        if "cov_selected" in self.objective.policy_loss.reads:
            # For the random choice of clip_cov and kl_cov: the same numbers in a resumed run.
            generator = torch.Generator().manual_seed((self.config.seed << 20) + step.number)
            batch.tokens["uniforms"] = torch.rand(batch.num_tokens, generator=generator)
        return batch

    def advantage_columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        """Return the columns that an advantage may read, by name."""
        return advantage_columns(self, batch, step)

    # ---- models, state and checks

    def roles(self) -> dict[str, Role]:
        """Return the reference model, if there is a KL penalty."""
        return {"reference": Role("frozen")} if self.settings.kl != "none" else {}

    def reward_parts(self) -> dict[str, str]:
        """Return the parts of the score that method.reward_weights and refill_by name."""
        return reward_parts(self)

    def data_notes(self, encoder: Any, problems: Any) -> list[str]:
        """Note an aggregation other than the one that the formula of the loss assumes."""
        return [*super().data_notes(encoder, problems), *aggregation_note(self)]

    def state(self) -> dict[str, Any]:
        """Return the adapted coefficient of the KL penalty."""
        return {"kl_coef": self.kl_coef}

    def load(self, state: dict[str, Any]) -> None:
        """Continue with the coefficient of a checkpoint."""
        self.kl_coef = state["kl_coef"]

    def check(self) -> None:
        """Raise ConfigError for settings that the advantage, the loss or the KL cannot use."""
        super().check()
        check_grpo(self)
        check_correction(self.config)

"""GRPO and its family: sample a group for each problem, turn rewards into advantages, move by a policy loss.

`method.advantage` and `method.loss` name entries of algorithms.ADVANTAGES and algorithms.LOSSES, so RLOO, ReMax, REINFORCE++, OPO, GSPO,
CISPO and the others are this method with other words; DAPO's refilling (refill.py) is a stage of it. When one update follows one rollout
the old policy is the current one: its log-probs are the current ones without gradient and no second forward pass runs.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from postgrad.algorithms.advantages import ADVANTAGES
from postgrad.algorithms.kl import (
    KL_ESTIMATORS,
    AdaptiveKl,
    FixedKl,
    kl_in_reward,
    kl_penalty,
    mean_kl,
)
from postgrad.algorithms.losses import LOSSES, cov_selection
from postgrad.algorithms.shaping import overlong_penalty
from postgrad.algorithms.token_advantages import outcome_rewards
from postgrad.config.schema import setting
from postgrad.errors import ConfigError, RunError, did_you_mean
from postgrad.methods.base import Method, MethodSettings, Role, Stage, Step
from postgrad.methods.support.checks import refuse_unread
from postgrad.methods.support.correction import (
    CORRECTIONS,
    check_correction,
    correct,
    correction_on,
    log_engine_gap,
)
from postgrad.methods.support.dynamic_sampling import refill
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.policy import MetricAccumulator
from postgrad.rollout.engine import sampling_of
from postgrad.types import POLICY, Batch, Failure, Score

KNOWN_NEEDS = ("group>=2", "named_rewards", "greedy", "sum_probs_squared", "source", "critic")


@dataclass
class GrpoSettings(MethodSettings):
    advantage: str = setting(
        "grpo",
        "estimator of the advantages; docs/algorithms.md lists them",
        choices=tuple(ADVANTAGES),
    )
    normalize_by_std: bool = setting(
        True, "divide a group's advantages by its standard deviation; false is Dr. GRPO"
    )
    gamma: float = setting(1.0, "discount of token-level estimators", above=0.0, at_most=1.0)
    reward_weights: dict[str, float] = field(
        default_factory=dict, metadata={"help": "gdpo: weights of the named reward parts"}
    )
    loss: str = setting(
        "ppo_clip", "policy loss; docs/algorithms.md lists them", choices=tuple(LOSSES)
    )
    clip_low: float | None = setting(
        None, "ratio clipped below 1 - this; null: the loss's own default, inf: open", at_least=0.0
    )
    clip_high: float | None = setting(
        None, "ratio clipped above 1 + this; null: the loss's own default, inf: open", at_least=0.0
    )
    dual_clip: float | None = setting(
        None,
        "bound on the ratio where the advantage is negative; null: the default of the loss",
        above=1.0,
    )
    loss_options: dict[str, float] = field(
        default_factory=dict, metadata={"help": "further numbers of the loss, by name"}
    )
    kl: str = setting(
        "none",
        "penalty for leaving the reference: none, in the loss, or in the reward",
        choices=("none", "loss", "reward"),
    )
    kl_estimator: str = setting("k3", "how the penalty is estimated", choices=KL_ESTIMATORS)
    kl_coef: float = setting(
        0.001, "weight of the penalty; the start of an adaptive one", at_least=0.0
    )
    kl_target: float | None = setting(
        None, "steer the weight towards this KL (in the reward only); null: fixed", above=0.0
    )
    entropy_coef: float = setting(
        0.0, "bonus for the entropy of the policy being trained", at_least=0.0
    )
    overlong_buffer: int = setting(
        0,
        "DAPO: tokens before the limit in which the penalty for length grows from 0 to 1; 0 is off",
        at_least=0,
    )
    max_refills: int = setting(
        0,
        "DAPO: times a step may sample again to replace groups whose rewards are all equal; 0 is off",
        at_least=0,
    )
    correction: str = setting(
        "auto",
        "importance weights for an engine that is not the trainer; auto: token when apart; rejection: method.rejection alone",
        choices=CORRECTIONS,
    )
    correction_bound: str = setting(
        "2.0", "C truncates the weights at C; lo_hi sets weights outside to zero"
    )
    rejection: dict[str, str] = field(
        default_factory=dict,
        metadata={"help": "rules that mask tokens or rows, e.g. token_k1: 0.5_2.0"},
    )


class Grpo(Method):
    Settings = GrpoSettings
    takes_tools = True
    offers: ClassVar[tuple[str, ...]] = KNOWN_NEEDS  # what an estimator may ask for

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        settings = self.settings
        adaptive = settings.kl_target is not None
        self.controller = (
            AdaptiveKl(settings.kl_coef, settings.kl_target)
            if adaptive
            else FixedKl(settings.kl_coef)
        )
        self.estimator, self.policy_loss = ADVANTAGES[settings.advantage], LOSSES[settings.loss]

    def check(self) -> None:
        super().check()
        settings, samples = self.settings, self.config.rollout.samples
        needs = self.estimator.needs
        grouped = "groups" in self.estimator.columns
        for need in needs:
            if need not in self.offers or (need == "critic" and "critic" not in self.roles()):
                fix = "use the recipe ppo" if need == "critic" else "use the recipe made for it"
                raise ConfigError(
                    f"method.advantage={settings.advantage} needs a {need}; {settings.name} has none: {fix}"
                )
        if samples < 2 and grouped:
            raise ConfigError(
                f"rollout.samples={samples}: {settings.advantage} compares within a group; use rollout.samples=8"
            )
        if "named_rewards" in needs and not settings.reward_weights:
            raise ConfigError(
                "method.advantage=gdpo needs the reward parts by name; add e.g. method.reward_weights.answer=1.0"
            )
        if settings.kl_target is not None and settings.kl != "reward":
            raise ConfigError(
                f"method.kl_target={settings.kl_target} steers the penalty in the reward; add method.kl=reward or remove it"
            )
        if settings.kl == "reward" and settings.kl_estimator.endswith("+"):
            raise ConfigError(
                f"method.kl_estimator={settings.kl_estimator} changes gradients, and a reward has none; use k1, k2, k3 or abs"
            )
        one_reward = "named_rewards" not in needs and not {"rewards", "token_rewards"}.isdisjoint(
            self.estimator.columns
        )
        if settings.kl == "reward" and not one_reward:
            raise ConfigError(
                f"method.kl=reward mixes with one reward only; {settings.advantage} has several: use method.kl=loss"
            )
        if settings.overlong_buffer > self.config.rollout.max_response_tokens:
            limit = self.config.rollout.max_response_tokens
            raise ConfigError(
                f"method.overlong_buffer={settings.overlong_buffer} exceeds rollout.max_response_tokens={limit}; lower it to at most that"
            )
        parameters = inspect.signature(self.policy_loss.function).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]  # the others are columns
        for name in [
            *settings.loss_options,
            *(
                n
                for n in ("clip_low", "clip_high", "dual_clip")
                if getattr(settings, n) is not None
            ),
        ]:
            if name not in known:
                raise ConfigError(
                    f"method.loss={settings.loss} has no setting {name}; it takes {', '.join(known) or 'none'}"
                )
        for name in self.policy_loss.required:
            if name not in settings.loss_options:
                raise ConfigError(
                    f"method.loss={settings.loss} needs method.loss_options.{name}=NUMBER"
                )
        check_correction(self.config)

    def check_used(self) -> None:
        super().check_used()
        settings, known = self.settings, inspect.signature(self.estimator.function).parameters
        if settings.kl == "none":
            refuse_unread(
                "method",
                settings,
                ["kl_coef", "kl_estimator"],
                "with method.kl=none",
                "add method.kl=loss",
            )
        if "normalize_by_std" not in known:
            why = f"with method.advantage={settings.advantage}, which has no such division"
            refuse_unread("method", settings, ["normalize_by_std"], why)
        if settings.gamma != 1.0 and "gamma" not in known:
            raise ConfigError(
                f"method.gamma={settings.gamma:g}: {settings.advantage} gives a whole response one advantage; remove it"
            )
        if settings.reward_weights and "named_rewards" not in self.estimator.needs:
            raise ConfigError(
                f"method.reward_weights are read by gdpo alone, and method.advantage={settings.advantage}; change one of them, "
                'or weigh the parts in the verifier: reward.verifier="math + 0.1*format"'
            )

    def roles(self) -> dict[str, Role]:
        return {"reference": Role("frozen")} if self.settings.kl != "none" else {}

    def stages(self) -> list[Stage]:
        wanted: list[Stage] = [self.draw, self.compose, self.sample, self.enrich, self.score]
        wanted += [self.refill] if self.settings.max_refills else []
        wanted += [self.greedy] if "greedy" in self.estimator.needs else []
        wanted += [self.compute_old_logprobs] if self.needs_old() else []
        wanted += [self.compute_reference_logprobs] if self.settings.kl != "none" else []
        wanted += [self.correct] if correction_on(self.settings, self.ports.engine) else []
        return [*wanted, self.estimate, self.update, self.publish]

    def needs_old(self) -> bool:
        """Whether somebody reads the old policy's log-probs before or after the first optimizer step."""
        read_early = (
            "old_logprobs" in self.estimator.columns or "cov_selected" in self.policy_loss.columns
        )
        several = self.config.training.updates_per_step > 1
        return (
            several
            or read_early
            or self.settings.kl == "reward"
            or correction_on(self.settings, self.ports.engine)
        )

    # ---- stages

    def score(self, batch: Batch, step: Step) -> Batch:
        batch = super().score(batch, step)
        if self.settings.overlong_buffer:
            limit = self.config.rollout.max_response_tokens
            batch.rows["reward/overlong"] = overlong_penalty(
                batch.response.lengths, max_length=limit, buffer=self.settings.overlong_buffer
            ).float()
            batch.rows["reward"] = batch.rows["reward"] + batch.rows["reward/overlong"]
        return batch

    def refill(self, batch: Batch, step: Step) -> Batch:
        return refill(self, batch, step)

    def greedy(self, batch: Batch, step: Step) -> Batch:
        """ReMax: the reward of one greedy response a problem is the baseline."""
        uids = list(dict.fromkeys(batch.rows["uid"]))
        problems = [step.data.find(uid) for uid in uids]
        sampling = sampling_of(self.config.rollout, temperature=0.0)
        answers = self.generate([(p, [0], []) for p in problems], sampling, step.number)
        verdicts = self.ports.scorer.score(
            problems, [self.ports.prompts.decode(a[0].own_tokens) for a in answers]
        )
        found = dict(zip(uids, verdicts, strict=True))
        of_rows = [found[uid] for uid in batch.rows["uid"]]
        batch.rows["greedy_reward"] = torch.tensor(
            [v.value if isinstance(v, Score) else float("nan") for v in of_rows]
        )
        batch.rows["failure"] = [
            f"greedy response: {v.kind}: {v.reason}" if isinstance(v, Failure) else ""
            for v in of_rows
        ]
        return self.leave_out_failures(batch, step)  # without its baseline a row has no advantage

    def compute_old_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Log-probs of the policy before its updates, of the view that is trained."""
        old = self.ports.policy.logprobs(batch, self.view(step.number))
        batch.tokens["old_logprobs"], batch.tokens["sum_probs_squared"] = (
            old["logprobs"],
            old["sum_squares"],
        )
        batch.tokens["entropy"] = old["entropy"]
        metrics = MetricAccumulator()
        self.log_gap(batch, old["logprobs"], metrics)
        step.metrics |= metrics.result()
        return batch

    def compute_reference_logprobs(self, batch: Batch, step: Step) -> Batch:
        """Log-probs of the reference, of the same view."""
        batch.tokens["reference_logprobs"] = self.ports.reference.logprobs(
            batch, self.view(step.number)
        )["logprobs"]
        return batch

    def correct(self, batch: Batch, step: Step) -> Batch:
        return correct(self.settings, batch, step)

    def estimate(self, batch: Batch, step: Step) -> Batch:
        columns = self.columns(batch, step)
        options = {
            "normalize_by_std": self.settings.normalize_by_std,
            "gamma": self.settings.gamma,
        } | self.estimate_options()
        known = inspect.signature(self.estimator.function).parameters
        given = {name: columns[name] for name in self.estimator.columns} | {
            k: v for k, v in options.items() if k in known
        }
        out = self.estimator.function(**given)
        if self.estimator.level == "row":
            batch.tokens["advantages"] = batch.expand(out) * batch.tokens["loss_mask"]
        else:
            batch.tokens["advantages"], batch.tokens["returns"] = out.advantages, out.returns
        if (
            "cov_selected" in self.policy_loss.columns
        ):  # clip_cov picks at random among its candidates
            generator = torch.Generator().manual_seed((self.config.seed << 20) + step.number)
            batch.tokens["uniforms"] = torch.rand(batch.num_tokens, generator=generator)
        return batch

    def estimate_options(self) -> dict[str, Any]:
        weights = dict(self.settings.reward_weights)
        return {"weights": weights} if weights else {}

    def columns(self, batch: Batch, step: Step) -> dict[str, Any]:
        """Everything an estimator may read, by the names of algorithms.advantages."""
        mask, rows, num_rows = batch.tokens["loss_mask"], batch.row_index, len(batch)
        outcome = token_rewards = outcome_rewards(batch.rows["reward"], mask, rows, num_rows)
        if self.settings.kl == "reward":
            old, reference, beta = (
                batch.tokens["old_logprobs"],
                batch.tokens["reference_logprobs"],
                self.controller.coefficient,
            )
            token_rewards, kl = kl_in_reward(
                token_rewards, old, reference, mask, beta, estimator=self.settings.kl_estimator
            )
            measured = float(mean_kl(kl, mask, rows, num_rows))
            step.metrics |= {"kl/reference": measured, "kl/coef": beta}
            self.controller.update(measured, num_rows)
        # A row whose tokens were all rejected still tells its group what it earned.
        rewards: Any = batch.rows["reward"] + batch.sum_tokens(token_rewards - outcome)
        if "named_rewards" in self.estimator.needs:
            rewards = {name: self.part(batch, name) for name in self.settings.reward_weights}
        return {
            **dict(batch.tokens),
            "rewards": rewards,
            "token_rewards": token_rewards,
            "groups": batch.rows["group"],
            "lengths": batch.sum_tokens(mask.long()),
            "on_policy": batch.rows["source"] == POLICY,
            "greedy_rewards": batch.rows.get("greedy_reward"),
            "mask": mask,
            "rows": rows,
            "num_rows": num_rows,
        }

    def part(self, batch: Batch, name: str) -> Tensor:
        """(rows,) one named part of the reward."""
        there = [
            column.removeprefix("reward/") for column in batch.rows if column.startswith("reward/")
        ]
        if name not in there:
            raise RunError(
                f"method.reward_weights.{name}: the verifier reports no such part; {did_you_mean(name, there)}"
            )
        return batch.rows[f"reward/{name}"]

    # ---- beside the model

    def prepare(self, batch: Batch) -> Batch:
        """Rows whose advantage is zero everywhere move nothing, unless a bonus or a penalty does: they count but are not computed."""
        batch = super().prepare(batch)
        if "cov_selected" in self.policy_loss.columns:
            band, uniforms = (
                ((1.0, 5.0), batch.tokens["uniforms"])
                if self.settings.loss == "clip_cov"
                else (None, None)
            )
            batch.tokens["cov_selected"] = cov_selection(
                batch.tokens["old_logprobs"],
                batch.tokens["advantages"],
                batch.tokens["loss_mask"],
                band=band,
                uniforms=uniforms,
            )
        if (
            self.settings.kl == "loss"
            or self.settings.entropy_coef
            or self.settings.loss in ("dro", "kl_cov")
        ):
            return batch
        moves = (
            batch.sum_tokens((batch.tokens["advantages"] * batch.tokens["loss_weight"]).abs()) > 0
        )
        return batch.select(torch.nonzero(moves)[:, 0])

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        mask, weight, settings = (
            batch.tokens["loss_mask"],
            batch.tokens["loss_weight"],
            self.settings,
        )
        values = self.token_losses(batch, current, metrics)
        metrics.mean("entropy", current.entropy, mask)
        if "rollout_weights" in batch.tokens:
            values = values * batch.tokens["rollout_weights"]
        if settings.kl == "loss":
            kl = kl_penalty(
                current.logprobs, batch.tokens["reference_logprobs"], settings.kl_estimator
            )
            metrics.mean("kl/reference", kl, mask)
            values = values + settings.kl_coef * kl
        total = torch.where(mask, values * weight, 0.0).sum()
        if settings.entropy_coef:  # a method may give the bonus a denominator of its own
            bonus = torch.where(
                mask, current.entropy * batch.tokens.get("entropy_weight", weight), 0.0
            ).sum()
            total = total - settings.entropy_coef * bonus
        return total

    def token_losses(
        self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator
    ) -> Tensor:
        """(tokens,) the policy loss of every token, before weights, bonuses and penalties."""
        mask = batch.tokens["loss_mask"]
        fresh = "old_logprobs" not in batch.tokens
        shape = {"mask": mask, "rows": batch.row_index, "num_rows": len(batch)}
        columns = {**dict(batch.tokens), **shape, "logprobs": current.logprobs}
        if fresh:
            columns["old_logprobs"] = current.logprobs.detach()
            self.log_gap(batch, current.logprobs, metrics)
        out = self.policy_loss.function(
            **{name: columns[name] for name in self.policy_loss.columns},
            **self.loss_settings(batch),
        )
        for name, column in out.metrics.items():
            metrics.mean(f"policy/{name}", column, mask)
        return out.values

    def log_gap(self, batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> None:
        """How far the sampler's log-probs are from those of the policy being trained, before it moves."""
        log_engine_gap(batch, logprobs, metrics)

    def loss_settings(self, batch: Batch) -> dict[str, float]:
        """The numbers the loss is called with on these rows: those that are set."""
        own = {
            "clip_low": self.settings.clip_low,
            "clip_high": self.settings.clip_high,
            "dual_clip": self.settings.dual_clip,
        }
        return {name: value for name, value in own.items() if value is not None} | dict(
            self.settings.loss_options
        )

    # ---- state

    def state(self) -> dict[str, Any]:
        return {"kl": self.controller.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.controller.load(state["kl"])

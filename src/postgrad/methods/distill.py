"""On-policy distillation: the student samples, and a teacher says how likely each token was.

`method.divergence=sampled` uses the teacher's log-prob of each sampled token: the negative reverse
KL per token is the advantage of a policy gradient. The other divergences (GKD) compare the two
distributions over the teacher's most likely tokens and are differentiated directly.
`method.reward_coef` adds the advantages of a verifiable reward to either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from postgrad.algorithms.distillation import DIVERGENCES, divergence, teacher_advantages, with_rest
from postgrad.config.schema import setting
from postgrad.config.setting import Condition
from postgrad.errors import Conflict, Missing, WrongValue
from postgrad.methods.grpo import Grpo
from postgrad.methods.method import Method
from postgrad.methods.ports import Role
from postgrad.methods.step import Stage, Step
from postgrad.methods.support.correction import check_correction
from postgrad.methods.support.grpo_settings import GrpoSettings, check_loss_options
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.load.load import load_tokenizer
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import TokenOutputs
from postgrad.rollout.served_path import is_served, parse_served_path
from postgrad.types import Batch, Problem


@dataclass
class DistillSettings(GrpoSettings):
    only_with: ClassVar[dict[str, Condition]] = dict.fromkeys(
        ("advantage", "max_refills", "overlong_buffer", "reward_weights"), "method.reward_coef"
    )
    teacher: str = setting(
        "",
        "the teacher, a model with the same tokenizer: path, hub id, or a server's model, "
        "http://host:8000/v1?tokenizer=PATH#model",
    )
    divergence: str = setting(
        "sampled",
        "sampled: policy gradient on the sampled tokens; forward, reverse, jsd: direct gradient",
        choices=DIVERGENCES,
    )
    top_k: int = setting(
        64,
        "forward, reverse, jsd: most likely tokens of the teacher to compare",
        at_least=1,
        only_with="method.divergence!=sampled",
    )
    jsd_beta: float = setting(
        0.5,
        "jsd: share of the teacher in the mixture",
        above=0.0,
        at_most=0.99,
        only_with="method.divergence=jsd",
    )
    reward_coef: float = setting(
        0.0, "coefficient of the verifier's advantages; 0: no verifier is asked", at_least=0.0
    )


class DistillObjective(PolicyObjective):
    def prepare(self, batch: Batch) -> Batch:
        if "advantages" not in batch.tokens:
            batch.tokens["advantages"] = torch.zeros(batch.num_tokens)
        return super().prepare(batch)

    def needs_all_rows(self) -> bool:
        return self.settings.divergence != "sampled" or super().needs_all_rows()

    def target_ids(self, batch: Batch) -> Tensor:
        """Return the sampled tokens, then in columns the teacher's top tokens if compared."""
        if self.settings.divergence == "sampled":
            return super().target_ids(batch)
        return torch.cat([batch.response.values[:, None], batch.tokens["teacher_top_ids"]], 1)

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        settings = self.settings
        if settings.divergence == "sampled":
            return super().loss(batch, current, metrics)
        sampled, top = current.logprobs[:, 0], current.logprobs[:, 1:]
        mask = batch.tokens["loss_mask"]
        values = divergence(
            with_rest(top),
            with_rest(batch.tokens["teacher_top_logprobs"]),
            settings.divergence,
            settings.jsd_beta,
        )
        metrics.mean(f"distill/{settings.divergence}", values, mask)
        weighted = torch.where(mask, values * batch.tokens["loss_weight"], 0.0)
        return weighted.sum() + super().loss(batch, current._replace(logprobs=sampled), metrics)


class Distill(Grpo):
    Settings = DistillSettings
    Objective = DistillObjective
    traits = replace(
        Grpo.traits, truncated_sampling=False
    )  # the teacher's distribution is over the vocabulary

    # ---- checks and models

    def check(self) -> None:
        if self.settings.reward_coef:
            super().check()
        else:
            Method.check(self)
            check_loss_options(self)
            check_correction(self.config)
        self.check_teacher()

    def check_teacher(self) -> None:
        """Refuses a teacher that gives no log-probs at the temperature of the rollouts."""
        teacher = self.settings.teacher
        if teacher.startswith("policy:"):
            raise WrongValue(
                f"method.teacher={teacher}: the teacher gives log-probs; give a path, a hub id or "
                "http://host:8000/v1?tokenizer=PATH#model"
            )
        temperature = self.config.rollout.temperature
        if is_served(teacher) and temperature != 1:
            raise Conflict(
                f"rollout.temperature={temperature:g}: servers give log-probs of prompts at "
                "temperature 1; use rollout.temperature=1, or a teacher that this run loads"
            )

    def check_problems(self, problems: Sequence[Problem]) -> None:
        """Refuses a teacher that is missing, or whose tokens are not the student's."""
        path = self.settings.teacher
        if not path:
            raise Missing("method.teacher is missing; give the teacher's path or hub id")
        if is_served(path):
            _, path = parse_served_path(path)
        model = self.config.model
        student = load_tokenizer(model, self.config.seed).get_vocab()
        teacher = load_tokenizer(replace(model, path=path), self.config.seed).get_vocab()
        if student != teacher:
            raise Conflict(
                f"method.teacher: {path} has another tokenizer than model.path={model.path} "
                f"({len(teacher)} and {len(student)} tokens); distillation compares token by "
                "token: use a teacher of the same family, or sft on the teacher's responses"
            )

    def roles(self) -> dict[str, Role]:
        return super().roles() | {"teacher": Role("frozen", self.settings.teacher)}

    def needs_verifier(self) -> bool:
        return self.scores_training_rows() or bool(self.config.data.validation)

    def scores_training_rows(self) -> bool:
        return self.settings.reward_coef > 0

    # ---- stages, on the driver

    def scoring_stages(self) -> list[Stage]:
        return super().scoring_stages() if self.settings.reward_coef else [self.enrich]

    def logprob_stages(self) -> list[Stage]:
        return [*super().logprob_stages(), self.compare]

    def needs_old_logprobs(self) -> bool:
        return self.settings.divergence == "sampled" or super().needs_old_logprobs()

    def teacher(self) -> Any:
        """Return the model that is imitated."""
        return self.ports.models["teacher"]

    def teacher_batch(self, batch: Batch, step: Step) -> Batch:
        """Return the rows as the teacher sees them: the same responses to the same prompts."""
        return batch

    def compare(self, batch: Batch, step: Step) -> Batch:
        """Add the teacher's log-probs of the sampled tokens, or of its own top tokens."""
        shown = self.teacher_batch(batch, step)
        if self.settings.divergence == "sampled":
            batch.tokens["teacher_logprobs"] = self.teacher().logprobs(shown)["logprobs"]
        else:
            top = self.teacher().top_logprobs(shown, self.settings.top_k)
            batch.tokens["teacher_top_ids"] = top["ids"]
            batch.tokens["teacher_top_logprobs"] = top["logprobs"]
        return batch

    def estimate(self, batch: Batch, step: Step) -> Batch:
        """Set `advantages`, unless the divergence alone is trained on."""
        settings = self.settings
        if settings.reward_coef:
            batch = super().estimate(batch, step)
            batch.tokens["advantages"] = settings.reward_coef * batch.tokens["advantages"]
        if settings.divergence == "sampled":
            mask = batch.tokens["loss_mask"]
            gaps = teacher_advantages(
                batch.tokens["old_logprobs"], batch.tokens["teacher_logprobs"], mask
            )
            step.metrics["distill/sampled"] = -float(gaps[mask].double().mean())
            advantages = batch.tokens.get("advantages", torch.zeros_like(gaps))
            batch.tokens["advantages"] = advantages + gaps
        return batch

    def update(self, batch: Batch, step: Step) -> Batch:
        batch = super().update(batch, step)
        # Tables of (tokens, top_k) are not written to the rollouts.
        for name in ("teacher_top_ids", "teacher_top_logprobs"):
            batch.tokens.pop(name, None)
        return batch

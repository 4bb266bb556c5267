"""BuPO (bottom-up policy optimization): GRPO on a policy inside the model, then on the full policy.

    phase 1, up to phase_one_steps    pi_internal = softmax(states after num_blocks blocks @ head)
    phase 2, the other steps          pi = softmax(states after all blocks @ head)

Blocks above `num_blocks` neither run nor change in phase 1. Sampling always uses the full policy.
Old, new and reference log-probs and the entropy bonus are those of the policy that is trained; the
engine's gap and its correction compare with the full policy. The phase depends on the step alone.

`lr_scale_above` and `lr_scale_below` are the paper's controls: layer-wise learning rates and frozen
blocks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from postgrad.config.schema import REQUIRED, setting
from postgrad.errors import Conflict, WrongValue
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.step import Stage, Step
from postgrad.methods.support.correction import correction_on, log_engine_gap
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.load.load import model_config
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import FULL, TokenOutputs, View, after
from postgrad.model.views import check_blocks
from postgrad.types import POLICY, Batch


@dataclass
class BupoSettings(GrpoSettings):
    """Which internal policy, and for how many steps."""

    num_blocks: int = setting(
        REQUIRED,
        "blocks of the internal policy, from 1 to all (the original's internal_layer plus one)",
        at_least=1,
    )
    phase_one_steps: int = setting(
        30, "steps that train the internal policy; 0 is GRPO, training.steps is all", at_least=0
    )
    internal_norm: str = setting(
        "none",
        "norm between the internal states and the head; final is the logit lens",
        choices=("none", "final"),
        only_with="method.phase_one_steps",
    )
    lr_scale_above: float = setting(
        1.0,
        "learning rate factor of the blocks above num_blocks; 0: frozen",
        at_least=0.0,
        at_most=100.0,
    )
    lr_scale_below: float = setting(
        1.0, "learning rate factor of blocks 1..num_blocks; 0: frozen", at_least=0.0, at_most=100.0
    )


class BupoObjective(PolicyObjective):
    """GRPO's objective on another view of the model."""

    def view(self, step: int) -> View:
        """Return the internal policy in phase 1, the full policy afterwards."""
        if step > self.settings.phase_one_steps:
            return FULL
        return after(self.settings.num_blocks, self.settings.internal_norm)

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        """Return GRPO's loss; in phase 1 also log the entropy of the internal policy."""
        if is_phase_one(batch):
            metrics.mean("internal/entropy", current.entropy, batch.tokens["loss_mask"])
        return super().loss(batch, current, metrics)

    def log_gap(self, batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> None:
        """In phase 1 log how far the internal policy is from the full one instead.

        internal/divergence is the mean of log pi - log pi_internal over sampled tokens: the k1
        estimate of KL(full, internal).
        """
        if not is_phase_one(batch):
            return super().log_gap(batch, logprobs, metrics)
        name = "full_logprobs" if "full_logprobs" in batch.tokens else "behavior_logprobs"
        divergence = batch.tokens[name] - logprobs.detach()
        metrics.mean("internal/divergence", divergence, batch.tokens["token_source"] == POLICY)

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        """Return the factors of blocks by their number. The final norm counts as a block above.

        Embeddings, the head and what reads pictures are absent: their factor is 1.
        """
        scales: dict[str, float] = {}
        beside_tower = [name for name in names if re.search(r"\b(language|text)_model\.", name)]
        for name in beside_tower or names:
            block = re.search(r"\blayers\.(\d+)\.", name)
            if block and int(block[1]) < self.settings.num_blocks:
                scales[name] = self.settings.lr_scale_below
            elif block or re.search(r"(^|\.)norm\.", name):
                scales[name] = self.settings.lr_scale_above
        return scales

    def check_model(self, model: Any) -> None:
        """Raise ConfigError for more blocks than the model has, or blocks without a policy."""
        num_blocks = self.settings.num_blocks
        num_layers = model.config.get_text_config().num_hidden_layers
        if num_blocks > num_layers:
            raise WrongValue(
                f"method.num_blocks={num_blocks} is out of range; "
                f"{self.config.model.path} has blocks 1..{num_layers}"
            )
        check_blocks(model, after(num_blocks, self.settings.internal_norm))


class Bupo(Grpo):
    """GRPO with one stage more, which records the phase."""

    Settings = BupoSettings
    Objective = BupoObjective
    # An internal policy keeps other tokens than the full one that sampled.
    traits = replace(Grpo.traits, truncated_sampling=False)

    def logprob_stages(self) -> list[Stage]:
        """Measure first: the other stages read the columns."""
        return [self.measure, *super().logprob_stages()]

    def measure(self, batch: Batch, step: Step) -> Batch:
        """Record the phase; in phase 1 also compare the engine with the full policy.

        An engine with its own weights is compared at every step. One with the trainer's weights is
        compared at the first step only, so that the guard detects a broken engine at once. After
        that no block above runs until phase 2.
        """
        phase = 2 if self.objective.view(step.number) == FULL else 1
        batch.rows["phase"] = [phase] * len(batch)  # a column, because the loss runs in a worker
        metrics = MetricAccumulator()
        sampled = batch.tokens["token_source"] == POLICY
        metrics.mean("full/entropy", -batch.tokens["behavior_logprobs"], sampled)
        has_to_compare = step.number == 1 or correction_on(self.settings, self.ports.engine)
        if phase == 1 and has_to_compare:
            batch.tokens["full_logprobs"] = self.ports.policy.logprobs(batch)["logprobs"]
            log_engine_gap(batch, batch.tokens["full_logprobs"], metrics)
        blocks_run = 1.0 if phase == 2 else self.settings.num_blocks / self.num_layers
        step.metrics |= {"phase": float(phase), "blocks_run": blocks_run, **metrics.result()}
        return batch

    def correct(self, batch: Batch, step: Step) -> Batch:
        """Correct by the full policy's log-probs: the engine samples from the full policy."""
        if "full_logprobs" not in batch.tokens:
            return super().correct(batch, step)
        trained_logprobs = batch.tokens["old_logprobs"]
        batch.tokens["old_logprobs"] = batch.tokens["full_logprobs"]
        batch = super().correct(batch, step)
        batch.tokens["old_logprobs"] = trained_logprobs
        return batch

    @cached_property
    def num_layers(self) -> int:
        """Return the number of blocks of the model, from its config.json."""
        config = model_config(self.config.model, self.config.seed)
        return int(config.get_text_config().num_hidden_layers)

    def check(self) -> None:
        """Raise ConfigError for a first phase longer than the run, or one of frozen blocks."""
        super().check()
        settings = self.settings
        phase_one, steps = settings.phase_one_steps, self.config.training.steps
        if phase_one > steps:
            raise Conflict(
                f"method.phase_one_steps={phase_one} exceeds training.steps={steps}; "
                f"lower it, or set it to {steps} to train the internal policy only"
            )
        if phase_one and settings.correction == "bypass":
            raise Conflict(
                "method.correction=bypass compares the trained policy with the engine, and phase 1 "
                "trains an internal policy; remove it, or add method.phase_one_steps=0"
            )
        if phase_one and settings.lr_scale_below == 0.0:
            raise Conflict(
                "method.lr_scale_below=0 freezes the blocks that phase 1 trains; "
                "add method.phase_one_steps=0"
            )


def is_phase_one(batch: Batch) -> bool:
    """Return whether the batch trains the internal policy."""
    return "phase" in batch.rows and batch.rows["phase"][0] == 1

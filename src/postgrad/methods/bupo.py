"""BuPO (bottom-up policy optimization): GRPO on a policy inside the model, then on the full policy.

Steps 1..phase_one_steps train the internal policy after `num_blocks` blocks, softmax(states @
head). The blocks above neither run nor change. Sampling always uses the full policy. Old, new and
reference log-probs and the entropy bonus are those of the policy being trained; the engine's gap
and its correction compare with the full policy. The phase depends on the step number alone.

`lr_scale_above` and `lr_scale_below` are the paper's controls: layer-wise learning rates and frozen
blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from postgrad.config.schema import REQUIRED, setting
from postgrad.methods.base import Stage, Step
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.support import bupo_checks
from postgrad.methods.support.block_scales import scales_by_block
from postgrad.methods.support.correction import correction_on, log_engine_gap
from postgrad.model.load import model_config
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.port import FULL, TokenOutputs, View, after
from postgrad.types import POLICY, Batch


@dataclass
class BupoSettings(GrpoSettings):
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


class Bupo(Grpo):
    Settings = BupoSettings
    supports_truncated_sampling = False  # internal policies keep other tokens than the full one

    def check(self) -> None:
        super().check()
        bupo_checks.check(self)

    def check_unread(self) -> None:
        super().check_unread()
        bupo_checks.check_unread(self.settings)

    def check_model(self, model: Any) -> None:
        bupo_checks.check_model(self, model)

    @cached_property
    def num_layers(self) -> int:
        config = model_config(self.config.model, self.config.seed)
        return int(config.get_text_config().num_hidden_layers)

    # ---- stages, on the driver

    def stages(self) -> list[Stage]:
        """`measure` runs before the first stage that reads its columns."""
        stages = super().stages()
        readers = (
            self.compute_old_logprobs,
            self.compute_reference_logprobs,
            self.correct,
            self.estimate,
        )
        first = min(stages.index(reader) for reader in readers if reader in stages)
        stages.insert(first, self.measure)
        return stages

    def measure(self, batch: Batch, step: Step) -> Batch:
        """Records the phase; in phase 1 also compares the engine with the full policy.

        An engine with its own weights is compared at every step. One with the trainer's weights is
        compared at the first step only, so that the guard detects a broken engine at once. After
        that no block above runs until phase 2.
        """
        view = self.view(step.number)
        phase = 2 if view == FULL else 1
        batch.rows["phase"] = [phase] * len(batch)
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
        """Corrects by the full policy's log-probs: the engine samples from the full policy."""
        if "full_logprobs" not in batch.tokens:
            return super().correct(batch, step)
        trained_logprobs = batch.tokens["old_logprobs"]
        batch.tokens["old_logprobs"] = batch.tokens["full_logprobs"]
        batch = super().correct(batch, step)
        batch.tokens["old_logprobs"] = trained_logprobs
        return batch

    # ---- beside the model; log_gap runs on both sides

    def view(self, step: int) -> View:
        if step > self.settings.phase_one_steps:
            return FULL
        return after(self.settings.num_blocks, self.settings.internal_norm)

    def log_gap(self, batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> None:
        """In phase 1 logs the divergence of the internal policy from the full one instead.

        internal/divergence is the mean of log pi - log pi_internal over sampled tokens: the k1
        estimate of KL(full, internal).
        """
        if not _is_phase_one(batch):
            return super().log_gap(batch, logprobs, metrics)
        name = "full_logprobs" if "full_logprobs" in batch.tokens else "behavior_logprobs"
        divergence = batch.tokens[name] - logprobs.detach()
        metrics.mean("internal/divergence", divergence, batch.tokens["token_source"] == POLICY)

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        if _is_phase_one(batch):
            metrics.mean("internal/entropy", current.entropy, batch.tokens["loss_mask"])
        return super().loss(batch, current, metrics)

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        """Factors of blocks by their number. The final norm counts as a block above."""
        settings = self.settings
        return scales_by_block(
            names, settings.num_blocks, settings.lr_scale_below, settings.lr_scale_above
        )


def _is_phase_one(batch: Batch) -> bool:
    """Whether the batch trains the internal policy. `measure` sets it, so that workers know it."""
    return "phase" in batch.rows and batch.rows["phase"][0] == 1

"""A user's own method, kept outside the package: BuPO as it stands in postgrad/methods/bupo.py, under other names.

Steps 1..phase_one_steps train the internal policy after `num_blocks` blocks, softmax(states @ head): the blocks above do not run and do
not move. Sampling is always the full policy's. Old and new log-probs, the reference's and the entropy bonus all mean the policy being
trained; what concerns the engine (its gap, the correction of one apart) is held against the full policy. The phase follows from the step
alone. `lr_scale_above` and `lr_scale_below` are the controls: layer-wise learning rates and frozen blocks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omegaconf import MISSING
from torch import Tensor

from postgrad.config.schema import setting
from postgrad.errors import ConfigError
from postgrad.methods.base import Stage, Step
from postgrad.methods.grpo import Grpo, GrpoSettings
from postgrad.methods.support.checks import refuse_unread
from postgrad.methods.support.correction import correction_on, log_engine_gap
from postgrad.model.load import model_config
from postgrad.model.passes.head import TokenOutputs
from postgrad.model.policy import MetricAccumulator
from postgrad.model.views import FULL, View, after, check_blocks
from postgrad.types import POLICY, Batch


@dataclass
class MineSettings(GrpoSettings):
    num_blocks: int = setting(
        MISSING,
        "blocks of the internal policy, 1 to all (the original's internal_layer plus one)",
        at_least=1,
    )
    phase_one_steps: int = setting(
        30,
        "steps that train the internal policy; 0 is GRPO, training.steps never trains the full one",
        at_least=0,
    )
    internal_norm: str = setting(
        "none",
        "norm between the internal states and the head; final is the logit lens",
        choices=("none", "final"),
    )
    lr_scale_above: float = setting(
        1.0,
        "share of the learning rate, in the whole run, above num_blocks; 0: frozen",
        at_least=0.0,
    )
    lr_scale_below: float = setting(
        1.0,
        "share of the learning rate, in the whole run, of blocks 1..num_blocks; 0: frozen",
        at_least=0.0,
    )


class Mine(Grpo):
    Settings = MineSettings

    def check(self) -> None:
        super().check()
        settings, steps = self.settings, self.config.training.steps
        if settings.phase_one_steps > steps:
            raise ConfigError(
                f"method.phase_one_steps={settings.phase_one_steps} exceeds training.steps={steps}; "
                f"lower it, or set it to {steps} to train the internal policy only"
            )
        if settings.phase_one_steps and settings.lr_scale_below == 0.0:
            raise ConfigError(
                "method.lr_scale_below=0 freezes the blocks that phase 1 trains; add method.phase_one_steps=0"
            )

    def check_used(self) -> None:
        super().check_used()
        if not self.settings.phase_one_steps:
            refuse_unread(
                "method", self.settings, ["internal_norm"], "with method.phase_one_steps=0"
            )

    def check_model(self, model: Any) -> None:
        wanted, there = self.settings.num_blocks, model.config.get_text_config().num_hidden_layers
        if wanted > there:
            raise ConfigError(
                f"method.num_blocks={wanted} is out of range; {self.config.model.path} has blocks 1..{there}"
            )
        check_blocks(model, after(wanted, self.settings.internal_norm))

    @cached_property
    def num_layers(self) -> int:
        return int(
            model_config(self.config.model, self.config.seed).get_text_config().num_hidden_layers
        )

    # ---- on the driver

    def stages(self) -> list[Stage]:
        stages = super().stages()
        readers = (
            self.compute_old_logprobs,
            self.compute_reference_logprobs,
            self.correct,
            self.estimate,
        )
        stages.insert(
            min(stages.index(reader) for reader in readers if reader in stages), self.measure
        )
        return stages

    def measure(self, batch: Batch, step: Step) -> Batch:
        """Say which policy is trained, and in phase 1 look at the full one where the engine may have left it.

        An engine with weights of its own is corrected at every step. One that shares the trainer's is looked at once, at the first step,
        so that the guard sees a broken one at once; after that no block above runs until phase 2.
        """
        view = self.view(step.number)
        batch.rows["phase"] = [2 if view == FULL else 1] * len(batch)
        sampled = batch.tokens["token_source"] == POLICY
        metrics = MetricAccumulator()
        metrics.mean(
            "full/entropy", -batch.tokens["behavior_logprobs"], sampled
        )  # estimated from the tokens that were sampled
        if view != FULL and (step.number == 1 or correction_on(self.settings, self.ports.engine)):
            batch.tokens["full_logprobs"] = self.ports.policy.logprobs(batch)["logprobs"]
            log_engine_gap(batch, batch.tokens["full_logprobs"], metrics)
        depth = 1.0 if view == FULL else self.settings.num_blocks / self.num_layers
        step.metrics |= {
            "phase": float(batch.rows["phase"][0]),
            "blocks_run": depth,
            **metrics.result(),
        }
        return batch

    def correct(self, batch: Batch, step: Step) -> Batch:
        """The engine samples from the full policy, so the full policy's log-probs say how far it is off, whichever policy is trained."""
        if "full_logprobs" not in batch.tokens:
            return super().correct(batch, step)
        trained, batch.tokens["old_logprobs"] = (
            batch.tokens["old_logprobs"],
            batch.tokens["full_logprobs"],
        )
        batch = super().correct(batch, step)
        batch.tokens["old_logprobs"] = trained
        return batch

    # ---- beside the model, but for log_gap, which both sides use

    def view(self, step: int) -> View:
        settings = self.settings
        return (
            after(settings.num_blocks, settings.internal_norm)
            if step <= settings.phase_one_steps
            else FULL
        )

    def log_gap(self, batch: Batch, logprobs: Tensor, metrics: MetricAccumulator) -> None:
        """In phase 1 the distance to the sampler is not the engine's fault but the divergence of the internal from the full policy.

        internal/divergence is the mean of log pi - log pi_internal over sampled tokens: the k1 estimate of KL(full, internal).
        """
        if not _internal(batch):
            return super().log_gap(batch, logprobs, metrics)
        full = batch.tokens[
            "full_logprobs" if "full_logprobs" in batch.tokens else "behavior_logprobs"
        ]
        metrics.mean(
            "internal/divergence", full - logprobs.detach(), batch.tokens["token_source"] == POLICY
        )

    def loss(self, batch: Batch, current: TokenOutputs, metrics: MetricAccumulator) -> Tensor:
        if _internal(batch):
            metrics.mean("internal/entropy", current.entropy, batch.tokens["loss_mask"])
        return super().loss(batch, current, metrics)

    def lr_scales(self, names: Sequence[str]) -> dict[str, float]:
        """Blocks by their number; the final norm lies above unless the internal policy is the whole model."""
        settings, out = self.settings, {}
        for name in names:
            block = re.search(r"\blayers\.(\d+)\.", name)
            if block:
                out[name] = (
                    settings.lr_scale_below
                    if int(block[1]) < settings.num_blocks
                    else settings.lr_scale_above
                )
            elif re.search(r"(^|\.)norm\.", name):
                out[name] = settings.lr_scale_above
        return out


def _internal(batch: Batch) -> bool:
    """Whether the batch trains the internal policy; `measure` wrote it into the rows, so that a worker elsewhere knows too."""
    return "phase" in batch.rows and batch.rows["phase"][0] == 1

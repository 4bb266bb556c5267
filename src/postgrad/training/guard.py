"""Notices a run that cannot learn, and says why."""

from postgrad.config.schema import Config
from postgrad.errors import RunError
from postgrad.methods.base import Step
from postgrad.types import Batch

MAX_ENGINE_GAP = (
    0.2  # mean |log-prob| gap in nats; a healthy engine stays below 0.05 even in bfloat16
)


class Guard:
    """Watches each step; `flat_steps` is in the checkpoint."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.flat_steps = 0

    def check(self, step: Step, batch: Batch) -> None:
        """Raise RunError when the run has stopped making sense."""
        gap, stale = (
            step.metrics.get("engine/gap_mean", 0.0),
            step.metrics.get("rollout/staleness", 0.0),
        )
        if (
            gap > MAX_ENGINE_GAP and not stale
        ):  # older weights are apart without anything being broken
            raise RunError(
                f"step {step.number}: the engine's log-probs are {gap:.2g} nats from the trainer's on average (limit {MAX_ENGINE_GAP}); "
                "the engine does not sample from the policy that is trained"
            )
        if "advantages" not in batch.tokens:
            return
        flat = step.metrics["advantages/rows_with_signal"] == 0.0
        self.flat_steps = self.flat_steps + 1 if flat else 0
        if self.flat_steps >= self.config.training.max_flat_steps:
            reward = step.metrics.get("reward/mean", float("nan"))
            raise RunError(
                f"no learning signal for {self.flat_steps} steps: within every group all rewards were equal (mean reward {reward:.3g}); "
                "the problems are too hard, too easy, or the verifier never sees an answer: look at rollouts/, "
                "show the model answers first (warmup.recipe=sft), or raise training.max_flat_steps"
            )

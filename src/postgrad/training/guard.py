"""Stops a run that cannot learn, and says why; notes responses without a score."""

from collections.abc import Callable

from postgrad.config.schema import Config
from postgrad.errors import RunError
from postgrad.methods.method import Step
from postgrad.types import Batch

# Mean |log-prob gap| in nats; a healthy engine stays below 0.05 even in bfloat16.
MAX_ENGINE_GAP = 0.2


class Guard:
    """Checks each step. `flat_steps`, the steps without signal in a row, is in the checkpoint."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        self.config = config
        self.note = note
        self.flat_steps = 0
        self.noted_failures = False

    def check(self, step: Step, batch: Batch) -> None:
        """Raise RunError if the engine samples from another policy, or if nothing is learned.

        Notes the first step with responses that could not be scored.
        """
        if step.failed and not self.noted_failures:
            self._note_failures(step, batch)
        self._check_engine(step)
        if "advantages" in batch.tokens:
            self._check_signal(step)

    def _note_failures(self, step: Step, batch: Batch) -> None:
        self.noted_failures = True
        num_failed = sum(map(len, step.failed))
        num_rows = num_failed + len(batch) + step.num_left_out
        self.note(
            f"warning: step {step.number}: {num_failed} of {num_rows} responses could not be "
            f"scored; the first: {step.failed[0].rows['failure'][0]} (reward/failures counts them)"
        )

    def _check_engine(self, step: Step) -> None:
        if step.metrics.get("rollout/staleness") or step.metrics.get("staleness/max"):
            return  # rollouts of older weights differ although nothing is broken
        gap = step.metrics.get("engine/gap_mean", 0.0)
        if gap > MAX_ENGINE_GAP:
            raise RunError(
                f"step {step.number}: the engine's log-probs are {gap:.2g} nats from the "
                f"trainer's on average (limit {MAX_ENGINE_GAP}); "
                "the engine does not sample from the policy that is trained"
            )

    def _check_signal(self, step: Step) -> None:
        if step.metrics["advantages/rows_with_signal"] != 0.0:
            self.flat_steps = 0
            return
        self.flat_steps += 1
        if self.flat_steps >= self.config.training.max_flat_steps:
            reward = step.metrics.get("reward/mean")
            if reward is None:
                raise RunError(
                    f"no learning signal for {self.flat_steps} steps: every advantage was 0, as "
                    "with a teacher that equals the policy; raise training.max_flat_steps to go on"
                )
            raise RunError(
                f"no learning signal for {self.flat_steps} steps: in every group all rewards were "
                f"equal (mean reward {reward:.3g}); the problems are too hard or too easy, or the "
                "verifier finds no answers: look at rollouts/, fine-tune first "
                "(warmup.recipe=sft), or raise training.max_flat_steps"
            )

"""Three checks of a run: does it learn, does the engine sample from the trained policy, and does
the accuracy rise with the reward?"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, variance

from torch import Tensor

from postgrad import phases
from postgrad.config.schema import Config
from postgrad.errors import RunError
from postgrad.methods.ports import Ports
from postgrad.methods.step import Step
from postgrad.problem import Problem
from postgrad.rollout.engine import Completion, Request, Sampling, trajectory_seed
from postgrad.types import Batch, Trajectory

# Mean |log-prob gap| in nats; a healthy engine stays below 0.05 even in bfloat16.
MAX_ENGINE_GAP = 0.2


class Guard:
    """Stops a run that cannot learn. `flat_steps`, the steps without signal in a row, is saved."""

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
            why = (
                "every advantage was 0, as with a teacher that equals the policy; raise "
                "training.max_flat_steps to go on"
            )
            if reward is not None:
                why = (
                    f"in every group all rewards were equal (mean reward {reward:.3g}); the "
                    "problems are too hard or too easy, or the verifier finds no answers: look at "
                    "rollouts/, fine-tune first (warmup.recipe=sft), or raise "
                    "training.max_flat_steps"
                )
            raise RunError(f"no learning signal for {self.flat_steps} steps: {why}")


# ---- before the first step: does the engine sample from the policy that is trained?

NUM_PROBLEMS = 4
NUM_SAMPLES = 2  # per problem
MAX_TOKENS = 32  # per sample
# Limits of the mean |log-prob gap| in nats. vLLM on a CPU has 7e-7 and 0.04.
MAX_GAP = {"float32": 0.01, "bfloat16": 0.1}


GAP_MEAN = "engine/start_gap_mean"
GAP_MAX = "engine/start_gap_max"


def check_engine_gap(config: Config, ports: Ports, problems: Sequence[Problem]) -> dict[str, float]:
    """Return the gap of the engine's log-probs as metrics; none if it shares the trainer's weights.

    An engine with its own copy samples twice. First with the sign of one block's weights changed:
    the samples must differ. Then with the policy's weights: the log-probs must be close.
    Raises RunError if new weights do not reach the engine, or if the gap is above its limit.
    """
    if ports.engine.shares_weights:
        return {}
    problems = problems[:NUM_PROBLEMS]
    requests: list[Request] = []
    for problem in problems:
        uid = f"{problem.uid}/agreement"
        seeds = [trajectory_seed(config.seed, 0, uid, index) for index in range(NUM_SAMPLES)]
        prompt = ports.encoder.prompt(problem)
        requests.append(Request(prompt, seeds, images=problem.prompt_images))
    max_tokens = min(MAX_TOKENS, config.rollout.max_response_tokens)
    sampling = Sampling(config.rollout.temperature, max_tokens)
    weights = ports.policy.weights()
    ports.engine.publish(_with_last_block_negated(weights))
    from_other_weights = ports.engine.generate(requests, sampling)
    ports.engine.publish(weights)
    phases.begin("comparing the engine's log-probs with the trainer's")
    completions = ports.engine.generate(requests, sampling)
    if _rounded(completions) == _rounded(from_other_weights):
        raise RunError(
            f"rollout.engine={config.rollout.engine} does not take new weights: its samples stay "
            "the same when one block's weights change, so training would use old weights"
        )
    batch = _batch_of(problems, requests, completions)
    gaps = batch.tokens["behavior_logprobs"] - ports.policy.logprobs(batch)["logprobs"]  # (tokens,)
    limit = config.rollout.max_logprob_difference or MAX_GAP[config.model.dtype]
    mean = float(gaps.abs().mean())
    if not mean <= limit:  # also true for nan
        raise RunError(
            f"rollout.engine={config.rollout.engine}: its log-probs differ from the trainer's by "
            f"{mean:.2g} nats on average (limit {limit:g}, rollout.max_logprob_difference); it has "
            "another model or data type, or returns log-probs of another temperature (start vLLM's "
            "server with --logprobs-mode processed_logprobs)"
        )
    return {GAP_MEAN: mean, GAP_MAX: float(gaps.abs().max())}


def _batch_of(
    problems: Sequence[Problem],
    requests: Sequence[Request],
    completions: Sequence[Sequence[Completion]],
) -> Batch:
    rows: list[Trajectory] = []
    for group, samples in enumerate(completions):
        for index, sample in enumerate(samples):
            row = Trajectory(
                problems[group].uid,
                requests[group].prompt,
                sample.tokens,
                group,
                index,
                finish=sample.finish,
                behavior_logprobs=sample.logprobs,
                images=requests[group].images,
            )
            rows.append(row)
    return Batch.of(rows)


def _rounded(
    completions: Sequence[Sequence[Completion]],
) -> list[tuple[list[int], list[float]]]:
    """Return (tokens, log-probs rounded to 4 digits) of every sample."""
    samples = [sample for group in completions for sample in group]
    return [(s.tokens, [round(logprob, 4) for logprob in s.logprobs]) for s in samples]


def _with_last_block_negated(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the last block's matrices negated; without blocks, all matrices.

    Only these matrices are read: the weights may be parts in Ray's object store.
    """
    block_of: dict[str, int] = {}
    for name in weights:
        if found := re.search(r"\.(\d+)\.", name):
            block_of[name] = int(found[1])
    last = max(block_of.values(), default=-1)
    negated: dict[str, Tensor] = {}
    for name in weights:
        if block_of.get(name, -1) == last and weights[name].dim() == 2:
            negated[name] = -weights[name]
    return weights | negated


# ---- at each validation: does the accuracy rise with the training reward?

INTERVALS = 3  # between validations, that a comparison looks back
MIN_STEPS = 4  # training steps per interval; with fewer there is no estimate of the noise
MIN_T = 4.0  # Welch's t of the rise of the training reward
MIN_ERRORS = 2.0  # smallest rise of the reward, in standard errors of the change of accuracy

REWARD = "reward/mean"
ACCURACY = "validation/accuracy"
ANSWER = "validation/part/"  # and a name that ends in "answer": accuracy if the reward has terms


class RewardWatch:
    """Warns if the training reward rises and the validation accuracy does not.

    That is how a reward looks that the policy has learned to cheat, or training problems that it
    has learned by heart. A resumed run warns as one that was never stopped.

    Args:
        num_answers: responses per validation, for the standard error of its accuracy.
        lines: metrics.jsonl so far.
    """

    def __init__(self, num_answers: int, lines: Iterable[Mapping[str, float]]) -> None:
        self.num_answers = num_answers
        self.rewards: list[tuple[int, float]] = []  # (step, mean training reward)
        self.accuracies: list[tuple[int, float]] = []  # (step, validation accuracy)
        self.warned = False
        for line in lines:
            self.add_step(line)
            self.add_validation(int(line["step"]), line)

    def add_step(self, metrics: Mapping[str, float]) -> None:
        """Keep the training reward of a step."""
        if REWARD in metrics:
            self.rewards.append((int(metrics["step"]), metrics[REWARD]))

    def add_validation(
        self, step: int, metrics: Mapping[str, float]
    ) -> tuple[dict[str, float], str]:
        """Return the rises over the last INTERVALS validations as metrics, and a warning or "".

        A warning is given once, until the accuracy rises again. There are no metrics before
        INTERVALS + 1 validations, or with fewer than MIN_STEPS steps between two of them.
        """
        accuracy = answer_accuracy(metrics)
        if accuracy is None:
            return {}, ""
        self.accuracies.append((step, accuracy))
        if len(self.accuracies) <= INTERVALS:
            return {}, ""
        (start, before), (second, _), *_, (last_start, _), _ = self.accuracies[-INTERVALS - 1 :]
        first = self._rewards_between(start, second)
        last = self._rewards_between(last_start, step)
        if min(len(first), len(last)) < MIN_STEPS:
            return {}, ""
        rise = fmean(last) - fmean(first)
        suspicious = is_suspicious(first, last, before, accuracy, self.num_answers)
        text = ""
        if suspicious and not self.warned:
            text = (
                f"since step {start} the training reward rose by {rise:.3g} and the validation "
                f"accuracy did not ({before:.3f}, now {accuracy:.3f}); the policy may cheat the "
                "reward or repeat training problems: read the rollouts of this step"
            )
        self.warned = suspicious
        rises = {"watch/reward_rise": rise, "watch/accuracy_rise": accuracy - before}
        return rises | {"watch/suspicious": float(suspicious)}, text

    def _rewards_between(self, start: int, end: int) -> list[float]:
        return [reward for step, reward in self.rewards if start < step <= end]


def answer_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Return the share of right answers of a validation; without that part, its mean score."""
    parts = [name for name in metrics if name.startswith(ANSWER) and name.endswith("answer")]
    return metrics[parts[0]] if len(parts) == 1 else metrics.get(ACCURACY)


def is_suspicious(
    first: Sequence[float], last: Sequence[float], before: float, after: float, num_answers: int
) -> bool:
    """Return whether rewards rose from `first` to `last` while the accuracy did not rise at all.

    The rise must be larger than the noise of the steps, and so large that the same rise of the
    accuracy could hardly be missed with this many answers.
    """
    if after > before:
        return False
    rise = fmean(last) - fmean(first)
    step_error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
    variances = sum(max(0.0, share * (1 - share)) for share in (before, after))
    accuracy_error = math.sqrt(variances / num_answers)
    return rise > 0 and rise >= MIN_T * step_error and rise >= MIN_ERRORS * accuracy_error

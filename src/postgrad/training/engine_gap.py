"""Before the first step: does the engine sample from the policy that is trained?

Engines with weights of their own are asked twice: once with one block's weights turned round, to see that weights reach them at all, and
once with the policy's own, which the trainer then prices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from postgrad.config.schema import Config
from postgrad.errors import RunError
from postgrad.methods.base import Ports
from postgrad.rollout.engine import Completion, Request, Sampling, trajectory_seed
from postgrad.training.log import RunLog
from postgrad.training.report import Reporter
from postgrad.types import Batch, Problem, Trajectory

PROBLEMS, SAMPLES, TOKENS = 4, 2, 32
MAX_GAP = {
    "float32": 0.01,
    "bfloat16": 0.1,
}  # mean |log-prob| gap in nats; vLLM on a CPU has 7e-7 and 0.04


@dataclass(frozen=True)
class Agreement:
    """How far the engine's log-probs are from the trainer's on sampled tokens, in nats."""

    mean: float
    largest: float
    bound: float

    def __str__(self) -> str:
        return (
            f"engine and trainer agree: log-probs {self.mean:.2g} nats apart on average, {self.largest:.2g} at most "
            f"(bound of the mean: {self.bound:g})"
        )


def agree(
    config: Config,
    ports: Ports,
    problems: Sequence[Problem],
    reporter: Reporter,
    log: RunLog | None,
) -> None:
    """Check, and say what was found; a new run's log keeps it."""
    if (found := check_agreement(config, ports, problems)) is not None:
        reporter.note(str(found))
        if log is not None:
            log.write(
                0, {"engine/start_gap_mean": found.mean, "engine/start_gap_max": found.largest}
            )


def check_agreement(config: Config, ports: Ports, problems: Sequence[Problem]) -> Agreement | None:
    """Raises RunError when weights do not reach the engine, or its log-probs are not the trainer's. None where it shares the weights."""
    if ports.engine.shares_weights:
        return None
    chosen = problems[:PROBLEMS]
    requests = [
        Request(
            ports.prompts.encode(p),
            [trajectory_seed(config.seed, 0, f"{p.uid}/agreement", i) for i in range(SAMPLES)],
        )
        for p in chosen
    ]
    sampling = Sampling(config.rollout.temperature, min(TOKENS, config.rollout.max_response_tokens))
    weights = ports.policy.weights()
    ports.engine.publish(_turned(weights))
    other = ports.engine.generate(requests, sampling)
    ports.engine.publish(weights)
    done = ports.engine.generate(requests, sampling)
    if _told(done) == _told(other):
        raise RunError(
            f"rollout.engine={config.rollout.engine} does not take new weights: what it samples is the same with one block's weights "
            "turned round; training would go on with old ones"
        )
    found = _gap(config, ports, chosen, requests, done)
    if not found.mean <= found.bound:
        raise RunError(
            f"rollout.engine={config.rollout.engine}: its log-probs are {found.mean:.2g} nats from the trainer's on average "
            f"(bound {found.bound:g}, rollout.max_gap); it has another model, another type, or log-probs of another temperature "
            "(vLLM's server needs --logprobs-mode processed_logprobs)"
        )
    return found


def _gap(
    config: Config,
    ports: Ports,
    problems: Sequence[Problem],
    requests: Sequence[Request],
    done: Sequence[Sequence[Completion]],
) -> Agreement:
    rows = [
        Trajectory(
            problem.uid,
            request.prompt,
            one.tokens,
            group,
            index,
            finish=one.finish,
            behavior_logprobs=one.logprobs,
        )
        for group, (problem, request, completions) in enumerate(
            zip(problems, requests, done, strict=True)
        )
        for index, one in enumerate(completions)
    ]
    batch = Batch.of(rows)
    gap = (batch.tokens["behavior_logprobs"] - ports.policy.logprobs(batch)["logprobs"]).abs()
    bound = config.rollout.max_gap or MAX_GAP[config.model.dtype]
    return Agreement(float(gap.mean()), float(gap.max()), bound)


def _told(done: Sequence[Sequence[Completion]]) -> list[tuple[list[int], list[float]]]:
    return [(one.tokens, [round(p, 4) for p in one.logprobs]) for group in done for one in group]


def _turned(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the sign of the last block's matrices changed; without blocks, of every matrix."""
    number = {name: int(found[1]) for name in weights if (found := re.search(r"\.(\d+)\.", name))}
    last = max(number.values(), default=-1)
    return {
        name: -tensor if tensor.dim() == 2 and number.get(name, -1) == last else tensor
        for name, tensor in weights.items()
    }

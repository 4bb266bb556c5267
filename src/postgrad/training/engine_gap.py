"""The check before the first step: does the engine sample from the policy that is trained?

Engines with their own copy of the weights sample twice. First with the sign of one block's
weights changed: the samples must differ, or new weights do not reach the engine. Then with the
policy's weights: the engine's log-probs must be close to the trainer's.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from postgrad import phases
from postgrad.config.schema import Config
from postgrad.errors import RunError
from postgrad.methods.method import Ports
from postgrad.rollout.engine import Completion, Request, Sampling, trajectory_seed
from postgrad.types import Batch, Problem, Trajectory

NUM_PROBLEMS = 4
NUM_SAMPLES = 2  # per problem
MAX_TOKENS = 32  # per sample

# Limits of the mean |log-prob gap| in nats. vLLM on a CPU has 7e-7 and 0.04.
MAX_GAP = {"float32": 0.01, "bfloat16": 0.1}


@dataclass(frozen=True)
class EngineGap:
    """Distance of the engine's log-probs from the trainer's on sampled tokens, in nats."""

    mean: float
    largest: float
    limit: float  # of the mean

    def __str__(self) -> str:
        return (
            f"engine and trainer agree: their log-probs differ by {self.mean:.2g} nats on average "
            f"(limit {self.limit:g}), by {self.largest:.2g} at most"
        )

    def metrics(self) -> dict[str, float]:
        return {"engine/start_gap_mean": self.mean, "engine/start_gap_max": self.largest}


def check_engine_gap(config: Config, ports: Ports, problems: Sequence[Problem]) -> EngineGap | None:
    """Return the gap of the engine's log-probs; None if the engine shares the trainer's weights.

    Raises RunError if new weights do not reach the engine, or if the gap is above its limit.
    """
    if ports.engine.shares_weights:
        return None
    problems = problems[:NUM_PROBLEMS]
    requests = [_request(config, ports, problem) for problem in problems]
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
    gap = _measure_gap(config, ports, problems, requests, completions)
    if not gap.mean <= gap.limit:  # also true for nan
        raise RunError(
            f"rollout.engine={config.rollout.engine}: its log-probs differ from the trainer's by "
            f"{gap.mean:.2g} nats on average (limit {gap.limit:g}, rollout.max_gap); it has "
            "another model or data type, or returns log-probs of another temperature "
            "(start vLLM's server with --logprobs-mode processed_logprobs)"
        )
    return gap


def _request(config: Config, ports: Ports, problem: Problem) -> Request:
    uid = f"{problem.uid}/agreement"
    seeds = [trajectory_seed(config.seed, 0, uid, index) for index in range(NUM_SAMPLES)]
    return Request(ports.encoder.prompt(problem), seeds)


def _measure_gap(
    config: Config,
    ports: Ports,
    problems: Sequence[Problem],
    requests: Sequence[Request],
    completions: Sequence[Sequence[Completion]],
) -> EngineGap:
    """Compare the engine's log-probs of its samples with the policy's."""
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
            )
            rows.append(row)
    batch = Batch.of(rows)
    logprobs = ports.policy.logprobs(batch)["logprobs"]
    gap = (batch.tokens["behavior_logprobs"] - logprobs).abs()  # (tokens,)
    limit = config.rollout.max_gap or MAX_GAP[config.model.dtype]
    return EngineGap(float(gap.mean()), float(gap.max()), limit)


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

"""Real steps of a run, short ones first: how long its steps take on this machine.

They run as `postgrad train` does, with the model's weights and shorter responses; their folder is
temporary. First steps have few problems: they warm up and show how large the last may be. A decode
step of many rows takes little longer than one of few, so the last step has all problems of the run
if STEP_S allows, then as many tokens as it allows. Its times are scaled by tokens.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from postgrad import phases
from postgrad.config.schema import Config, copy_settings
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.method import Step
from postgrad.methods.support.policy_objective import PolicyObjective
from postgrad.model.device import has_own_memory, supports_graph_capture
from postgrad.model.passes.captured import uncaptured_reason
from postgrad.model.passes.support import support_of
from postgrad.model.policy import LocalPolicy
from postgrad.rollout.native.engine import NativeEngine
from postgrad.training.driver import Driver, open_driver
from postgrad.training.report import Reporter
from postgrad.training.result import StepResult
from postgrad.types import Batch

STEP_S = 25.0  # length of the last step, about
WARM_S = 20.0  # of a first step: a shorter one is repeated, its time is that of a cold start
FIRST_TOKENS = 8  # of a response of the first steps
MAX_TOKENS = 128  # of a response of the last step


@dataclass(frozen=True)
class Rehearsal:
    """What the steps showed."""

    problems: int  # of the last step
    tokens: int  # limit of its responses
    cut: float  # share of its responses that reached this limit
    step: dict[str, float]  # seconds of a step of the run, by stage
    response_s: float  # seconds to sample one response of the run
    counts_all_rows: bool  # also those whose group has no signal, which the run's update skips
    paths: list[tuple[str, str]] = field(default_factory=list)  # rows: how it was computed


class _ShowsPhases(Reporter):
    """Passes phases on to what shows them now, and nothing else."""

    def __init__(self) -> None:
        self.show = phases.shown()

    def phase(self, phase: str, done: int, total: int) -> None:
        if self.show is not None:
            self.show(phase, done, total)


def rehearse(config: Config, may_shorten: bool) -> Rehearsal:
    """Run a few steps of the run and return its times.

    Args:
        config: the resolved settings of the run.
        may_shorten: responses may be cut off earlier than rollout.max_response_tokens says.

    Raises ConfigError and RunError as the run itself would.
    """
    with TemporaryDirectory() as folder:
        small = _smaller(config, Path(folder))
        with open_driver(small, _ShowsPhases()) as driver:
            driver.method.update = _on_every_row(driver.method.update)
            return _rehearse(driver, config, may_shorten)


def _smaller(config: Config, folder: Path) -> Config:
    """Return the settings of the rehearsal, with the fewest problems that the method takes."""
    small = copy_settings(config)
    small.runs = str(folder)
    small.name = "rehearsal"
    small.track = type(config.track)()
    small.rollout.staleness = 0
    small.rollout.stream = False
    small.training.epochs = 0.0
    small.training.max_flat_steps = sys.maxsize
    most = config.training.problems_per_step
    small.training.problems_per_step = min(most, max(2, config.training.updates_per_step))
    while small.training.problems_per_step < most:
        try:
            find_method(small.method.name)(small).check()
            return small
        except ConfigError:
            small.training.problems_per_step *= 2
    small.training.problems_per_step = most
    return small


def _on_every_row(update: Callable[[Batch, Step], Batch]) -> Any:
    """Let the update compute all rows: it skips those without advantage, such as short answers."""

    @wraps(update)
    def update_every_row(batch: Batch, step: Step) -> Batch:
        if "advantages" in batch.tokens:
            advantages = batch.tokens["advantages"]
            batch.tokens["advantages"] = torch.where(advantages == 0, 1.0, advantages)
        return update(batch, step)

    return update_every_row


def _rehearse(driver: Driver, config: Config, may_shorten: bool) -> Rehearsal:
    limit = config.rollout.max_response_tokens
    most = config.training.problems_per_step
    settings = driver.config
    first_problems = settings.training.problems_per_step
    first_limit = min(FIRST_TOKENS, limit) if may_shorten else limit
    settings.rollout.max_response_tokens = first_limit
    phases.begin("rehearsing a first, short step")
    first = driver.step(1)
    if sum(stage_seconds(first.metrics).values()) < WARM_S:
        first = driver.step(2)
    problems, tokens = most, min(MAX_TOKENS, limit) if may_shorten else limit
    if not has_own_memory(torch.device(config.model.device)):  # a GPU needs all rows at once
        seconds = partial(_seconds_per_problem, first, first_problems, first_limit)
        while tokens > first_limit and most * seconds(tokens) > STEP_S:
            tokens = max(first_limit, tokens // 2)
        problems = max(first_problems, min(most, int(STEP_S / seconds(tokens))))
    settings.training.problems_per_step = problems
    phases.begin(f"rehearsing a step of {problems} problems")
    prompts_s = _sample_prompts(driver) if may_shorten else 0.0
    settings.rollout.max_response_tokens = tokens
    last = driver.step(4)
    cut = torch.tensor([finish == "length" for finish in last.batch.rows["finish"]])
    ports = driver.method.ports
    step = _scale(last, problems, prompts_s, int(cut.sum()) * (limit - tokens), ports.policy)
    objective = driver.method.objective
    return Rehearsal(
        problems,
        tokens,
        cut=float(cut.float().mean()),
        step={stage: seconds * most / problems for stage, seconds in step.items()},
        response_s=step.get("sample", 0.0) / len(last.batch),
        counts_all_rows=isinstance(objective, PolicyObjective) and not objective.needs_all_rows(),
        paths=describe_paths(ports.policy, ports.engine),
    )


def _seconds_per_problem(first: StepResult, problems: int, first_limit: int, tokens: int) -> float:
    """Return how long a step takes per problem with responses of `tokens` tokens, at most."""
    rows = len(first.batch)
    prompts = float(first.batch.prompt.lengths.float().mean()) * problems
    longer = (prompts + rows * tokens) / (prompts + rows * first_limit)
    return sum(stage_seconds(first.metrics).values()) / problems * longer


def _sample_prompts(driver: Driver) -> float:
    """Return the seconds to sample one token of each response of a step, which is not trained on.

    Nearly all of it is spent on the prompts.
    """
    driver.config.rollout.max_response_tokens = 1
    step, _ = driver.rollouts.next_step(3)
    return stage_seconds(step.metrics).get("sample", 0.0)


def _scale(
    last: StepResult, problems: int, prompts_s: float, more_tokens: int, policy: Any
) -> dict[str, float]:
    """Return the seconds by stage of a step with the same rows and `more_tokens` tokens in all.

    Sampling is the time of the prompts and one of each further token. Other stages take the same
    time for each token, of a prompt too; passes compute it once per problem or in each row.
    """
    batch = last.batch
    tokens = int(batch.response.lengths.sum())
    prompts = int(batch.prompt.lengths.sum())
    if not isinstance(policy, LocalPolicy) or support_of(policy.model).passes != "rows":
        prompts = prompts * problems // len(batch)
    scaled: dict[str, float] = {}
    for stage, seconds in stage_seconds(last.metrics).items():
        if stage == "sample" and prompts_s < seconds:
            decoded = max(1, tokens - len(batch))
            scaled[stage] = prompts_s + (seconds - prompts_s) * (decoded + more_tokens) / decoded
        else:
            scaled[stage] = seconds * (prompts + tokens + more_tokens) / max(1, prompts + tokens)
    return scaled


def stage_seconds(metrics: dict[str, float]) -> dict[str, float]:
    """Return the seconds of each stage of a step."""
    seconds: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith("stage/") and name.endswith("_s"):
            seconds[name.removeprefix("stage/").removesuffix("_s")] = value
    return seconds


# ---- which passes and which decoding the models of the run use, and why not faster ones


def describe_paths(policy: Any, engine: Any) -> list[tuple[str, str]]:
    """Return rows about models in this process; none about others."""
    rows: list[tuple[str, str]] = []
    if isinstance(policy, LocalPolicy):
        rows += _describe_passes(policy.model)
    if isinstance(engine, NativeEngine):
        rows.append(("decoding", _describe_decoding(engine)))
    return rows


def _describe_passes(model: Any) -> list[tuple[str, str]]:
    support = support_of(model)
    passes = str(support.passes)
    reasons = list(support.reasons)
    if supports_graph_capture(next(model.parameters()).device):
        reason = uncaptured_reason(model)
        passes += ", kernel by kernel" if reason else ", captured as graphs"
        reasons += [f"captured: {reason}"] if reason else []
    return [("passes", passes), *(("", f"not {reason}") for reason in reasons)]


def _describe_decoding(engine: NativeEngine) -> str:
    if engine.stock_engine is not None:
        return "transformers' generate"
    if engine.decoder is not None:
        graphs = "captured as graphs" if engine.decoder.captures else "kernel by kernel"
        return f"native, paged cache, {graphs}"
    return "native, contiguous cache"

"""Two real steps of a run, a short one first: how long its steps take on this machine.

They run as `postgrad train` does, with the model's weights, a few problems and shorter responses;
their folder is temporary. The second step is as large as STEP_S allows; its times are scaled to
the run's own numbers of problems and tokens.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from postgrad import phases
from postgrad.config.schema import Config, copy_settings
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.method import Step
from postgrad.model.device import has_own_memory, supports_graph_capture
from postgrad.model.passes.captured import uncaptured_reason
from postgrad.model.passes.support import support_of
from postgrad.model.policy import LocalPolicy
from postgrad.rollout.native.engine import NativeEngine
from postgrad.training.driver import Driver, open_driver
from postgrad.training.report import Reporter
from postgrad.training.result import StepResult
from postgrad.types import Batch

STEP_S = 25.0  # length of the second step, about
FIRST_TOKENS = 16  # of a response of the first step, which warms up and measures roughly
MAX_TOKENS = 128  # of a response of the second step


@dataclass(frozen=True)
class Rehearsal:
    """What two steps showed."""

    problems: int  # of the second step
    tokens: int  # limit of its responses
    cut: float  # share of its responses that reached this limit
    step: dict[str, float]  # seconds of a step of the run, by stage
    response_s: float  # seconds to sample one response of the run
    paths: list[tuple[str, str]] = field(default_factory=list)  # rows: how it was computed


class _ShowsPhases(Reporter):
    """Passes phases on to what shows them now, and nothing else."""

    def __init__(self) -> None:
        self.show = phases.shown()

    def phase(self, phase: str, done: int, total: int) -> None:
        if self.show is not None:
            self.show(phase, done, total)


def rehearse(config: Config, may_shorten: bool) -> Rehearsal:
    """Run two steps of the run and return its times.

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
    settings = driver.config
    first_limit = min(FIRST_TOKENS, limit) if may_shorten else limit
    settings.rollout.max_response_tokens = first_limit
    first_problems = settings.training.problems_per_step
    phases.begin("rehearsing a first, short step")
    first = driver.step(1)
    most = config.training.problems_per_step
    tokens = min(MAX_TOKENS, limit) if may_shorten else limit
    problems = most
    if not has_own_memory(torch.device(config.model.device)):  # a GPU needs all rows at once
        while (
            may_shorten and tokens > first_limit and _predict(first, first_limit, tokens) > STEP_S
        ):
            tokens = max(first_limit, tokens // 2)
        affordable = STEP_S / _predict(first, first_limit, tokens)
        problems = max(first_problems, min(most, int(first_problems * affordable)))
    settings.training.problems_per_step = problems
    settings.rollout.max_response_tokens = tokens
    phases.begin(f"rehearsing a step of {problems} problems")
    second = driver.step(2)
    cut = torch.tensor([finish == "length" for finish in second.batch.rows["finish"]])
    step, response_s = _scale(second, cut, problems, most / problems, limit - tokens)
    ports = driver.method.ports
    paths = describe_paths(ports.policy, ports.engine)
    return Rehearsal(problems, tokens, float(cut.float().mean()), step, response_s, paths)


def _predict(first: StepResult, first_limit: int, tokens: int) -> float:
    """Return the seconds of the same step with responses of `tokens` tokens, at most."""
    prompt = float(first.batch.prompt.lengths.float().mean())
    longer_rows = (prompt + tokens) / (prompt + first_limit)
    seconds = stage_seconds(first.metrics)
    sample_s = sum(s for stage, s in seconds.items() if stage.startswith("sample"))
    return sample_s * tokens / first_limit + (sum(seconds.values()) - sample_s) * longer_rows


def _scale(
    second: StepResult, cut: torch.Tensor, problems: int, more_problems: float, more_tokens: int
) -> tuple[dict[str, float], float]:
    """Return the seconds of the run's own step by stage, and those to sample one response.

    A response that was cut off counts as one that is `more_tokens` tokens longer. Sampling computes
    the prompt of a problem once, other stages as a part of each row.
    """
    batch = second.batch
    prompts = int(batch.prompt.lengths.sum())
    sampled = max(1, int(batch.response.lengths.sum()))
    expected = sampled + int(cut.sum()) * more_tokens
    seconds = stage_seconds(second.metrics)
    scaled: dict[str, float] = {}
    for stage, measured in seconds.items():
        shared = prompts * problems / len(batch) if stage.startswith("sample") else prompts
        scaled[stage] = measured * more_problems * (shared + expected) / (shared + sampled)
    return scaled, scaled.get("sample", 0.0) / more_problems / len(batch)


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

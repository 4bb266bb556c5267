"""The driver: open a run, then step after step let the method's stages pass the work along.

problems -> compose -> sample -> enrich -> score -> estimate -> update -> publish
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from postgrad.cluster import place
from postgrad.config.schema import Config
from postgrad.data.cursor import Cursor
from postgrad.methods import find_method
from postgrad.methods.base import Method, Ports, Step
from postgrad.training import checkpoint, prepare, run
from postgrad.training.guard import Guard
from postgrad.training.log import RunLog, describe, read_metrics, timed
from postgrad.training.report import Reporter
from postgrad.types import Batch


@dataclass
class Result:
    """How a run ended. `interrupted` runs go on with the same command."""

    folder: Path
    step: int
    interrupted: bool = False
    reached: bool = False


def train(config: Config, reporter: Reporter) -> Result:
    """Run the configuration to its end, from its last checkpoint if its folder has one."""
    method = find_method(config.method.name)(config)
    method.check()
    config = method.config = prepare.resolve(run.continued(config))
    inputs = prepare.load_inputs(config, method)
    with ExitStack() as stack:
        stack.enter_context(run.locked(run.run_folder(config))) if run.run_folder(config).is_dir() else None
        judge = stack.enter_context(inputs.judge)
        policy, engine = stack.enter_context(place(config))
        if not run.run_folder(config).is_dir():
            stack.enter_context(run.locked(run.run_folder(config)))
        folder = run.create(config)
        method.bind(Ports(policy, engine, judge, inputs.prompts))
        cursor = Cursor(len(inputs.train), config.seed, config.data.shuffle)
        guard = Guard(config)
        start = _restore(folder, method, cursor, guard)
        log = RunLog(folder, start)
        stack.callback(log.close)
        reporter.started(folder, config, start)
        stack.callback(reporter.stopped)
        return _loop(config, method, inputs, cursor, guard, log, reporter, start)


def _loop(
    config: Config,
    method: Method,
    inputs: prepare.Inputs,
    cursor: Cursor,
    guard: Guard,
    log: RunLog,
    reporter: Reporter,
    start: int,
) -> Result:
    training, number = config.training, start
    result = Result(log.folder, start)
    with _interruptible(result, reporter):
        if start == 0:
            result.reached = _validate(method, inputs, log, reporter, 0, training.stop_at)
        elif training.stop_at is not None:  # a run that had reached its goal stays finished
            done = [line.get("validation/accuracy", 0.0) for line in read_metrics(log.folder) if line["step"] == start]
            result.reached = max(done, default=0.0) >= training.stop_at
        while number < training.steps and not (result.interrupted or result.reached):
            number += 1
            batch = _step(config, method, inputs, cursor, guard, log, reporter, number)
            if training.validate_every and number % training.validate_every == 0 and number < training.steps:
                result.reached = _validate(method, inputs, log, reporter, number, training.stop_at)
            last = number == training.steps or result.interrupted or result.reached
            if number == training.steps and not result.reached:
                _validate(method, inputs, log, reporter, number, training.stop_at)
            if last or number % training.checkpoint_every == 0:
                saved = checkpoint.Saved(number, cursor.state(), guard.flat_steps, method.state())
                path = checkpoint.save(log.folder, method.ports.policy, saved, training.keep_checkpoints)
                reporter.saved(path, len(batch))
    result.step = number
    return result


def _step(
    config: Config,
    method: Method,
    inputs: prepare.Inputs,
    cursor: Cursor,
    guard: Guard,
    log: RunLog,
    reporter: Reporter,
    number: int,
) -> Batch:
    """One step: the stages in order, then what is written of it."""
    began = time.perf_counter()
    problems = [inputs.train[i] for i in cursor.take(config.training.problems_per_step)]
    step = Step(number, {problem.uid: problem for problem in problems})
    work: object = problems
    for stage in method.stages():
        with timed(step, stage.__name__):
            work = stage(work, step)
    assert isinstance(work, Batch), "the last stage returns the batch"
    seconds = time.perf_counter() - began
    step.metrics |= describe(work) | {"epoch": cursor.epoch, "step_s": seconds, "tokens_per_second": work.num_tokens / seconds}
    log.write_rollouts(number, [work, *step.failed])
    reporter.step(log.write(number, step.metrics), work)
    guard.check(step, work)
    return work


def _validate(method: Method, inputs: prepare.Inputs, log: RunLog, reporter: Reporter, number: int, stop_at: float | None) -> bool:
    """Held-out problems; True when `training.stop_at` is reached."""
    if not inputs.validation:
        return False
    metrics = method.validate(inputs.validation)
    log.write(number, metrics)
    reporter.validated(number, metrics)
    return stop_at is not None and metrics.get("validation/accuracy", 0.0) >= stop_at


def _restore(folder: Path, method: Method, cursor: Cursor, guard: Guard) -> int:
    found = checkpoint.latest(folder)
    if found is None:
        return 0
    saved = checkpoint.load(found, method.ports.policy)
    cursor.load(saved.cursor)
    method.load(saved.method)
    guard.flat_steps = saved.flat_steps
    method.publish(None, Step(saved.step))  # type: ignore[arg-type]
    return saved.step


@contextmanager
def _interruptible(result: Result, reporter: Reporter) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) lets the step end and saves; the second one stops at once."""

    def handle(number: int, frame: object) -> None:
        if result.interrupted:
            raise KeyboardInterrupt
        result.interrupted = True
        reporter.note("finishing this step, then saving; press Ctrl-C again to stop at once")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

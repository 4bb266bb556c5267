"""The driver: trains a run by calling the method's stages in order, step after step.

draw -> compose -> sample -> enrich -> score -> estimate -> update -> publish
"""

import time
from dataclasses import dataclass
from pathlib import Path

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.training import checkpoint
from postgrad.training.guard import Guard
from postgrad.training.interrupt import Interrupt
from postgrad.training.log import RunLog, batch_metrics, read_metrics, timed
from postgrad.training.memory import explained_memory_errors
from postgrad.training.prefetch import RolloutPrefetcher
from postgrad.training.prepare import load_inputs, make_method
from postgrad.training.profile import profiled
from postgrad.training.report import Reporter
from postgrad.training.setup import OpenRun, announced, open_run
from postgrad.training.validation import BestStep, goal_met, validate_sets, validation_due
from postgrad.training.validation_answers import ValidationAnswers
from postgrad.types import Batch


@dataclass
class Result:
    """How a run ended."""

    folder: Path
    step: int
    interrupted: bool = False  # somebody stopped it; the same command continues it
    reached: bool = False  # a validation reached training.stop_at


def train(config: Config, reporter: Reporter) -> Result:
    """Train to the last step, from the latest checkpoint if the run folder has one.

    Raises:
        ConfigError: the configuration or the data are wrong; nothing was written.
        RunError: the run cannot go on; the same command continues it.
    """
    method = make_method(config)
    inputs = load_inputs(method.config, method)
    with explained_memory_errors("load"), open_run(method, inputs, reporter) as opened:
        driver = Driver(opened)
        with announced(opened, driver.log, driver.start):
            return driver.run()


class Driver:
    """Trains one open run. The constructor restores the latest checkpoint."""

    def __init__(self, opened: OpenRun) -> None:
        self.config = opened.config
        self.method = opened.method
        self.inputs = opened.inputs
        self.folder = opened.folder
        self.reporter = opened.reporter
        self.feed = Feed(self.inputs.train, self.config.seed, self.config.data.shuffle)
        self.guard = Guard(self.config)
        self.prefetcher = RolloutPrefetcher(self.config, self.method, self.feed)
        self.writer = checkpoint.Writer(
            self.folder, self.method.trained_models(), self.config.training, self.reporter.saved
        )
        self.start = self.restore()
        self.log = RunLog(self.folder, self.start)
        self.best = BestStep(self.config, len(self.inputs.validation), read_metrics(self.folder))
        self.writer.remove_leftovers(self.start, self.best.step)

    def run(self) -> Result:
        """Train from the first step that is missing to the last."""
        training = self.config.training
        interrupt = Interrupt(self.reporter.note)
        number = self.start
        with interrupt.handling_signals():
            reached = self.reached_at_start()
            while number < training.steps and not interrupt.requested and not reached:
                number += 1
                self.step(number)
                self.writer.finish(wait=False)
                if validation_due(training, number):
                    reached = self.validate(number)
                due = checkpoint.checkpoint_due(training, number) or number == self.best.step
                if due or reached or interrupt.requested:
                    self.save(number)
            self.writer.finish(wait=True)
        self.reporter.ended(reached, interrupt.requested)
        return Result(self.folder, number, interrupt.requested, reached)

    def step(self, number: int) -> None:
        """Run one step: the stages in order, then write its metrics and rollouts."""
        started = time.perf_counter()
        with profiled(self.folder, number, self.config.training.profile_steps, self.reporter.note):
            step, work, stages = self.prefetcher.next_step(number)
            for stage in stages:
                name = stage.__name__
                with timed(step, name), explained_memory_errors(name, self.method.ports.policy):
                    work = stage(work, step)
            seconds = time.perf_counter() - started
        assert isinstance(work, Batch), "the last stage returns the batch"
        speed = {"step_s": seconds, "tokens_per_second": work.num_tokens / seconds}
        step.metrics = {**batch_metrics(work), **step.metrics, "epoch": self.feed.epoch, **speed}
        self.log.write_rollouts(number, [work, *step.failed])
        self.reporter.step(self.log.write(number, step.metrics), work)
        self.guard.check(step, work)

    def validate(self, number: int) -> bool:
        """Evaluate the validation sets; return whether the result reaches training.stop_at."""
        if not self.inputs.validation:
            return False
        kept = ValidationAnswers(self.config, self.folder, self.inputs.scorer)
        with explained_memory_errors("validate", self.method.ports.policy):
            metrics = validate_sets(self.method, self.inputs.validation, kept)
        kept.write(number)
        self.log.write(number, metrics)
        self.best.update(number, metrics)
        self.reporter.validated(number, metrics)
        return goal_met(self.config, [metrics])

    def save(self, number: int) -> None:
        """Write the checkpoint of step `number`."""
        self.log.sync()
        state = checkpoint.State(
            step=number,
            cursor=self.feed.state(),
            flat_steps=self.guard.flat_steps,
            method=self.method.state(),
            pending=self.prefetcher.state(),
        )
        self.writer.save(state, self.best.step)

    def restore(self) -> int:
        """Load the latest checkpoint; return its step, or 0 if there is none."""
        found = checkpoint.find_resumable(self.folder, self.reporter.note)
        if found is None:
            return 0
        state = checkpoint.load(found, self.method.trained_models())
        self.feed.load(state.cursor)
        self.method.load(state.method)
        self.guard.flat_steps = state.flat_steps
        self.prefetcher.load(state.pending)
        self.method.sync_weights()
        return state.step

    def reached_at_start(self) -> bool:
        """Validate a new run; for a resumed one read whether training.stop_at was reached."""
        if self.start == 0:
            return self.validate(0)
        lines = [line for line in read_metrics(self.folder) if line["step"] == self.start]
        return goal_met(self.config, lines)

"""The driver: trains a run by calling the method's stages in order, step after step.

draw -> compose -> sample -> enrich -> score -> estimate -> update -> publish
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.errors import ConfigError
from postgrad.training import checkpoint
from postgrad.training.guard import Guard
from postgrad.training.interrupt import Interrupt
from postgrad.training.log import RunLog, batch_metrics, read_metrics, timed
from postgrad.training.memory import explained_memory_errors
from postgrad.training.prefetch import RolloutPrefetcher
from postgrad.training.prepare import load_inputs, make_method
from postgrad.training.profile import profiled
from postgrad.training.report import Reporter
from postgrad.training.result import Result, StepResult
from postgrad.training.setup import OpenRun, announced, open_run
from postgrad.training.validation import BestStep, goal_met, validate_sets, validation_due
from postgrad.training.validation_answers import ValidationAnswers
from postgrad.types import Batch


def train(config: Config, reporter: Reporter) -> Result:
    """Train to the last step, from the latest checkpoint if the run folder has one.

    Raises:
        ConfigError: the configuration or the data are wrong; nothing was written.
        RunError: the run cannot go on; the same command continues it.
    """
    with open_driver(config, reporter) as driver:
        return driver.run()


@contextmanager
def open_driver(config: Config, reporter: Reporter) -> Iterator["Driver"]:
    """Yield the driver of a run: checked, locked, loaded and restored. Raises ConfigError."""
    method = make_method(config)
    inputs = load_inputs(method.config, method)
    with explained_memory_errors("load"), open_run(method, inputs, reporter) as opened:
        driver = Driver(opened)
        with announced(opened, driver.log, driver.start):
            yield driver


class Driver:
    """Trains one open run. The constructor restores the latest checkpoint.

    Attributes:
        number: the last finished step.
        saved: the step of the last checkpoint.
        interrupt: `interrupt.requested = True` ends the run after the current step.
    """

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
        self.interrupt = Interrupt(self.reporter.note)
        self.reached = False
        self.changed_lr: float | None = None
        self.start = self.restore()
        self.number = self.saved = self.start
        self.log = RunLog(self.folder, self.start)
        self.best = BestStep(self.config, len(self.inputs.validation), read_metrics(self.folder))
        self.writer.remove_leftovers(self.start, self.best.step)

    def run(self) -> Result:
        """Train from the first step that is missing to the last."""
        for _ in self.steps():
            pass
        return self.result()

    def steps(self) -> Iterator[StepResult]:
        """Yield each step after its validation and checkpoint.

        Ctrl-C is handled while a step runs, and not while the caller has a step.
        """
        training = self.config.training
        with self.interrupt.handling_signals():
            self.reached = self.reached_at_start()
        while self.number < training.steps and not self.interrupt.requested and not self.reached:
            with self.interrupt.handling_signals():
                result = self.advance()
            yield result
        with self.interrupt.handling_signals():
            if self.interrupt.requested and self.number > self.saved:
                self.save(self.number)  # the caller asked for the end after the step was yielded
            self.writer.finish(wait=True)
        self.reporter.ended(self.reached, self.interrupt.requested)

    def advance(self) -> StepResult:
        """Run the next step, its validation and its checkpoint where they are due."""
        training = self.config.training
        number = self.number + 1
        result = self.step(number)
        self.number = number
        self.writer.finish(wait=False)
        if validation_due(training, number):
            self.reached = self.validate(number)
        due = checkpoint.checkpoint_due(training, number) or number == self.best.step
        if due or self.reached or self.interrupt.requested:
            self.save(number)
        return result

    def result(self) -> Result:
        """Return how the run ended."""
        return Result(self.folder, self.number, self.interrupt.requested, self.reached)

    def step(self, number: int) -> StepResult:
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
        metrics = self.log.write(number, step.metrics)
        self.reporter.step(metrics, work)
        self.guard.check(step, work)
        return StepResult(number, work, metrics)

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
            lr=self.changed_lr,
        )
        with explained_memory_errors("save", self.method.ports.policy):
            self.writer.save(state, self.best.step)
        self.saved = number

    def set_lr(self, lr: float) -> None:
        """Change the peak learning rate from the next step on; checkpoints keep it.

        Raises ConfigError if the models are in other processes, which have their own settings.
        """
        if self.config.cluster.backend != "local":
            raise ConfigError(
                "the learning rate can be changed during a run only with cluster.backend=local, "
                f"not {self.config.cluster.backend}; use optimizer.schedule"
            )
        if not lr > 0:
            raise ConfigError(f"optimizer.lr={lr} is out of range; it must be above 0")
        self.config.optimizer.lr = lr
        self.changed_lr = lr

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
        if state.lr is not None:
            self.set_lr(state.lr)
        self.method.sync_weights()
        return state.step

    def reached_at_start(self) -> bool:
        """Validate a new run; for a resumed one read whether training.stop_at was reached."""
        if self.start == 0:
            return self.validate(0)
        lines = [line for line in read_metrics(self.folder) if line["step"] == self.start]
        return goal_met(self.config, lines)

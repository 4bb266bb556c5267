"""The driver: trains a run by calling the method's stages in order, step after step.

    sampling:  draw -> compose -> sample             run now, ahead of the update, or as a stream
    learning:  enrich -> score -> estimate -> update -> publish

`rollouts` runs the first list, `step` the second.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from postgrad import phases
from postgrad.config.schema import Config
from postgrad.data.problem_queue import ProblemQueue
from postgrad.training.checkpoint import Progress, checkpoint_due, remove_leftovers
from postgrad.training.guard import Guard
from postgrad.training.interrupt import Interrupt
from postgrad.training.log import RunLog, batch_metrics
from postgrad.training.memory import explained_memory_errors, halved_token_budget
from postgrad.training.open import OpenRun, open_run, report_run
from postgrad.training.prepare import prepare
from postgrad.training.report import Reporter
from postgrad.training.result import Result, StepResult
from postgrad.training.rollouts import make_rollouts
from postgrad.training.stages import final_batch, profiled, run_stage, seed_step
from postgrad.training.validation import Validator, validation_due

STAGE_PHASES = {"score": "scoring", "update": "updating"}


def train(config: Config, reporter: Reporter) -> Result:
    """Train to the last step, from the latest checkpoint if the run folder has one.

    Raises:
        ConfigError: the configuration or the data are wrong; nothing was written.
        RunError: the run cannot go on; the same command continues it.
    """
    # Between two steps Python's own handler would raise KeyboardInterrupt, which is lost if it hits
    # the destructor of the last step's result.
    with open_driver(config, reporter) as driver, driver.interrupt.handling_signals():
        for _ in driver.steps():
            pass
        return driver.result()


@contextmanager
def open_driver(config: Config, reporter: Reporter) -> Iterator["Driver"]:
    """Yield the driver of a run: checked, locked, loaded and restored. Raises ConfigError."""
    with ExitStack() as stack:
        stack.enter_context(phases.shown_by(reporter.phase))
        prepared = prepare(config)
        stack.enter_context(explained_memory_errors("load"))
        opened = stack.enter_context(open_run(prepared, reporter))
        stack.enter_context(halved_token_budget(opened.folder, config, prepared.config))
        driver = Driver(opened)
        stack.enter_context(report_run(opened, driver.log, driver.start))
        stack.enter_context(closing(driver.rollouts))
        yield driver


class Driver:
    """Trains one open run. The constructor restores the latest checkpoint.

    Attributes:
        start: the step of the checkpoint that was restored, 0 for a new run.
        number: the last finished step.
        reached: whether a validation reached training.stop_at.
        interrupt: `interrupt.requested = True` ends the run after the current step.
    """

    def __init__(self, opened: OpenRun) -> None:
        self.config = opened.run.config
        self.method = opened.run.method
        self.folder = opened.folder
        self.reporter = opened.reporter
        self.interrupt = Interrupt(self.reporter.note)
        self.problem_queue = ProblemQueue(
            opened.run.train, self.config.seed, self.config.data.shuffle
        )
        self.guard = Guard(self.config, self.reporter.note)
        self.rollouts = make_rollouts(self.config, self.method, self.problem_queue)
        parts = self.problem_queue, self.guard, self.rollouts
        self.progress = Progress(self.config, self.method, self.folder, self.reporter, *parts)
        self.number = self.start = self.progress.restore()
        self.reached = False
        self.log = RunLog(self.folder, self.start)
        self.validator = Validator(opened, self.log)
        best = self.validator.best.step
        remove_leftovers(self.folder, self.start, self.progress.keep, best)

    def steps(self) -> Iterator[StepResult]:
        """Yield each step after its validation and checkpoint.

        Ctrl-C is handled while a step runs, and not while the caller has a step.
        """
        with self.interrupt.handling_signals():
            self.reached = self.validator.reached_at(self.start)
        num_steps = self.config.training.steps
        while self.number < num_steps and not (self.reached or self.interrupt.requested):
            with self.interrupt.handling_signals():
                result = self.advance()
            yield result
        with self.interrupt.handling_signals():
            if self.interrupt.requested:
                self.save()  # the caller asked for the end after the step was yielded
        self.reporter.ended(self.reached, self.interrupt.requested)

    def advance(self) -> StepResult:
        """Run the next step, its validation and its checkpoint where they are due."""
        training = self.config.training
        number = self.number + 1
        result = self.step(number)
        if number == self.start + 1:
            self.progress.check_state()
        self.number = number
        if validation_due(training, number):
            self.reached = self.validator.validate(number)
        due = checkpoint_due(training, number) or number == self.validator.best.step
        if due or self.reached or self.interrupt.requested:
            self.save()
        return result

    def step(self, number: int) -> StepResult:
        """Run one step: sample, learn, then write its metrics and rollouts."""
        started = time.perf_counter()
        seed_step(self.config.seed, number)
        policy = self.method.ports.policy
        with profiled(self.folder, number, self.config.training.profile_steps, self.reporter.note):
            phases.begin("sampling")
            with explained_memory_errors("sample", policy):  # of a stream, which runs no stages
                step, batch = self.rollouts.next_step(number)
            for stage in self.method.learning_stages():
                name = stage.__name__
                phases.begin(STAGE_PHASES.get(name, name))
                with self.rollouts.pausing(stage, step):
                    batch = run_stage(stage, batch, step, policy)
            seconds = time.perf_counter() - started
        batch = final_batch(self.method, batch, step)
        speed = {"step_s": seconds, "tokens_per_second": batch.num_tokens / seconds}
        step.metrics = {
            **batch_metrics(batch, step.failed),
            **step.metrics,
            "epoch": self.problem_queue.epoch,
            **speed,
        }
        self.log.write_rollouts(number, [batch, *step.failed])
        metrics = self.log.write(number, step.metrics)
        self.validator.watch.add_step(metrics)
        self.reporter.step(metrics, batch)
        self.guard.check(step, batch)
        return StepResult(number, batch, metrics)

    def save(self) -> None:
        """Write the checkpoint of the last finished step, unless it has one."""
        if self.progress.saved < self.number:
            self.log.sync()
            self.progress.save(self.number, self.validator.best.step)

    def result(self) -> Result:
        """Return how the run ended."""
        num_steps = self.config.training.steps
        interrupted = self.interrupt.requested
        return Result(self.folder, self.number, num_steps, interrupted, self.reached, self.start)

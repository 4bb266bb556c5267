"""The driver: open a run, then step after step let the method's stages pass the work along.

draw -> compose -> sample -> enrich -> score -> estimate -> update -> publish
"""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from postgrad.cluster import place
from postgrad.config.schema import Config
from postgrad.data.feed import Feed
from postgrad.methods import find_method
from postgrad.methods.base import Method, Ports
from postgrad.methods.support.judging import connect_scorer
from postgrad.training import checkpoint, prepare, run
from postgrad.training.engine_gap import agree
from postgrad.training.events import Events
from postgrad.training.guard import Guard
from postgrad.training.interrupt import Interrupt
from postgrad.training.log import RunLog, describe, missing_steps, read_metrics, timed
from postgrad.training.prefetch import RolloutPrefetcher
from postgrad.training.profile import profiled
from postgrad.training.report import MultiReporter, Reporter
from postgrad.training.trackers import mirrors
from postgrad.training.validation import Best, goal_met, validate_sets
from postgrad.types import Batch


@dataclass
class Result:
    """How a run ended. `interrupted` runs go on with the same command; `reached` ones met training.stop_at."""

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
        folder = run.run_folder(config)
        if there := folder.is_dir():
            stack.enter_context(run.locked(folder))
        scorer = stack.enter_context(inputs.scorer)
        placed = stack.enter_context(place(config))
        if not there:  # nothing is written before all that can be wrong has been looked at
            stack.enter_context(run.locked(folder, new=True))
        run.create(config)
        inputs.prompts.save(folder / "tokenizer.json")
        events = stack.enter_context(Events(folder))
        reporter = MultiReporter(events, reporter, *mirrors(config))
        connect_scorer(config, scorer, placed.models, folder)
        method.bind(
            Ports(placed.policy, placed.engine, scorer, inputs.prompts, placed.models, inputs.turns)
        )
        driver = Driver(config, method, inputs, folder, reporter)
        stack.callback(driver.log.close)
        reporter.started(folder, config, driver.start)
        stack.callback(reporter.stopped)
        if driver.start == 0 and inputs.too_long:
            reporter.note(inputs.too_long)
        agree(
            config, method.ports, inputs.train, reporter, driver.log if driver.start == 0 else None
        )
        result = driver.run()
        events.ended(result.reached, result.interrupted)
        return result


class Driver:
    """One run on its way: restored at construction, finished by run()."""

    def __init__(
        self,
        config: Config,
        method: Method,
        inputs: prepare.Inputs,
        folder: Path,
        reporter: Reporter,
    ) -> None:
        self.config, self.method, self.inputs, self.folder, self.reporter = (
            config,
            method,
            inputs,
            folder,
            reporter,
        )
        self.feed = Feed(inputs.train, config.seed, config.data.shuffle)
        self.guard = Guard(config)
        self.ahead = RolloutPrefetcher(config, method, self.feed)
        training = config.training
        self.writer = checkpoint.Writer(
            folder, method.trained(), training.keep_checkpoints, training.async_save, reporter.saved
        )
        self.start = self.restore()
        self.log = RunLog(folder, self.start)
        self.best = Best(config, len(inputs.validation), read_metrics(folder))
        self.writer.tidy(self.start, self.best.step)
        if missing := missing_steps(folder, self.start):
            reporter.note(
                f"metrics.jsonl lacks {len(missing)} of the {self.start} steps so far, the first of them {missing[0]}"
            )

    def restore(self) -> int:
        found = checkpoint.to_continue(self.folder, self.reporter.note)
        if found is None:
            return 0
        saved = checkpoint.load(found, self.method.trained())
        self.feed.load(saved.cursor)
        self.method.load(saved.method)
        self.guard.flat_steps = saved.flat_steps
        self.ahead.load(saved.pending)
        self.method.sync_weights()
        return saved.step

    def run(self) -> Result:
        training, number = self.config.training, self.start
        interrupt = Interrupt(self.reporter.note)
        with interrupt.watched():
            saved = [line for line in read_metrics(self.folder) if line["step"] == number]
            reached = (
                self.validate(0) if number == 0 else goal_met(self.config, saved)
            )  # once reached it stays finished
            while number < training.steps and not (interrupt.asked or reached):
                number += 1
                self.step(number)
                self.writer.settle(wait=False)
                final = number == training.steps
                if final or (training.validate_every and number % training.validate_every == 0):
                    reached = self.validate(number)
                best = self.best.step == number
                if (
                    final
                    or reached
                    or best
                    or interrupt.asked
                    or number % training.checkpoint_every == 0
                ):
                    self.save(number)
            self.writer.settle(wait=True)
        return Result(self.folder, number, interrupt.asked, reached)

    def step(self, number: int) -> Batch:
        """One step: the stages in order, then what is written of it."""
        began = time.perf_counter()
        with profiled(self.folder, number, self.config.training.profile_steps, self.reporter.note):
            step, work, stages = self.ahead.take(number)
            for stage in stages:
                with timed(step, stage.__name__):
                    work = stage(work, step)
            seconds = time.perf_counter() - began
        assert isinstance(work, Batch), "the last stage returns the batch"
        speed = {
            "epoch": self.feed.epoch,
            "step_s": seconds,
            "tokens_per_second": work.num_tokens / seconds,
        }
        step.metrics = describe(work) | step.metrics | speed
        self.log.write_rollouts(number, [work, *step.failed])
        self.reporter.step(self.log.write(number, step.metrics), work)
        self.guard.check(step, work)
        return work

    def validate(self, number: int) -> bool:
        """Held-out problems; True when `training.stop_at` is reached."""
        if not self.inputs.validation:
            return False
        metrics = validate_sets(self.method, self.inputs.validation)
        self.log.write(number, metrics)
        self.best.see(number, metrics)
        self.reporter.validated(number, metrics)
        return goal_met(self.config, [metrics])

    def save(self, number: int) -> None:
        self.log.sync()
        saved = checkpoint.Saved(
            number,
            self.feed.state(),
            self.guard.flat_steps,
            self.method.state(),
            self.ahead.state(),
        )
        self.writer.save(saved, self.best.step)

"""train() and Trainer: training runs from Python, by the same driver as the command line."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from postgrad.api.callbacks import Callback, CallbackReporter, check_callbacks
from postgrad.api.request import make_request
from postgrad.api.rewards import Reward
from postgrad.api.run import Run
from postgrad.api.signature import with_arguments_of
from postgrad.config.schema import Config
from postgrad.errors import RunError, Unsupported
from postgrad.model.threads import kept_threads, set_threads
from postgrad.phases import print_line
from postgrad.training import checkpoint, run
from postgrad.training.display import make_reporter
from postgrad.training.driver import Driver, open_driver
from postgrad.training.report import MultiReporter, Reporter
from postgrad.training.result import Result, StepResult
from postgrad.training.warmup import run_warmup


class _WarmupStopped(RunError):
    """Somebody stopped the warm-up run, so the run itself has not started."""


class Trainer:
    """A training run whose steps you can loop over.

    The arguments are those of `train`. The loop yields each step after its validation and its
    checkpoint, with its batch, rewards and metrics:

        with postgrad.Trainer("grpo", model="tiny", data=rows, reward=reward, steps=100) as trainer:
            for step in trainer:
                print(step.number, step.metrics["reward/mean"], step.responses[0])
                if step.metrics["reward/mean"] > 0.9:
                    break

    After `break` the trainer stays open: loop again to go on, or leave the `with` block, which
    writes a checkpoint and releases the run folder. A trainer with the same arguments continues
    from the last checkpoint, also in another process, and computes the same bits as a run that was
    never stopped. Ctrl-C during a step finishes the step, saves and ends the loop.

    Raises:
        ConfigError: an argument is wrong; nothing was written.
        RunError: the run cannot go on; the last checkpoint is complete.
    """

    def __init__(
        self,
        recipe: str = "grpo",
        *,
        model: Any = None,
        tokenizer: Any = None,
        data: Any = None,
        validation: Any = None,
        reward: Reward | Sequence[Reward] | None = None,
        reward_weights: Sequence[float] | None = None,
        method: Any = None,
        steps: int | None = None,
        group_size: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        name: str | None = None,
        runs: str | Path | None = None,
        callbacks: Sequence[Callback | Callable[[StepResult], Any]] = (),
        progress: bool = True,
        settings: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self._callbacks = check_callbacks(callbacks)
        named = {
            "steps": steps,
            "group_size": group_size,
            "batch_size": batch_size,
            "lr": lr,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "name": name,
            "runs": runs,
            **more,
        }
        self._request = make_request(
            recipe,
            model=model,
            tokenizer=tokenizer,
            data=data,
            validation=validation,
            reward=reward,
            reward_weights=reward_weights,
            method=method,
            settings=settings,
            named=named,
        )
        self._config = self._request.config
        self._progress = progress
        self._stack: ExitStack | None = None
        self._driver: Driver | None = None
        self._steps: Iterator[StepResult] | None = None
        self._result: Result | None = None

    # ---- what it is

    @property
    def config(self) -> Config:
        """All settings of the run."""
        return self._config

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._request.folder

    @property
    def run(self) -> Run:
        """The run folder as an object: metrics, rollouts, checkpoints.

        If the warm-up run was stopped, it is that run.
        """
        result = self._result
        folder = self.folder if result is None else result.folder
        interrupted = result is not None and result.interrupted
        return Run(folder, self._request.config.reward.verifier, interrupted)

    @property
    def step(self) -> int:
        """The last finished step; 0 before the first."""
        if self._driver is not None:
            return self._driver.number
        return self._result.step if self._result is not None else 0

    @property
    def model(self) -> Any:
        """The transformers model that is being trained. Raises ConfigError if it is elsewhere."""
        policy = self._open_driver().method.ports.policy
        found = getattr(policy, "model", None)
        if found is None:
            raise Unsupported(
                f"cluster.backend={self.config.cluster.backend}: the model is in another process; "
                "trainer.run.load() loads a checkpoint of it"
            )
        return found

    @property
    def lr(self) -> float:
        """The peak learning rate. Setting it changes the steps that follow; checkpoints keep it."""
        if self._driver is not None:
            return self._driver.config.optimizer.lr
        changed = checkpoint.changed_lr(self.folder)
        return self._request.config.optimizer.lr if changed is None else changed

    @lr.setter
    def lr(self, value: float) -> None:
        self._open_driver().progress.set_lr(value)

    # ---- running

    def __iter__(self) -> "Trainer":
        return self

    def __next__(self) -> StepResult:
        if self._result is not None:
            raise StopIteration
        try:
            driver = self._open_driver()
        except _WarmupStopped:
            raise StopIteration from None
        assert self._steps is not None, "an open driver has steps"
        try:
            with kept_threads():
                if self.config.cluster.backend == "local":
                    set_threads(self.config.model.threads)
                return next(self._steps)
        except StopIteration:
            self._finish(driver)
            raise
        except BaseException:
            self._release(*sys.exc_info())
            raise

    def train(self) -> Run:
        """Run the steps that are left and return the run."""
        for _ in self:
            pass
        return self.run

    def stop(self) -> None:
        """End the run after the current step, with a checkpoint. The same call continues it."""
        if self._driver is not None:
            self._driver.interrupt.requested = True

    def save(self) -> Path:
        """Write a checkpoint of the last step now and return its folder. Raises RunError."""
        if self._result is not None:  # the end of a run writes a checkpoint
            return self.run.checkpoint()
        driver = self._open_driver()
        if driver.number == 0:
            raise RunError("no step has run yet, so there is nothing to save")
        driver.save()
        return driver.folder / "checkpoints" / f"step-{driver.number}"

    def resume(self) -> "Trainer":
        """Continue a stopped run from its last checkpoint: loop over the trainer again."""
        self.close()
        self._result = None
        return self

    def close(self) -> None:
        """Write a checkpoint of the last step if it has none, and release the run folder."""
        driver = self._driver
        if driver is None or self._stack is None:
            return
        if driver.number == driver.start or self._steps is None:
            self._release(None, None, None)
            return
        driver.interrupt.requested = True
        for _ in self._steps:
            pass
        self._finish(driver)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- opening and closing

    def _open_driver(self) -> Driver:
        if self._driver is not None:
            return self._driver
        if self._result is not None:
            raise RunError("the run has ended; trainer.resume() continues a run that was stopped")
        with kept_threads(), ExitStack() as stack:
            stack.enter_context(self._request.stored())
            started = run_warmup(self._request.config, self._make_display())
            if isinstance(started, Result):
                self._result = started
                raise _WarmupStopped(f"the warm-up run was stopped at step {started.step}")
            callbacks = CallbackReporter(self, self._callbacks)
            reporter = MultiReporter(self._make_display(), callbacks)
            self._driver = stack.enter_context(open_driver(started, reporter))
            self._config = self._driver.config
            self._steps = self._driver.steps()
            try:
                callbacks.begin()
            except BaseException:
                self._driver = self._steps = None
                raise
            self._stack = stack.pop_all()
        return self._driver

    def _make_display(self) -> Reporter:
        return make_reporter() if self._progress else Reporter()

    def _finish(self, driver: Driver) -> None:
        """Keep the result of a run that ended, and release what it held."""
        self._result = driver.result()
        self._release(None, None, None)
        if self._result.start == self._result.step > 0 and not self._result.interrupted:
            self._note_untrained(self._result)
        left = self._result.step < self._result.num_steps
        if self._progress and self._result.interrupted and left:
            print_line(
                f"saved at step {self._result.step} of {self._result.num_steps} in "
                f"{self.folder}; the same call continues it"
            )

    def _note_untrained(self, result: Result) -> None:
        """Say that the run was finished before; without progress only if its files changed."""
        note = run.untrained_note(self.config, result)
        if self._progress:
            print_line(note)
        elif run.changed_inputs(self.folder, self.config):
            warnings.warn(f"{self.folder}: {note}", stacklevel=2)

    def _release(self, *error: Any) -> None:
        stack = self._stack
        self._stack = self._driver = self._steps = None
        if stack is not None:
            stack.__exit__(*error)


@with_arguments_of(Trainer)
def train(*arguments: Any, **named: Any) -> Run:
    """Train a model and return the run.

    It does what `postgrad train RECIPE key=value ...` does, with the same files and the same
    numbers. The same call continues a run that was stopped; a run that is done is returned at once.

        def reward(response, problem):
            return float(response.strip() == problem.ground_truth)

        run = postgrad.train(
            "grpo",
            model="Qwen/Qwen3-0.6B",
            data=[{"prompt": "2+2=", "ground_truth": "4"}, ...],
            reward=reward,
            steps=200,
            group_size=8,
            lr=1e-6,
        )
        run.metrics                   # a pandas DataFrame
        run.generate("3+3=")

    Args:
        recipe: a recipe of `postgrad recipes`, or a YAML file.
        model: a path, a hub id, or a transformers model in memory: `(model, tokenizer)`. A model in
            memory is copied into the run folder and is not changed.
        tokenizer: the tokenizer of a model in memory, if `model` is not a pair.
        data: training problems: a list of dicts, a pandas or polars frame, a datasets.Dataset, a
            file, or a hub id `owner/name[:split]`. Columns as in docs/data.md. Rows in memory are
            copied into the run folder.
        validation: held-out problems in the same forms; a dict gives names to several sets.
        reward: a verifier's name, or a function `(response, problem)` that returns a number, a
            bool, a Score, or a dict with "score"; also `async def`, a closure, or an object with
            `score(problems, responses)`; or a list of these, which are added. Functions run in this
            process.
        reward_weights: one factor per reward of a list.
        method: a class derived from postgrad.methods.method.Method, or a method's name.
        steps: number of training steps.
        group_size: responses per problem.
        batch_size: problems per step.
        lr: learning rate.
        max_tokens: longest response in tokens.
        temperature: sampling temperature.
        seed: random seed.
        name: name of the run folder. Rows, models and functions given as Python objects need one.
            Without them it is by default the recipe's name and a hash of all arguments.
        runs: folder of the run folders.
        callbacks: postgrad.Callback objects, or functions that are called with each step.
        progress: show a panel in a notebook or a terminal, one line per step elsewhere.
        settings: any setting by its full name: {"optimizer.betas": [0.9, 0.95]}.
        **more: any setting by the last part of its name: kl_coef=0.01, validate_every=10, loss=...,
            advantage=..., tools=[...]. Functions and classes are welcome as values.

    Raises:
        ConfigError: an argument is wrong; nothing was written.
        RunError: the run cannot go on; the last checkpoint is complete.
    """
    return Trainer(*arguments, **named).train()

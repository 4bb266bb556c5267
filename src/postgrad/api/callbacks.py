"""Callbacks of a training run."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from postgrad.errors import UnknownName, WrongValue, did_you_mean
from postgrad.training.report import Reporter
from postgrad.training.result import StepResult
from postgrad.types import Batch


class TrainerControl(Protocol):
    """What a callback may read and change of the Trainer that calls it."""

    @property
    def lr(self) -> float:
        """The peak learning rate; setting it changes the steps that follow."""
        ...

    @lr.setter
    def lr(self, value: float) -> None: ...

    @property
    def folder(self) -> Path:
        """The run folder."""
        ...

    @property
    def step(self) -> int:
        """The last finished step."""
        ...

    def stop(self) -> None:
        """End the run after the current step."""
        ...


class Callback:
    """Receives the events of a run. Override what you need; the names are those of TRL.

    The trainer can be stopped (`trainer.stop()`) and its learning rate changed (`trainer.lr`).
    An exception in a callback stops the run; the last checkpoint stays.
    """

    def on_train_begin(self, trainer: TrainerControl) -> None:
        """Act before the first step.

        `trainer.step` is the step that a resumed run continues after.
        """

    def on_step_end(self, trainer: TrainerControl, step: StepResult) -> None:
        """Act after a step, before its validation and its checkpoint."""

    def on_evaluate(self, trainer: TrainerControl, step: int, metrics: dict[str, float]) -> None:
        """Act after the validation of step `step`."""

    def on_save(self, trainer: TrainerControl, checkpoint: Path) -> None:
        """Act when a checkpoint is complete."""

    def on_train_end(self, trainer: TrainerControl) -> None:
        """Act when the run ends without an error: at its last step, at its goal, or on request."""


class _FunctionCallback(Callback):
    """Calls a function with each step."""

    def __init__(self, function: Callable[[StepResult], Any]) -> None:
        self.function = function

    def on_step_end(self, trainer: TrainerControl, step: StepResult) -> None:
        self.function(step)


def check_callbacks(callbacks: Sequence[Any]) -> list[Callback]:
    """Return callbacks; a function is called with each step. Raises ConfigError."""
    if not isinstance(callbacks, list | tuple):
        raise WrongValue("callbacks must be a list; write callbacks=[callback]", at="callbacks")
    checked: list[Callback] = []
    for callback in callbacks:
        if isinstance(callback, type):
            name = callback.__name__
            raise WrongValue(
                f"callbacks has the class {name}; give an object: {name}()", at="callbacks"
            )
        is_function = callable(callback) and not hasattr(callback, "on_step_end")
        if not (isinstance(callback, Callback) or is_function):
            raise WrongValue(
                f"callbacks has a {type(callback).__name__}; give a postgrad.Callback (those of "
                "transformers take other arguments), or a function that takes a step",
                at="callbacks",
            )
        checked.append(callback if isinstance(callback, Callback) else _FunctionCallback(callback))
        _check_names(checked[-1])
    return checked


def _check_names(callback: Callback) -> None:
    """Raise ConfigError for a method `on_...` that no run calls."""
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for name in dir(callback):
        if name.startswith("on_") and name not in events:
            raise UnknownName(
                f"{type(callback).__name__}.{name} is never called: there is no such event; "
                f"{did_you_mean(name, events)}",
                at="callbacks",
            )


class CallbackReporter(Reporter):
    """Passes the events of a run to callbacks."""

    def __init__(self, trainer: TrainerControl, callbacks: Sequence[Callback]) -> None:
        # Not a strong reference: a trainer that nobody holds any more releases its run folder.
        self.trainer: TrainerControl = weakref.proxy(trainer)
        self.callbacks = callbacks

    def begin(self) -> None:
        """Call on_train_begin, once the trainer has its driver."""
        for callback in self.callbacks:
            callback.on_train_begin(self.trainer)

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        step = StepResult(int(metrics["step"]), batch, metrics)
        for callback in self.callbacks:
            callback.on_step_end(self.trainer, step)

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        for callback in self.callbacks:
            callback.on_evaluate(self.trainer, number, metrics)

    def saved(self, path: Path) -> None:
        for callback in self.callbacks:
            callback.on_save(self.trainer, path)

    def ended(self, reached: bool, interrupted: bool) -> None:
        for callback in self.callbacks:
            callback.on_train_end(self.trainer)

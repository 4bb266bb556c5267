"""Checks what a stage of a method left behind, so that a mistake in it is one line."""

import inspect
from typing import Any

import torch
from torch import Tensor

from postgrad.errors import ConfigError, RunError
from postgrad.methods.method import Method
from postgrad.methods.step import Stage, Step
from postgrad.training.log import returned, stage_name, timed
from postgrad.training.memory import explained_memory_errors
from postgrad.types import Batch


def check_stages(method: Method) -> None:
    """Raise ConfigError for a stage that cannot be timed and called with the work and the step."""
    for stage in [*method.sampling_stages(), *method.learning_stages()]:
        name = getattr(stage, "__name__", "")
        if not name:
            raise ConfigError(f"the stage {stage!r} has no name; use a method of the class")
        try:
            inspect.signature(stage).bind(None, None)
        except TypeError as error:
            raise ConfigError(
                f"method={method.config.method.name}: {name}{inspect.signature(stage)} cannot be "
                f"called as {name}(batch, step); define it with self and these two arguments"
            ) from error


def run_stage(stage: Stage, work: Any, step: Step, policy: Any) -> Any:
    """Return the checked result of a stage; its time becomes the metric stage/NAME_s.

    An error for lack of memory says what the `policy` holds.
    """
    name = stage.__name__
    with timed(step, name), explained_memory_errors(name, policy):
        work = returned(stage(work, step), stage)
    check_stage(work, step, stage)
    return work


def check_stage(work: Any, step: Step, stage: Stage) -> None:
    """Check the metrics and the batch after a stage. Rewards of another type become floats.

    Raises RunError.
    """
    for metric, value in step.metrics.items():
        _check_metric(metric, value, stage)
    if not isinstance(work, Batch):
        return
    if not len(work):
        raise RunError(f"{stage_name(stage)} returned a batch without rows; keep at least one")
    for name in work.rows:
        if name == "reward" or name.startswith("reward/"):
            work.rows[name] = _as_floats(work, name, stage)
        else:
            _check_row_column(name, work.rows[name], stage)
    for name, column in work.tokens.items():
        if not isinstance(column, Tensor):
            raise RunError(
                f"the token column {name} after {stage_name(stage)} is a {type(column).__name__}; "
                "make it a tensor with one number per token"
            )
        if column.dtype in (torch.bfloat16, torch.float16):
            raise RunError(
                f"the token column {name} after {stage_name(stage)} is {column.dtype}, which "
                "rollouts cannot hold; add .float()"
            )
    _check_advantages(work, stage)
    _check_finite(work, stage)


def _check_metric(name: str, value: Any, stage: Stage) -> None:
    try:
        is_number = not isinstance(value, str) and isinstance(float(value), float)
    except (TypeError, ValueError, RuntimeError):
        is_number = False
    if not is_number:
        shown = type(value).__name__
        raise RunError(
            f'step.metrics["{name}"] after {stage_name(stage)} is a {shown}; a metric is one number'
        )


def _check_row_column(name: str, column: Any, stage: Stage) -> None:
    """Raise RunError for a column that other processes and the files of rollouts cannot hold."""
    place = f"the row column {name} after {stage_name(stage)}"
    if not isinstance(column, Tensor | list | tuple):
        raise RunError(
            f"{place} is a {type(column).__name__}; make it a tensor or a list with one entry per "
            "row"
        )
    if isinstance(column, Tensor):
        return
    kinds = {"number" if isinstance(one, int | float) else type(one).__name__ for one in column}
    if len(kinds - {"NoneType"}) > 1:
        raise RunError(f"{place} has entries of several types: {', '.join(sorted(kinds))}")


def _as_floats(batch: Batch, name: str, stage: Stage) -> Tensor:
    """Return (rows,) a reward column that may be a list or an array."""
    values = batch.rows[name]
    place = f"the column {name} after {stage_name(stage)}"
    if not isinstance(values, Tensor) or not values.is_floating_point():
        try:
            values = torch.as_tensor(values, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RunError(
                f"{place} has values that are not numbers; give one number per row"
            ) from error
    if values.shape != (len(batch),):
        raise RunError(
            f"{place} has the shape {tuple(values.shape)}; give one number per row: ({len(batch)},)"
        )
    return values


def _check_advantages(batch: Batch, stage: Stage) -> None:
    advantages = batch.tokens.get("advantages")
    if advantages is None:
        return
    if not advantages.is_floating_point() or advantages.ndim != 1:
        dtype = str(advantages.dtype).removeprefix("torch.")
        raise RunError(
            f"the token column advantages after {stage_name(stage)} has the type {dtype} and the "
            f"shape {tuple(advantages.shape)}; give one float per token: ({batch.num_tokens},)"
        )


def _check_finite(batch: Batch, stage: Stage) -> None:
    """Raise RunError if a stage set rewards or advantages that are not numbers."""
    columns = {"rewards": batch.rows.get("reward"), "advantages": batch.tokens.get("advantages")}
    for name, values in columns.items():
        if values is None:
            continue
        wrong = ~values.isfinite()
        if bool(wrong.any()):
            raise RunError(
                f"{int(wrong.sum())} of {len(wrong)} {name} after {stage_name(stage)} are not "
                "finite numbers; look at method.advantage and the rewards"
            )

"""Runs one stage of a step: times it, and checks what it leaves to the next one.

A mistake in a user's method is one line that names the stage, the file and the line.
"""

import inspect
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.errors import RunError, UserCode
from postgrad.methods.method import Method
from postgrad.methods.step import Stage, Step
from postgrad.rollout.engine import trajectory_seed
from postgrad.training.memory import explained_memory_errors
from postgrad.types import Batch, ColumnError
from postgrad.user_code import place_of, user_error

PROFILE_ROWS = 40  # of the table


def check_stages(method: Method) -> None:
    """Raise ConfigError for a stage that cannot be timed and called with the work and the step."""
    for stage in [*method.sampling_stages(), *method.learning_stages()]:
        name = getattr(stage, "__name__", "")
        if not name:
            raise UserCode(
                f"the stage {stage!r} has no name; use a method of the class", at="method"
            )
        try:
            inspect.signature(stage).bind(None, None)
        except TypeError as error:
            raise UserCode(
                f"method={method.config.method.name}: {name}{inspect.signature(stage)} cannot be "
                f"called as {name}(batch, step); define it with self and these two arguments"
            ) from error


def seed_step(run_seed: int, number: int) -> None:
    """Seed the global generators, so that a method which uses them draws the same when resumed."""
    seed = trajectory_seed(run_seed, number, "step", 0)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def run_stage(stage: Stage, work: Any, step: Step, policy: Any) -> Any:
    """Return the checked result of a stage; its time becomes the metric stage/NAME_s.

    An error for lack of memory says what the `policy` holds.
    """
    name = stage.__name__
    with timed(step, name), explained_memory_errors(name, policy):
        work = stage(work, step)
        if work is None:
            raise RunError(
                f"{stage_name(stage)} returned None, but the next stage takes its result; end it "
                "with return batch"
            )
    check_result(work, step, stage_name(stage))
    return work


@contextmanager
def timed(step: Step, name: str) -> Iterator[None]:
    """Write the time of a stage to the step's metrics as stage/NAME_s.

    Errors of the block get the number of the step and the name of the stage.
    """
    started = time.perf_counter()
    try:
        with torch.profiler.record_function(name):
            yield
    except (RunError, ColumnError) as error:
        place = place_of(error) if isinstance(error, ColumnError) else ""
        raise RunError(f"step {step.number}, stage {name}: {error}{place}") from error
    except Exception as error:
        if text := user_error(error):
            raise RunError(f"step {step.number}, stage {name}: {text}") from error
        error.add_note(f"in step {step.number}, stage {name}")
        raise
    metric = f"stage/{name.removeprefix('compute_')}_s"
    step.metrics[metric] = time.perf_counter() - started


def stage_name(stage: Stage) -> str:
    """Return the class and the name of a stage, such as Grpo.score."""
    name = getattr(stage, "__qualname__", None) or getattr(stage, "__name__", repr(stage))
    return name.rpartition("<locals>.")[2]


def final_batch(method: Method, work: Any, step: Step) -> Batch:
    """Return the result of a step's last stage. Raises RunError if it is not a batch."""
    if not isinstance(work, Batch):
        raise RunError(
            f"step {step.number}: the last learning stage returned a {type(work).__name__}; "
            "return the batch"
        )
    return work


# ---- what a stage leaves


def check_result(work: Any, step: Step, stage: str) -> None:
    """Raise RunError for metrics and columns that cannot be logged, sent or trained on.

    Rewards of another type become floats.
    """
    for name, value in step.metrics.items():
        if not _is_number(value):
            kind = type(value).__name__
            raise RunError(
                f'step.metrics["{name}"] after {stage} is a {kind}; a metric is one number'
            )
    if not isinstance(work, Batch):
        return
    if not len(work):
        raise RunError(f"{stage} returned a batch without rows; keep at least one")
    for name, column in work.rows.items():
        if name == "reward" or name.startswith("reward/"):
            work.rows[name] = _as_floats(column, len(work), f"the column {name} after {stage}")
        else:
            _check_row_column(column, f"the row column {name} after {stage}")
    for name, column in work.tokens.items():
        _check_token_column(column, f"the token column {name} after {stage}")
    advantages = work.tokens.get("advantages")
    if advantages is not None and not (advantages.is_floating_point() and advantages.ndim == 1):
        dtype = str(advantages.dtype).removeprefix("torch.")
        raise RunError(
            f"the token column advantages after {stage} has the type {dtype} and the shape "
            f"{tuple(advantages.shape)}; give one float per token: ({work.num_tokens},)"
        )
    _check_finite("rewards", work.rows.get("reward"), stage)
    _check_finite("advantages", advantages, stage)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and isinstance(float(value), float)
    except (TypeError, ValueError, RuntimeError):
        return False


def _check_row_column(column: Any, place: str) -> None:
    """Raise RunError for a column that other processes and the files of rollouts cannot hold."""
    if isinstance(column, Tensor):
        return
    if not isinstance(column, list | tuple):
        raise RunError(
            f"{place} is a {type(column).__name__}; make it a tensor or a list with one entry per "
            "row"
        )
    kinds = {"number" if isinstance(one, int | float) else type(one).__name__ for one in column}
    if len(kinds - {"NoneType"}) > 1:
        raise RunError(f"{place} has entries of several types: {', '.join(sorted(kinds))}")


def _check_token_column(column: Any, place: str) -> None:
    if not isinstance(column, Tensor):
        raise RunError(
            f"{place} is a {type(column).__name__}; make it a tensor with one number per token"
        )
    if column.dtype in (torch.bfloat16, torch.float16):
        raise RunError(f"{place} is {column.dtype}, which rollouts cannot hold; add .float()")


def _as_floats(values: Any, num_rows: int, place: str) -> Tensor:
    """Return (rows,) a reward column that may be a list or an array."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        try:
            values = torch.as_tensor(values, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RunError(
                f"{place} has values that are not numbers; give one number per row"
            ) from error
    if values.shape != (num_rows,):
        raise RunError(
            f"{place} has the shape {tuple(values.shape)}; give one number per row: ({num_rows},)"
        )
    return values


def _check_finite(name: str, values: Tensor | None, stage: str) -> None:
    if values is not None and (num_wrong := int((~values.isfinite()).sum())):
        raise RunError(
            f"{num_wrong} of {len(values)} {name} after {stage} are not finite numbers; look at "
            "method.advantage and the rewards"
        )


# ---- profiles


@contextmanager
def profiled(
    folder: Path, number: int, steps: list[int], note: Callable[[str], None]
) -> Iterator[None]:
    """Profile the block if `number` is in `steps`.

    Writes profile/step-N.json.gz (the trace) and profile/step-N.txt (the table) in the run
    folder; both name the stages. A profile that cannot be written is a note, not an error.
    """
    if number not in steps:
        yield
        return
    from torch.profiler import ProfilerActivity, profile, supported_activities

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # no log lines of the profiler
    activities = supported_activities()
    with profile(activities=activities) as profiler:
        yield
    on_cpu_only = activities == {ProfilerActivity.CPU}
    order = "self_cpu_time_total" if on_cpu_only else "self_device_time_total"
    trace = folder / "profile" / f"step-{number}.json.gz"
    table = folder / "profile" / f"step-{number}.txt"
    try:
        trace.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        table.write_text(profiler.key_averages().table(sort_by=order, row_limit=PROFILE_ROWS))
    except OSError as error:
        note(f"the profile of step {number} could not be written: {error.strerror}")
        return
    note(f"profile of step {number}: {table}; open {trace.name} beside it in ui.perfetto.dev")

"""`postgrad doctor --fit`: whether a run fits into memory and on the disk, and how long it takes.

Responses are assumed to have their maximum length, so memory and disk are upper bounds for models
that stop earlier.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from postgrad.config.schema import Config
from postgrad.data.encode.encoder import EncodedRow, Encoder
from postgrad.data.problem_queue import ProblemQueue
from postgrad.doctor.machine import disk_free, memory_bytes
from postgrad.doctor.rehearsal import Rehearsal, rehearse
from postgrad.doctor.report import Report, gib
from postgrad.errors import Missing, RunError, Unsupported
from postgrad.methods.method import Ports, Step
from postgrad.model.device import (
    DTYPES,
    describe_device,
    has_own_memory,
    memory_info,
    peak_memory_bytes,
)
from postgrad.model.load.load import model_config
from postgrad.model.passes.support import CAPTURED_FAMILIES
from postgrad.phases import duration
from postgrad.sizing.choose import largest_settings, suggest_settings
from postgrad.sizing.devices import Device, make_gpu
from postgrad.sizing.memory import Memory, estimate, is_captured, state_bytes
from postgrad.sizing.simulate import ModelSize, measure_size
from postgrad.sizing.workload import (
    NO_PICTURES,
    GroupLengths,
    PictureSizes,
    Plan,
    StepLayout,
    Workload,
    lay_out_step,
    runs_packed,
)
from postgrad.training.prepare import Prepared, prepare
from postgrad.training.resolve import local_roles

ROLLOUT_BYTES = 10  # of rollouts/ per token: compressed parquet; measured 8 to 9


@dataclass(frozen=True)
class Fit:
    """What one run needs and what the device has."""

    plan: Plan
    size: ModelSize
    layout: StepLayout
    memory: Memory
    device: Device
    planned: bool = False  # this machine need not have the device
    suggestions: list[tuple[str, int]] = field(default_factory=list)  # (setting, bytes saved)
    largest: dict[str, int] = field(default_factory=dict)  # settings by the largest value that fits
    rehearsal: Rehearsal | None = None
    failure: str = ""  # why the rehearsal ended early

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.device.usable


def check_fit(config: Config, planned: Device | None = None) -> Report:
    """Prepare the run as `postgrad train` does, then estimate, and rehearse it if it fits.

    Args:
        config: of the run.
        planned: plan the run for this GPU; None: this machine.

    Raises:
        ConfigError: for everything that `postgrad train` would refuse before it loads the model,
            and for runs on Ray.
    """
    if config.cluster.backend == "ray":
        raise Unsupported(
            "doctor --fit estimates one device; leave cluster=ray out, and see "
            "docs/machines.md#memory-per-device for what a mesh divides",
            at="--fit",
        )
    run = prepare(config, planned)
    run.scorer.close()
    config = run.config
    model = model_config(config.model, config.seed)
    packed = runs_packed(config, model)
    if planned and not packed:
        raise Unsupported(
            f"--device {planned.name} plans dense models of the types "
            f"{', '.join(CAPTURED_FAMILIES)}, and model.path={config.model.path} is "
            f"{model.get_text_config().model_type}; run postgrad doctor --fit on the GPU itself, "
            "without --device"
        )
    plan = Plan(config, model, read_workload(run), local_roles(config, run.method), packed)
    return describe(examine(plan, planned or this_device(config), planned is not None))


def examine(plan: Plan, device: Device, planned: bool) -> Fit:
    """Estimate the run and, if it fits into this machine, rehearse it."""
    config = plan.config
    memory = estimate(plan, device)
    suggestions: list[tuple[str, int]] = []
    largest: dict[str, int] = {}
    rehearsal = None
    failure = ""
    if memory.peak > device.usable:
        suggestions = suggest_settings(plan, device)
    else:
        if plan.packed:
            largest = largest_settings(plan, device)
        if not planned:
            has_given_rows = any(group.given for group in plan.workload.groups)
            may_shorten = not has_given_rows and not getattr(config.method, "max_refills", 0)
            try:
                rehearsal = rehearse(config, may_shorten)
            except RunError as error:
                failure = str(error)
    size = measure_size(config, plan.model)
    layout = lay_out_step(plan)
    return Fit(
        plan, size, layout, memory, device, planned, suggestions, largest, rehearsal, failure
    )


def read_workload(run: Prepared) -> Workload:
    """Return the lengths of the first step, composed by the method. Nothing is sampled.

    Raises ConfigError if the data lack what the method needs.
    """
    config = run.config
    method = run.method
    engine: Any = SimpleNamespace(shares_weights=config.cluster.engines == 0)
    method.bind(Ports(None, engine, run.scorer, run.encoder))  # type: ignore[arg-type]
    step = Step(1, ProblemQueue(run.train, config.seed, config.data.shuffle))
    try:
        composed = method.compose(method.draw(None, step), step)
    except RunError as error:
        raise Missing(str(error), at="data.train") from error
    groups: list[GroupLengths] = []
    for group in composed:
        row = method.encode_row(run.encoder, group.problem)
        given = tuple(len(trajectory.response) for trajectory in group.given_rows)
        lengths = (len(row.prompt), given, group.num_samples, method.traits.rows_per_loss)
        groups.append(GroupLengths(*lengths, count_image_tokens(run.encoder, row)))
    rows = [method.encode_row(run.encoder, problem) for problem in [*run.train, *run.held_out]]
    longest = max(len(row.prompt) for row in rows)
    num_validation = len(run.held_out) if method.needs_verifier() else 0
    return Workload(groups, longest, num_validation, picture_sizes(run.encoder, rows))


def count_image_tokens(encoder: Encoder, row: EncodedRow) -> int:
    """Return how many tokens of a row stand for its pictures."""
    return encoder.picture_processor.num_tokens(row.images) if row.images else 0


def picture_sizes(encoder: Encoder, rows: Sequence[EncodedRow]) -> PictureSizes:
    """Return the sizes of all pictures; the first one is read."""
    shown = [row for row in rows if row.images]
    if not shown:
        return NO_PICTURES
    tokens = sum(count_image_tokens(encoder, row) for row in shown)
    bytes_per_token = encoder.picture_processor.bytes_per_token(shown[0].images[0])
    return PictureSizes(tokens, bytes_per_token)


# ---- this machine


def this_device(config: Config) -> Device:
    """Return the device of the run with its free memory, and what this process holds of it."""
    device = torch.device(config.model.device)
    if has_own_memory(device):
        return make_gpu(describe_device(device), memory_info(device)[0])
    process = resident_bytes()
    kernel = kernel_bytes(config.model.dtype) if device.type == "cpu" else 0
    return Device(config.model.device, memory_bytes()[1] + process, process, kernel)


def kernel_bytes(dtype: str) -> int:
    """Return the bytes that a matrix product of a new shape keeps on the CPU.

    In bfloat16 on CPUs with matrix tiles oneDNN keeps code for every shape, up to 1 MiB.
    In float32 it keeps none.
    """
    rows = torch.zeros(1024, 512, dtype=DTYPES[dtype])
    weight = torch.zeros(512, 1024, dtype=DTYPES[dtype])
    result = torch.zeros(1024, 1024, dtype=DTYPES[dtype])

    def multiply(shapes: range) -> None:
        for num_rows in shapes:
            torch.mm(rows[:num_rows], weight, out=result[:num_rows])

    multiply(range(1024, 768, -8))  # fills the free memory of the heap
    before = resident_bytes()
    shapes = range(768, 512, -8)
    multiply(shapes)
    return max(0, resident_bytes() - before) // len(shapes)


def resident_bytes() -> int:
    """Return the memory of this process now, or its peak if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_bytes(torch.device("cpu"))


# ---- disk


def checkpoint_bytes(plan: Plan) -> int:
    """Return the bytes of one checkpoint: weights and optimizer state of all trained models.

    Weights are written dequantized.
    """
    trained = [measure_size(plan.config, plan.model)]
    for kind, model in plan.roles.values():
        if kind == "critic":
            trained.append(measure_size(plan.config, model, adapters=False))
    total = 0
    for size in trained:
        state = sum(state_bytes(plan.config, size).values())
        total += size.parameters * size.bytes_each + state
    return total


def disk_bytes(plan: Plan, layout: StepLayout) -> int:
    """Return the largest size of the run folder.

    Counts the kept checkpoints, the best one, one that is being written, and the rollouts.
    """
    training = plan.config.training
    keeps_best = bool(training.keep_best)
    num_saves = math.ceil(training.steps / training.checkpoint_every)
    if keeps_best:
        num_saves += training.steps // training.validate_every
    num_checkpoints = min(num_saves, training.keep_checkpoints + keeps_best + 1)
    rollouts = training.steps * layout.tokens * ROLLOUT_BYTES
    return num_checkpoints * checkpoint_bytes(plan) + rollouts


# ---- rows to read


def describe(result: Fit) -> Report:
    """Return the needs of the run and what the machine has, as rows and problems."""
    config = result.plan.config
    model = config.model
    size = result.size
    report = Report()
    report.add("model", f"{model.path}: {size.parameters:,} parameters in {size.blocks} blocks")
    threads = f", {model.threads} threads" if model.device == "cpu" else ""
    report.add("computes on", f"{result.device.name}, {model.dtype}{threads}")
    _describe_memory(report, result)
    if result.planned:
        captured = is_captured(result.plan, size, result.layout.largest_pass.tokens)
        report.add("passes", f"packed, {'captured as graphs' if captured else 'kernel by kernel'}")
    elif result.rehearsal is not None:
        report.rows += result.rehearsal.paths
    if result.largest:
        values = ", ".join(f"{setting}={value}" for setting, value in result.largest.items())
        report.add("largest that fit", f"{values} (each alone)")
    tokens = result.layout.tokens
    total = tokens * config.training.steps
    rows = f"{result.layout.num_rows:,} rows"
    report.add("tokens", f"{tokens:,} per step in {rows}, {total:,} in total")
    _describe_time(report, result)
    _describe_disk(report, result)
    return report


def _describe_memory(report: Report, result: Fit) -> None:
    memory = result.memory
    verdict = "fits" if result.fits else "DOES NOT FIT"
    peak = f"{gib(memory.peak)} in the {memory.peak_phase}"
    problem = "" if result.fits else _memory_advice(result)
    report.add("peak memory", f"{peak}; {gib(result.device.usable)} available: {verdict}", problem)
    notes = {
        "activations": f"  ({result.layout.largest_pass.tokens:,} tokens in one pass)",
        "KV cache": f"  ({result.plan.decode_rows} rows)",
    }
    for name, size in {**memory.held, **memory.phases[memory.peak_phase]}.items():
        report.add(f"  {name}", f"{gib(size):>10}{notes.get(name, '')}")
    for phase, parts in memory.phases.items():
        if phase != memory.peak_phase:
            sizes = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
            report.add(f"  in the {phase}", f"{sizes}, at another time")


def _memory_advice(result: Fit) -> str:
    """Return what to change so that the run fits."""
    available = result.device.usable
    needed = f"{gib(result.memory.peak)} of memory needed, {gib(available)} available"
    state = sum(result.memory.held.values()) + 4 * result.size.parameters
    missing = result.memory.peak - available
    one_helps = any(saved >= missing for _, saved in result.suggestions)
    if state > available and not one_helps:
        return (
            f"{needed}: weights, gradients and optimizer alone take {gib(state)}; "
            "use a smaller model"
        )
    changes = [f"{setting} (saves {gib(saved)})" for setting, saved in result.suggestions]
    return f"{needed}: set, the most effective first, {', '.join(changes)}"


def _describe_time(report: Report, result: Fit) -> None:
    rehearsal = result.rehearsal
    if rehearsal is None:
        reason = "for a GPU that is not here" if result.planned else "because the run does not fit"
        report.add("time", result.failure or f"not measured {reason}", result.failure)
        return
    training = result.plan.config.training
    step_s = sum(rehearsal.step.values())
    stages = ", ".join(f"{name} {s:.2f} s" for name, s in rehearsal.step.items() if s >= 0.005)
    report.add("time per step", f"{step_s:.2f} s ({stages})")
    total_s = training.steps * step_s + num_validation_answers(result.plan) * rehearsal.response_s
    report.add("total time", f"{duration(total_s)} for {training.steps} steps and the validations")
    how = f"real steps on this machine, the last with {rehearsal.problems} of "
    how += f"{training.problems_per_step} problems"
    if result.layout.num_sampled:
        limit = result.plan.config.rollout.max_response_tokens
        how += (
            f" and responses of up to {rehearsal.tokens} tokens; {rehearsal.cut:.0%} of them "
            f"were cut off and count as {limit}"
        )
    report.add("measured by", how)
    if rehearsal.counts_all_rows:
        report.add("", "when every group has a learning signal; the update skips groups without")
    report.add("", "not included: checkpoints")


def num_validation_answers(plan: Plan) -> int:
    """Return how many responses all validations sample.

    They come before the first step, after the last and in between; each is greedy and sampled.
    """
    training = plan.config.training
    if training.validate_every:
        num_validations = 2 + (training.steps - 1) // training.validate_every
    else:
        num_validations = 2
    kinds = 2 if training.validation_temperature is None else 1
    return num_validations * kinds * plan.workload.num_validation * training.validation_samples


def _describe_disk(report: Report, result: Fit) -> None:
    config = result.plan.config
    needed = disk_bytes(result.plan, result.layout)
    free = disk_free(config.runs)
    report.add("checkpoint", gib(checkpoint_bytes(result.plan)))
    best = " and the best" if config.training.keep_best else ""
    kept = f"{config.training.keep_checkpoints} checkpoints{best}"
    problem = ""
    if needed > free:
        problem = (
            f"the run needs {gib(needed)} of disk, {gib(free)} are free: "
            "lower training.keep_checkpoints or choose runs=FOLDER"
        )
    contents = f"{kept} kept, one being written, and the rollouts"
    report.add("disk", f"{gib(needed)} at most ({contents}); {gib(free)} free", problem)

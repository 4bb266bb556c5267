"""`postgrad doctor --fit`: whether a run fits into memory and on the disk, and how long it takes.

No weights are loaded and nothing is written.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from postgrad.cluster.remote_roles import is_remote_role
from postgrad.config.schema import Config
from postgrad.doctor import fit, probe, simulate
from postgrad.doctor.machine import disk_free, memory_bytes
from postgrad.doctor.paths import describe_paths
from postgrad.doctor.plan import Plan, StepLayout, check_context, lay_out_step, read_workload
from postgrad.doctor.report import Report, gib
from postgrad.methods.base import Method
from postgrad.model.device import has_own_memory, memory_info
from postgrad.model.load import model_config
from postgrad.training import prepare
from postgrad.training.report import duration


@dataclass(frozen=True)
class Estimate:
    """What one run needs. The times are empty if the run does not fit into memory."""

    plan: Plan
    size: simulate.ModelSize
    layout: StepLayout
    memory: fit.Memory
    available: int  # bytes of memory
    suggestions: list[tuple[str, int]] = field(default_factory=list)  # (setting, bytes saved)
    step: dict[str, float] = field(default_factory=dict)  # seconds by stage
    half_length_step: dict[str, float] = field(default_factory=dict)  # with half the response
    total_s: float = 0.0

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.available


def estimate(config: Config) -> Estimate:
    """Prepare the run as `postgrad train` does, then simulate and measure instead of loading.

    Raises ConfigError for everything that `postgrad train` would refuse before it loads the model.
    """
    method = prepare.make_method(config)
    config = method.config
    inputs = prepare.load_inputs(config, method)
    model = model_config(config.model, config.seed)
    size = simulate.measure_size(config, model)
    device = torch.device(config.model.device)
    process = 0 if has_own_memory(device) else probe.resident_bytes()
    workload = read_workload(config, method, inputs)
    plan = Plan(config, model, workload, _local_roles(config, method))
    inputs.scorer.close()
    check_context(plan, size)
    kernel = probe.kernel_bytes(config.model.dtype) if device.type == "cpu" else 0
    result = Estimate(
        plan=plan,
        size=size,
        layout=lay_out_step(plan, config.rollout.max_response_tokens),
        memory=fit.estimate_memory(plan, process, kernel),
        available=_available_memory(device, process),
    )
    if not result.fits:
        return replace(result, suggestions=fit.suggest_settings(plan, process, kernel))
    return _with_times(result, [stage.__name__ for stage in method.stages()])


def _available_memory(device: torch.device, process: int) -> int:
    """Return the bytes that the run may use, including what this process already holds."""
    if has_own_memory(device):
        return memory_info(device)[0]
    return memory_bytes()[1] + process


def _with_times(result: Estimate, stages: list[str]) -> Estimate:
    """Measure this machine and add the times."""
    plan = result.plan
    rates = probe.measure_rates(plan, result.size)
    half_length = max(1, plan.config.rollout.max_response_tokens // 2)
    half_layout = lay_out_step(plan, half_length)
    step = fit.estimate_step(plan, stages, result.layout, rates)
    steps_s = plan.config.training.steps * sum(step.values())
    return replace(
        result,
        step=step,
        half_length_step=fit.estimate_step(plan, stages, half_layout, rates),
        total_s=steps_s + fit.estimate_validations(plan, rates),
    )


def _local_roles(config: Config, method: Method) -> dict[str, tuple[str, Any]]:
    """Return (kind, transformers configuration) of the models that load besides the policy."""
    roles: dict[str, tuple[str, Any]] = {}
    for name, role in method.all_roles().items():
        if not is_remote_role(role.path):
            model = replace(config.model, path=role.path or config.model.path)
            roles[name] = (role.kind, model_config(model, config.seed))
    return roles


# ---- as rows to read


def describe(result: Estimate) -> Report:
    """Return the needs of the run and what the machine has, as rows and problems."""
    config = result.plan.config
    model = config.model
    size = result.size
    report = Report()
    report.add("model", f"{model.path}: {size.parameters:,} parameters in {size.blocks} blocks")
    report.add("computes on", f"{model.device}, {model.dtype}, {model.threads} threads")
    _describe_memory(report, result)
    if result.fits:
        samples = bool(result.layout.num_sampled)
        describe_paths(report, config, result.plan.model, samples)
    tokens = result.layout.tokens
    total = tokens * config.training.steps
    rows = f"{result.layout.num_rows:,} rows"
    report.add("tokens", f"{tokens:,} per step in {rows}, {total:,} in total")
    _describe_time(report, result)
    _describe_disk(report, result)
    return report


def _describe_memory(report: Report, result: Estimate) -> None:
    memory = result.memory
    verdict = "fits" if result.fits else "DOES NOT FIT"
    peak = f"{gib(memory.peak)} in the {memory.peak_phase}"
    problem = "" if result.fits else _memory_advice(result)
    report.add("peak memory", f"{peak}; {gib(result.available)} available: {verdict}", problem)
    shape = " x ".join(map(str, result.layout.largest_pass.ids.shape))
    notes = {
        "activations": f"  ({shape} tokens in one pass)",
        "KV cache": f"  ({result.plan.decode_rows} rows)",
    }
    for name, size in {**memory.held, **memory.phases[memory.peak_phase]}.items():
        report.add(f"  {name}", f"{gib(size):>10}{notes.get(name, '')}")
    for phase, parts in memory.phases.items():
        if phase != memory.peak_phase:
            sizes = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
            report.add(f"  in the {phase}", f"{sizes}, at another time")


def _memory_advice(result: Estimate) -> str:
    """Return what to change so that the run fits."""
    needed = f"{gib(result.memory.peak)} of memory needed, {gib(result.available)} available"
    state = sum(result.memory.held.values()) + 4 * result.size.parameters
    if state > result.available:
        return (
            f"{needed}: weights, gradients and optimizer alone take {gib(state)}; "
            "use a smaller model"
        )
    changes = [f"{setting} (saves {gib(saved)})" for setting, saved in result.suggestions]
    return f"{needed}: set, the most effective first, {', '.join(changes)}"


def _describe_time(report: Report, result: Estimate) -> None:
    if not result.step:
        report.add("time", "not measured, because the run does not fit")
        return
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.step.items())
    report.add("time per step", f"{sum(result.step.values()):.2f} s at most ({stages})")
    layout = result.layout
    if layout.num_sampled:
        half = f"{sum(result.half_length_step.values()):.2f} s at half the length"
        length = f"{layout.sampled_tokens} tokens long"
        report.add("", f"with all responses {length} and every row trained on; {half}")
    steps = result.plan.config.training.steps
    total = duration(result.total_s)
    report.add("total time", f"{total} at most for {steps} steps and the validations")
    blocks = result.size.blocks
    report.add(
        "estimated by",
        f"timing 1 and 3 blocks in training and decoding on this machine, scaled to {blocks}",
    )
    report.add("", "not included: verifiers, refills, checkpoints")


def _describe_disk(report: Report, result: Estimate) -> None:
    config = result.plan.config
    needed = fit.disk_bytes(result.plan, result.layout)
    free = disk_free(config.runs)
    report.add("checkpoint", gib(fit.checkpoint_bytes(result.plan)))
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

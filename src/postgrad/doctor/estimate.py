"""`postgrad doctor --fit`: whether a run fits into memory and on the disk, and its time on a CPU.

No weights are loaded and nothing is written.
"""

from dataclasses import dataclass, field, replace

import torch

from postgrad.config.schema import Config
from postgrad.doctor import fit, probe
from postgrad.doctor.machine import memory_bytes
from postgrad.doctor.workload import read_workload
from postgrad.errors import ConfigError
from postgrad.model.device import describe_device, has_own_memory, memory_info
from postgrad.model.load.load import model_config
from postgrad.model.passes.support import CAPTURED_FAMILIES
from postgrad.sizing import simulate
from postgrad.sizing.devices import GpuSpec
from postgrad.sizing.gpu_memory import GpuEstimator
from postgrad.sizing.largest import largest_settings
from postgrad.sizing.memory import Memory
from postgrad.sizing.packed import runs_packed
from postgrad.sizing.plan import Plan, StepLayout, check_context, lay_out_step
from postgrad.sizing.suggest import suggest_settings
from postgrad.training.prepare import prepare
from postgrad.training.resolve import local_roles


@dataclass(frozen=True)
class Estimate:
    """What one run needs. The times are empty on a GPU, or if the run does not fit into memory."""

    plan: Plan
    size: simulate.ModelSize
    layout: StepLayout
    memory: Memory
    available: int  # bytes of memory
    suggestions: list[tuple[str, int]] = field(default_factory=list)  # (setting, bytes saved)
    largest: dict[str, int] = field(default_factory=dict)  # settings by the largest value that fits
    step: dict[str, float] = field(default_factory=dict)  # seconds by stage
    half_length_step: dict[str, float] = field(default_factory=dict)  # with half the response
    total_s: float = 0.0
    gpu: GpuSpec | None = None  # the estimate is for packed passes on this GPU
    planned: bool = False  # this machine need not have it

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.available


def estimate(config: Config, gpu: GpuSpec | None = None) -> Estimate:
    """Prepare the run as `postgrad train` does, then simulate and measure instead of loading.

    Args:
        config: of the run.
        gpu: plan the run for this GPU; None: this machine.

    Raises:
        ConfigError: for everything that `postgrad train` would refuse before it loads the model,
            and for runs on Ray.
    """
    if config.cluster.backend == "ray":
        raise ConfigError(
            "doctor --fit estimates one device; leave cluster=ray out, and see "
            "docs/machines.md#memory-per-device for what a mesh divides"
        )
    planned = gpu is not None
    run = prepare(config, gpu)
    run.scorer.close()
    config = run.config
    method = run.method
    model = model_config(config.model, config.seed)
    workload = read_workload(run)
    packed = runs_packed(config, model)
    plan = Plan(config, model, workload, local_roles(config, method), packed)
    size = simulate.measure_size(config, model)
    check_context(plan, size)
    stages = [stage.__name__ for stage in [*method.sampling_stages(), *method.learning_stages()]]
    if packed:
        return _estimate_gpu(plan, size, gpu or _find_gpu(config), planned)
    if gpu is not None:
        raise ConfigError(
            f"--device {gpu.name} plans dense models of the types {', '.join(CAPTURED_FAMILIES)}, "
            f"and model.path={config.model.path} is {model.get_text_config().model_type}; run "
            "postgrad doctor --fit on the GPU itself, without --device"
        )
    return _estimate_here(plan, size, stages)


def _find_gpu(config: Config) -> GpuSpec:
    """Return this machine's GPU with its free memory."""
    device = torch.device(config.model.device)
    return GpuSpec(describe_device(device), memory_info(device)[0])


def _estimate_gpu(plan: Plan, size: simulate.ModelSize, gpu: GpuSpec, planned: bool) -> Estimate:
    """Estimate the memory of a run of packed passes."""
    estimator = GpuEstimator(gpu)
    layout = lay_out_step(plan, plan.config.rollout.max_response_tokens)
    memory = estimator.estimate(plan)
    result = Estimate(plan, size, layout, memory, gpu.usable, gpu=gpu, planned=planned)
    if not result.fits:
        return replace(result, suggestions=suggest_settings(plan, estimator.estimate))
    return replace(result, largest=largest_settings(plan, estimator))


def _estimate_here(plan: Plan, size: simulate.ModelSize, stages: list[str]) -> Estimate:
    """Estimate a run by simulating padded passes and by timing small models on this machine."""
    config = plan.config
    device = torch.device(config.model.device)
    process = 0 if has_own_memory(device) else probe.resident_bytes()
    kernel = probe.kernel_bytes(config.model.dtype) if device.type == "cpu" else 0
    result = Estimate(
        plan=plan,
        size=size,
        layout=lay_out_step(plan, config.rollout.max_response_tokens),
        memory=fit.estimate_memory(plan, process, kernel),
        available=_available_memory(device, process),
    )
    if not result.fits:
        suggestions = suggest_settings(
            plan, lambda changed: fit.estimate_memory(changed, process, kernel)
        )
        return replace(result, suggestions=suggestions)
    return _with_times(result, stages)


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

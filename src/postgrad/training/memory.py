"""Out of memory as one line: the stage, what holds the memory, and the settings that help most."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from postgrad.errors import RunError
from postgrad.methods import find_method
from postgrad.model.device import (
    attached_memory_bytes,
    graph_memory_bytes,
    is_memory_error,
    memory_held,
    other_processes_bytes,
    requested_memory,
    total_memory_bytes,
)
from postgrad.training.run import MAY_CHANGE

if TYPE_CHECKING:
    from postgrad.model.policy import LocalPolicy
    from postgrad.sizing.plan import Plan

GIB = 2**30
# Which settings save most memory in a stage; other stages compute log-probs or gradients.
SAMPLING = "rollout.cache_gib to a fixed size or rollout.max_rows to fewer rows"
LOADING = "model.dtype=bfloat16 or optimizer.kind=adamw_offloaded"
PASSES = "model.activation_checkpointing=true, or training.token_budget to a smaller number"
# From this share of the GPU on, what other processes hold is named first; a context needs less.
MIN_OTHER_SHARE = 0.1
# If blocks are recomputed already.
LONG_PASSES = "training.token_budget to a smaller number"
ADVICE = {"sample": SAMPLING, "validate": SAMPLING, "load": LOADING, "save": LOADING}
# What the error names if it does not happen in a stage of a step, which the driver names.
ACTIVITIES = {"validate": " during the validation", "save": " while the checkpoint was written"}


@contextmanager
def explained_memory_errors(stage: str, policy: Any = None) -> Iterator[None]:
    """Turn an out-of-memory error, also one while a graph is captured, into a RunError of one line.

    Args:
        stage: of the step; or load, validate, save.
        policy: says what holds the memory, if it is in this process.
    """
    try:
        yield
    except RunError:  # is one line already
        raise
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not is_memory_error(error):
            raise
        raise RunError(explain(stage, _first_text(error), policy)) from error


def _first_text(error: BaseException) -> str:
    """Return the text of the error that others came from."""
    first = error
    while (earlier := first.__cause__ or first.__context__) is not None:
        first = earlier
    return str(first)


def explain(stage: str, text: str, policy: Any = None) -> str:
    """Return the line for an out-of-memory error with this text."""
    from postgrad.model.policy import LocalPolicy

    size = requested_memory(text)
    held = ""
    otherwise = ""
    advice = ADVICE.get(stage, PASSES)
    if isinstance(policy, LocalPolicy):
        device = policy.device
        parts = memory_parts(policy)
        held = "; " + ", ".join(f"{name} {size:.1f} GiB" for name, size in parts.items())
        if advice == PASSES and policy.config.model.activation_checkpointing:
            advice = LONG_PASSES
        advice = estimated_advice(stage, policy) or advice
        others = describe_others(other_processes_bytes(device), total_memory_bytes(device))
        held += others
        otherwise = "otherwise " if others else ""
    activity = ACTIVITIES.get(stage, "")
    return (
        f"out of memory{activity}{size}{held}; {otherwise}set {advice}; "
        "the same command then continues"
    )


def describe_others(others: int, total: int) -> str:
    """Return what to do about the memory that other processes hold; "" if that is little."""
    if others < MIN_OTHER_SHARE * total:
        return ""
    return (
        f"; other processes hold {others / GIB:.1f} of the GPU's {total / GIB:.1f} GiB "
        "(nvidia-smi lists them): stop those that are not of this run, or choose another GPU with "
        "CUDA_VISIBLE_DEVICES"
    )


def estimated_advice(stage: str, policy: "LocalPolicy") -> str:
    """Return the two settings that save most where the stage failed; "" without an estimate.

    They are of those with which a run may continue.
    """
    from postgrad.sizing.choose import plan_of_settings
    from postgrad.sizing.devices import GpuSpec
    from postgrad.sizing.gpu_memory import GpuEstimator
    from postgrad.sizing.memory import Memory
    from postgrad.sizing.packed import runs_packed
    from postgrad.sizing.suggest import suggest_settings
    from postgrad.training.resolve import row_kinds

    config = policy.config
    model_config = policy.model.config
    if stage in ("load", "save") or not runs_packed(config, model_config):
        return ""
    phase = "rollout" if ADVICE.get(stage) == SAMPLING else "update"
    method = find_method(config.method.name)(config)
    plan = plan_of_settings(config, model_config, {}, row_kinds(method))
    gpu = GpuSpec(policy.device.type, total_memory_bytes(policy.device))
    estimator = GpuEstimator(gpu)

    def phase_alone(changed: "Plan") -> Memory:
        memory = estimator.estimate(changed)
        return Memory(memory.held, {phase: memory.phases.get(phase, {})})

    try:
        suggestions = suggest_settings(plan, phase_alone)
    except RunError:  # a model that cannot be simulated
        return ""
    best: list[str] = []
    for setting, saved in suggestions:
        if setting.partition("=")[0] in MAY_CHANGE:
            best.append(f"{setting} (saves {saved / GIB:.1f} GiB)")
    return " or ".join(best[:2])


def memory_parts(policy: "LocalPolicy") -> dict[str, float]:
    """Return GiB on the policy's device by what holds them."""
    from postgrad.model.quantized import quantized_modules

    device = policy.device
    optimizer = policy.optimizer
    weights = sum(p.nbytes for p in policy.model.parameters())
    weights += sum(m.quantized.nbytes for m in quantized_modules(policy.model).values())
    state = sum(t.nbytes for t in optimizer.tensors().values() if t.device.type == device.type)
    gradients = sum(m.grad.nbytes for m in optimizer.masters.values() if m.grad is not None)
    parts = {"weights": weights, "optimizer state": state, "gradients": gradients}
    if total := memory_held(device):
        cache = attached_memory_bytes()
        parts["activations and others"] = max(0, total - cache - sum(parts.values()))
        parts["KV cache"] = cache
        parts["captured graphs"] = graph_memory_bytes()
    return {name: size / GIB for name, size in parts.items()}

"""Out of memory as one line: the stage, what holds the memory, and the setting that helps most."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.config.compose import to_yaml
from postgrad.config.schema import Config
from postgrad.config.stored import CONFIG_FILE
from postgrad.errors import RunError
from postgrad.files import atomic_write_text
from postgrad.model.device import (
    attached_memory_bytes,
    graph_memory_bytes,
    is_memory_error,
    memory_held,
    other_processes_bytes,
    requested_memory,
    total_memory_bytes,
)

if TYPE_CHECKING:
    from postgrad.model.policy import LocalPolicy

GIB = 2**30
# Which settings save most memory in a stage; other stages compute log-probs or gradients.
SAMPLING = "rollout.cache_gib to a fixed size or rollout.max_rows to fewer rows"
LOADING = "model.dtype=bfloat16 or optimizer.kind=adamw_offloaded"
PASSES = "model.activation_checkpointing=true, or training.token_budget to a smaller number"
LONG_PASSES = "training.token_budget to a smaller number"  # if blocks are recomputed already
ADVICE = {"sample": SAMPLING, "validate": SAMPLING, "load": LOADING, "save": LOADING}
# What the error names if it does not happen in a stage of a step, which the driver names.
ACTIVITIES = {"validate": " during the validation", "save": " while the checkpoint was written"}
# From this share of the GPU on, what other processes hold is named first; a context needs less.
MIN_OTHER_SHARE = 0.1


class OutOfMemory(RunError):
    """A stage of the step, or another activity, needed more memory than there was."""

    def __init__(self, text: str, in_passes: bool) -> None:
        super().__init__(text)
        self.in_passes = in_passes  # a smaller training.token_budget needs less


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
        first: BaseException = error
        while (earlier := first.__cause__ or first.__context__) is not None:
            first = earlier
        raise OutOfMemory(explain(stage, str(first), policy), stage not in ADVICE) from error


@contextmanager
def halved_token_budget(folder: Path, given: Config, config: Config) -> Iterator[None]:
    """Store half of the token budget in the run's config.yaml if a pass is too large for memory.

    So the same command continues with smaller passes. A resumed run takes what is stored; that
    changes no gradient except by rounding. A budget that was given stays.

    Args:
        folder: of the run.
        given: the settings as a person gave them.
        config: the resolved ones.
    """
    try:
        yield
    except RunError as error:
        budget = config.training.token_budget // 2
        if given.training.token_budget or not budget or not _is_in_passes(error):
            raise
        smaller = replace(config, training=replace(config.training, token_budget=budget))
        atomic_write_text(folder / CONFIG_FILE, to_yaml(smaller))
        raise RunError(
            f"{error} with training.token_budget={budget}, half of the automatic one, which "
            f"{CONFIG_FILE} has now"
        ) from error


def _is_in_passes(error: BaseException | None) -> bool:
    """Return whether the error, or one that it came from, is for lack of memory in a pass."""
    while error is not None:
        if isinstance(error, OutOfMemory):
            return error.in_passes
        error = error.__cause__
    return False


def explain(stage: str, text: str, policy: Any = None) -> str:
    """Return the line for an out-of-memory error with this text."""
    from postgrad.model.policy import LocalPolicy

    held = ""
    action = "set"
    advice = ADVICE.get(stage, PASSES)
    if isinstance(policy, LocalPolicy):
        parts = memory_parts(policy)
        held = "; " + ", ".join(f"{name} {size:.1f} GiB" for name, size in parts.items())
        if advice == PASSES and policy.config.model.activation_checkpointing:
            advice = LONG_PASSES
        total = total_memory_bytes(policy.device)
        others = other_processes_bytes(policy.device)
        if others >= MIN_OTHER_SHARE * total:
            held += (
                f"; other processes hold {others / GIB:.1f} of the GPU's {total / GIB:.1f} GiB "
                "(nvidia-smi lists them): stop those that are not of this run, or choose another "
                "GPU with CUDA_VISIBLE_DEVICES"
            )
            action = "otherwise set"
    return (
        f"out of memory{ACTIVITIES.get(stage, '')}{requested_memory(text)}{held}; "
        f"{action} {advice}; the same command then continues"
    )


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

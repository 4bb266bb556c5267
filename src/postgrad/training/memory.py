"""Out of memory as one line: the stage, what holds the memory, and the settings that help most."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from postgrad.errors import RunError
from postgrad.model.device import memory_held, supports_state_streaming
from postgrad.model.policy import LocalPolicy
from postgrad.model.quantized import quantized_modules

GIB = 2**30
# Which settings save most memory in a stage; other stages compute log-probs or gradients.
SAMPLING = "rollout.cache_gib to a fixed size or rollout.max_rows to fewer rows"
LOADING = "model.dtype=bfloat16 or optimizer.kind=adamw_offloaded"
PASSES = "model.activation_checkpointing=true, or training.token_budget to a smaller number"
# If blocks are recomputed already.
LONG_PASSES = "model.activation_offload=true, or training.token_budget to a smaller number"
ADVICE = {"sample": SAMPLING, "validate": SAMPLING, "load": LOADING, "save": LOADING}
# What the error names if it does not happen in a stage of a step, which the driver names.
ACTIVITIES = {"validate": " during the validation", "save": " while the checkpoint was written"}


@contextmanager
def explained_memory_errors(stage: str, policy: Any = None) -> Iterator[None]:
    """Turn torch's out-of-memory error into a RunError of one line.

    Args:
        stage: of the step; or load, validate, save.
        policy: says what holds the memory, if it is in this process.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(explain(stage, str(error), policy)) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's words for the host's memory
            raise
        raise RunError(explain(stage, str(error), policy)) from error


def explain(stage: str, text: str, policy: Any = None) -> str:
    """Return the line for an out-of-memory error with this text."""
    wanted = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
    size = f" for {wanted[1]} more" if wanted else ""
    held = ""
    if isinstance(policy, LocalPolicy):
        parts = memory_parts(policy)
        held = "; " + ", ".join(f"{name} {size:.1f} GiB" for name, size in parts.items())
    advice = ADVICE.get(stage, PASSES)
    if advice == PASSES and _could_offload(policy):
        advice = LONG_PASSES
    activity = ACTIVITIES.get(stage, "")
    return f"out of memory{activity}{size}{held}; set {advice}; the same command then continues"


def _could_offload(policy: Any) -> bool:
    """Return whether the inputs of recomputed blocks could go to host memory."""
    if not isinstance(policy, LocalPolicy) or not supports_state_streaming(policy.device):
        return False
    model = policy.config.model
    return model.activation_checkpointing and not model.activation_offload


def memory_parts(policy: LocalPolicy) -> dict[str, float]:
    """Return GiB on the policy's device by what holds them."""
    device = policy.device
    optimizer = policy.optimizer
    weights = sum(p.nbytes for p in policy.model.parameters())
    weights += sum(m.quantized.nbytes for m in quantized_modules(policy.model).values())
    state = sum(t.nbytes for t in optimizer.tensors().values() if t.device.type == device.type)
    gradients = sum(m.grad.nbytes for m in optimizer.masters.values() if m.grad is not None)
    parts = {"weights": weights, "optimizer state": state, "gradients": gradients}
    if total := memory_held(device):
        parts["cache and activations"] = max(0, total - sum(parts.values()))
    return {name: size / GIB for name, size in parts.items()}

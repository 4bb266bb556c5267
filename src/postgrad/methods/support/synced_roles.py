"""Models that follow the policy, roles of the kind `synced`: their check, and when they move."""

import re
from typing import Any

from postgrad.errors import ConfigError, RunError
from postgrad.methods.step import Step

# A checkpoint has each synced model in a folder of its role's name, beside these of other models.
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
TAKEN_NAMES = ("policy", "adapter", "critic", "engine")


def sync_copies(method: Any, step: Step) -> None:
    """Moves the synced models of a method to the policy, in the steps when they are due."""
    synced = {name: role for name, role in method.roles().items() if role.kind == "synced"}
    due = [name for name, role in synced.items() if step.number % role.sync_every == 0]
    if due:
        weights = method.ports.policy.weights()
        for name in due:
            method.ports.models[name].publish(weights)
    for name in synced:
        step.metrics[f"{name}/synced"] = float(name in due)


def check_synced(method: Any, step: Step) -> None:
    """Raises RunError if a step has ended without sync_copies, which the stage publish calls."""
    for name, role in method.roles().items():
        if role.kind == "synced" and f"{name}/synced" not in step.metrics:
            raise RunError(
                f"step {step.number}: no stage of {type(method).__name__} has moved the {name}, "
                "which follows the policy; keep the stage publish, and call super().publish in an "
                "override of it"
            )


def check_synced_roles(method: Any) -> None:
    """Refuses copies of the policy that a checkpoint cannot hold, or that never follow it."""
    num_steps = method.config.training.steps
    for name, role in method.roles().items():
        if role.kind == "synced" and (name in TAKEN_NAMES or not FOLDER_NAME.fullmatch(name)):
            raise ConfigError(
                f"{type(method).__name__}.roles(): a checkpoint cannot hold a synced model in a "
                f"folder called {name!r}; use another name of letters, digits, - and _"
            )
        if role.sync_every > num_steps:
            setting_name = f"{name}_sync_every"
            is_set = getattr(method.settings, setting_name, 0) == role.sync_every
            key = f"method.{setting_name}" if is_set else f"sync_every of the role {name}"
            raise ConfigError(
                f"{key}={role.sync_every} exceeds training.steps={num_steps}, so the {name} would "
                f"never follow the policy; use at most {num_steps}"
            )

"""Models that follow the policy, roles of the kind `synced`: their check, and when they move."""

from typing import Any

from postgrad.errors import ConfigError
from postgrad.methods.step import Step


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


def check_synced_roles(method: Any) -> None:
    """Refuses copies of the policy that never follow it, because the run ends before."""
    num_steps = method.config.training.steps
    for name, role in method.roles().items():
        if role.sync_every > num_steps:
            setting_name = f"{name}_sync_every"
            is_set = hasattr(method.settings, setting_name)
            key = f"method.{setting_name}" if is_set else f"sync_every of the role {name}"
            raise ConfigError(
                f"{key}={role.sync_every} exceeds training.steps={num_steps}, so the {name} would "
                f"never follow the policy; use at most {num_steps}"
            )

"""What a method may call: the policy, the engine, the scorer, and other models by role.

A role of the kind `synced` is a copy of the policy that follows it; `sync_copies` moves it.
"""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from postgrad.errors import Conflict, RunError, UnknownName, WrongValue, did_you_mean

if TYPE_CHECKING:  # transformers takes seconds to import, and a list of settings needs no model
    from postgrad.methods.step import Step
    from postgrad.model.port import Critic, Policy
    from postgrad.rollout.engine import Engine
    from postgrad.rollout.respond import Encoder, Scorer
    from postgrad.rollout.turns import TurnRunner

LIVE = "policy:live"  # the path of a role that is the engine of this run
KINDS = ("frozen", "synced", "critic", "engine", "chat", "scores")
SAVED_KINDS = ("synced", "critic")  # what a checkpoint holds besides the policy
# A checkpoint has each synced model in a folder of its role's name, beside these of other models.
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
TAKEN_NAMES = ("policy", "adapter", "critic", "engine")


@dataclass(frozen=True)
class Role:
    """A model that a method needs besides the policy.

    Args:
        kind: `frozen` gives log-probs and is never trained. `synced` is a copy of the policy that
            gives log-probs and is moved to the policy's weights every `sync_every` steps. `critic`
            is trained on values. `engine` continues prompts; its port is a Generator. `chat`
            answers messages; its port is a Chat. `scores` is a reward model; its port is a
            ModelVerifier.
        path: where the model is, as in model.path. Empty: the policy's starting model. An engine or
            a chat may also be `policy:live` (the engine that samples the rollouts of this run), a
            model of a server (`http://host:8000/v1#model`), or an entry of a file of servers
            (`servers.json#model`).
        lr: the learning rate of a critic.
        sync_every: steps between two updates of a synced copy; the first is after that many steps.
        share: of the policy's weights in an updated copy; the rest stays. 1 copies the policy.
    """

    kind: str
    path: str = ""
    lr: float = 0.0
    sync_every: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName(f"Role({self.kind!r}): {did_you_mean(self.kind, KINDS)}", at="roles")
        if self.kind == "synced":
            _check_synced_role(self)
        elif self.sync_every or self.share != 1.0:
            raise Conflict(
                f"Role({self.kind!r}): sync_every and share are of a synced model; "
                'use Role("synced", ...), or remove them',
                at="roles",
            )


def _check_synced_role(role: Role) -> None:
    """Raise ConfigError for a synced role that cannot follow the policy."""
    if role.path:
        raise Conflict(
            f'Role("synced", {role.path!r}): a synced model is a copy of the policy; '
            "remove the path",
            at="roles",
        )
    if role.sync_every < 1:
        raise WrongValue(
            f'Role("synced", sync_every={role.sync_every}): sync_every must be at least 1',
            at="roles",
        )
    if not 0 < role.share <= 1:
        raise WrongValue(
            f'Role("synced", share={role.share}): share must be above 0 and at most 1', at="roles"
        )


@dataclass
class Ports:
    """The models and services that a method may call, wherever they run.

    `models` has the method's roles by name. `turns` is set with tools, an environment
    or an agent.
    """

    policy: "Policy"
    engine: "Engine"
    scorer: "Scorer"
    encoder: "Encoder"
    models: dict[str, Any] = field(default_factory=dict)
    turns: "TurnRunner | None" = None

    @property
    def reference(self) -> "Policy":
        return self.models["reference"]

    @property
    def critic(self) -> "Critic":
        return self.models["critic"]


# ---- copies of the policy that follow it


def sync_copies(method: Any, step: "Step") -> None:
    """Move the synced models of a method to the policy, in the steps when they are due."""
    synced = {name: role for name, role in method.roles().items() if role.kind == "synced"}
    due = [name for name, role in synced.items() if step.number % role.sync_every == 0]
    if due:
        weights = method.ports.policy.weights()
        for name in due:
            method.ports.models[name].publish(weights)
    for name in synced:
        step.metrics[f"{name}/synced"] = float(name in due)


def check_synced(method: Any, step: "Step") -> None:
    """Raise RunError if a step has ended without sync_copies, which the stage publish calls."""
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
            raise WrongValue(
                f"{type(method).__name__}.roles(): a checkpoint cannot hold a synced model in a "
                f"folder called {name!r}; use another name of letters, digits, - and _",
                at="roles",
            )
        if role.sync_every > num_steps:
            setting_name = f"{name}_sync_every"
            is_set = getattr(method.settings, setting_name, 0) == role.sync_every
            key = f"method.{setting_name}" if is_set else f"sync_every of the role {name}"
            raise Conflict(
                f"{key}={role.sync_every} exceeds training.steps={num_steps}, so the {name} would "
                f"never follow the policy; use at most {num_steps}"
            )

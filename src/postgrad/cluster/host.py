"""A host: the models of a run as they live in one process, built from the configuration alone.

The driver's process is a host when cluster.backend=local; a child process is one when cluster.backend=process. Both are the same code.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from postgrad.cluster.engines import build_engine, is_remote
from postgrad.cluster.remote_roles import is_elsewhere
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.base import Method, Role
from postgrad.model.critic import LocalCritic
from postgrad.model.device import choose_device, set_threads
from postgrad.model.load import base_model_name, load
from postgrad.model.loaded import Loaded
from postgrad.model.lora import add_adapters
from postgrad.model.policy import BaseModelPolicy, FrozenPolicy, LocalPolicy
from postgrad.rollout.native.engine import NativeEngine

SPEAKING = ("engine", "chat")  # kinds of roles that continue text


@dataclass
class Host:
    """A policy, the engine of its rollouts, and the other models its method asked for, by role."""

    policy: LocalPolicy
    engine: Any  # None where a server samples
    models: dict[str, Any] = field(default_factory=dict)


def build_host(config: Config) -> Host:
    """Load the models and put the ports around them. The configuration is resolved: no auto is left in it."""
    set_threads(config.model.threads)
    method = find_method(config.method.name)(config)
    loaded = load_policy(config, method)
    engine = None if is_remote(config) else build_engine(config, loaded)
    roles = {name: role for name, role in method.all_roles().items() if not is_elsewhere(role.path)}
    models = {name: build_role(config, method, name, role, loaded) for name, role in roles.items()}
    return Host(LocalPolicy(config, loaded, method), engine, models)


def load_policy(config: Config, method: Method, device: str | None = None) -> Loaded:
    """The model that is trained, looked at by its method, with its adapters where there are to be some."""
    loaded = load_role(config, "policy", config.model.path, device)
    method.check_model(loaded.model)
    if config.model.lora.rank:
        add_adapters(
            loaded.model,
            config.model.lora,
            config.seed,
            base_model_name(config.model.path, config.seed),
        )
    return loaded


def is_base(config: Config, role: Role) -> bool:
    """Whether a role is the policy's own weights without the adapters: then it needs no second copy."""
    return (
        role.kind == "frozen"
        and config.model.lora.rank > 0
        and role.path in ("", config.model.path)
    )


def build_role(
    config: Config, method: Method, name: str, role: Role, policy: Loaded | None = None
) -> Any:
    """A model beside the policy (`policy`, where there is one), behind its port. Raises ConfigError that names the role."""
    if policy is not None and is_base(config, role):
        return BaseModelPolicy(config, policy)
    loaded = load_role(config, name, role.path or config.model.path)
    if role.kind == "critic":
        return LocalCritic(config, loaded, method, role.lr)  # type: ignore[arg-type]
    loaded.model.requires_grad_(False)
    return (
        NativeEngine(loaded, config.rollout)
        if role.kind in SPEAKING
        else FrozenPolicy(config, loaded)
    )


def load_role(
    config: Config | EngineConfig, name: str, path: str, device: str | None = None
) -> Loaded:
    """The model of a role, on the configured device unless another is named."""
    try:
        return load(
            dataclasses.replace(config.model, path=path),
            choose_device(device or config.model.device),
            config.seed,
        )
    except ConfigError as error:
        if name == "policy":
            raise
        raise ConfigError(
            f"{name}: {error}"
        ) from error  # it speaks of model.path, but this is another model

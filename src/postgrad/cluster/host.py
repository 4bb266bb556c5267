"""Builds the models of a run in one process, from the configuration alone.

The process is the driver (cluster.backend=local), a child process, or an actor on Ray, which may
hold some of the models only, sharded over several actors.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from postgrad.cluster.engines import build_engine, is_remote, load_engine, read_engine_config
from postgrad.cluster.ports import (
    ENGINE,
    GENERATING,
    POLICY,
    Ports,
    RunModels,
    is_remote_role,
)
from postgrad.config.compose import from_yaml
from postgrad.config.schema import Config, EngineConfig, engine_config
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.method import Method, Role
from postgrad.model.device import choose_device
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import base_model_name, load
from postgrad.model.lora import add_adapters
from postgrad.model.policy import BaseModelPolicy, FrozenPolicy, LocalPolicy
from postgrad.model.threads import set_threads
from postgrad.user_code import import_named

if TYPE_CHECKING:
    from postgrad.model.parallel.ranks import Ranks
    from postgrad.model.scored import RewardModel

# Traits.scores -> class of the trained model
POLICY_CLASSES = {
    False: "postgrad.model.policy:LocalPolicy",
    True: "postgrad.model.scored:RewardPolicy",
}


def build_host(config: Config) -> RunModels:
    """Load all models of a run. The configuration has no `auto` settings left.

    Raises: ConfigError for a model that cannot be loaded.
    """
    models = {name: model for name, (_, model) in build_ports(config).items()}
    return RunModels(models.pop(POLICY), models.pop(ENGINE, None), models)


@contextmanager
def open_local(config: Config, roles: dict[str, Role]) -> Iterator[RunModels]:
    """Yield the models of a run in this process."""
    yield build_host(config)


def read_config(text: str, names: Sequence[str] = ()) -> Config | EngineConfig:
    """Parse a configuration as YAML: of an engine alone if `names` is [ENGINE], else of a run."""
    if list(names) == [ENGINE]:
        return read_engine_config(text)
    config = from_yaml(text, lambda name: find_method(name).Settings)
    config.method.freeze()
    return config


def build_ports(
    config: Config | EngineConfig, names: Sequence[str] = (), ranks: "Ranks | None" = None
) -> Ports:
    """Load models; returns their ports.

    Args:
        config: the settings of a run, or of an engine alone.
        names: POLICY, ENGINE and roles; () for all that this run loads.
        ranks: shards the models, except those that generate text: each rank has a full copy.
    """
    if isinstance(config, EngineConfig):
        return {ENGINE: ("engine", load_engine(config).engine)}
    set_threads(config.model.threads)
    method = find_method(config.method.name)(config)
    roles = method.all_roles()
    if not names:
        names = [POLICY, *([] if is_remote(config) else [ENGINE])]
        names += [name for name, role in roles.items() if not is_remote_role(role.path)]
    ports: Ports = {}
    policy: LocalPolicy | None = None
    if POLICY in names:
        loaded = load_policy(config, method, ranks)
        if ENGINE in names and ranks is None:
            ports[ENGINE] = ("engine", build_engine(config, loaded))
        policy = _build_policy(config, method, loaded, ranks)
        ports[POLICY] = ("policy", policy)
        if ENGINE in names and ranks is not None:
            ports[ENGINE] = ("engine", _build_synced_engine(config, policy))
    for name in names:
        if name not in (POLICY, ENGINE):
            model = build_role(config, method, name, roles[name], policy, ranks)
            ports[name] = (roles[name].kind, model)
    return ports


def _build_policy(
    config: Config, method: Method, loaded: Loaded, ranks: "Ranks | None"
) -> LocalPolicy:
    if ranks is not None:
        return LocalPolicy(config, loaded, method.objective, ranks)
    return import_named(POLICY_CLASSES[method.traits.scores])(config, loaded, method.objective)


def _build_synced_engine(config: Config, policy: LocalPolicy) -> Any:
    """Return a rank's engine, on a full copy of the sharded policy."""
    engine, loaded = load_engine(engine_config(config))
    if loaded is None:  # the engine keeps its own weights
        return engine
    return SyncedEngine(engine, loaded.model, policy)


class SyncedEngine:
    """An engine on a full copy of the sharded policy, updated when the weights changed."""

    def __init__(self, engine: Any, model: Any, policy: Any) -> None:
        self.engine = engine
        self.model = model
        self.policy = policy
        self.weights_version = policy.weights_version

    def generate(self, requests: Sequence[Any], sampling: Any) -> list[Any]:
        if self.weights_version != self.policy.weights_version:
            self.policy.ranks.copy_weights_to(self.model)
            self.weights_version = self.policy.weights_version
        return self.engine.generate(requests, sampling)

    def publish(self, weights: dict[str, Any]) -> None:
        """Do nothing: `generate` copies the policy's weights."""


def load_policy(config: Config, method: Method, ranks: "Ranks | None" = None) -> Loaded:
    """Return the model to train, checked by the objective, with new LoRA adapters if configured.

    With `ranks` only the first one reads the weights.
    """
    loaded = load_role(
        config, "policy", config.model.path, ranks, uses_lm_head=not method.traits.scores
    )
    if ranks is None or ranks.is_first:
        method.objective.check_model(loaded.model)
    if config.model.lora.rank:
        base_name = base_model_name(config.model.path, config.seed)
        add_adapters(loaded.model, config.model.lora, config.seed, base_name)
    return loaded


def is_base_model(config: Config, role: Role) -> bool:
    """Return whether a role is the policy without its adapters, so it needs no second copy."""
    has_policy_weights = role.path in ("", config.model.path)
    return role.kind == "frozen" and config.model.lora.rank > 0 and has_policy_weights


def build_role(
    config: Config,
    method: Method,
    name: str,
    role: Role,
    policy: LocalPolicy | None = None,
    ranks: "Ranks | None" = None,
) -> Any:
    """Return the model of a role behind its port.

    `policy` is the trained model in this process, if there is one. With `ranks` the model is
    sharded over them, unless it generates text or is a reward model.

    Raises: ConfigError that names the role.
    """
    if policy is not None and is_base_model(config, role):
        return BaseModelPolicy(policy)
    if role.kind == "scores":
        return load_reward_model(config, role.path)
    if role.kind in GENERATING:
        ranks = None
    path = role.path or config.model.path
    loaded = load_role(config, name, path, ranks, uses_lm_head=role.kind != "critic")
    if role.kind == "critic":
        from postgrad.model.scored import LocalCritic

        return LocalCritic(config, loaded, method.objective, role.lr, path, ranks)
    if role.kind in GENERATING:
        from postgrad.rollout.native.engine import NativeEngine

        loaded.model.requires_grad_(False)
        return NativeEngine(loaded, config.rollout)
    loaded.model.requires_grad_(False)
    return FrozenPolicy(config, loaded, ranks)


def load_reward_model(config: Config | EngineConfig, path: str) -> "RewardModel":
    """Return the reward model at a path. Raises: ConfigError that names its setting."""
    from postgrad.model.scored import RewardModel

    settings = dataclasses.replace(config.model, path=path)
    try:
        return RewardModel(settings, choose_device(config.model.device), config.seed)
    except ConfigError as error:
        # The message is about model.path, which is the policy's setting.
        reason = str(error).removeprefix(f"model.path={path}").removeprefix(":").strip()
        text = f"reward.verifier=model:{path}: {reason}"
        raise error.reworded(text, at="reward.verifier") from error


def load_role(
    config: Config | EngineConfig,
    name: str,
    path: str,
    ranks: "Ranks | None" = None,
    uses_lm_head: bool = True,
) -> Loaded:
    """Return the model of a role on the configured device.

    A model that `uses_lm_head` is no reward model.

    With `ranks` only the first one reads the weights, into host memory: devices and other ranks
    get shards only. The others get a model without weights, which sharding fills. LoRA adapters
    are made on every rank, which needs the whole model.

    Raises: ConfigError that names the role.
    """
    settings = dataclasses.replace(config.model, path=path)
    if name != "policy":
        # Other models may be trained without adapters, such as a critic, so they are not quantized.
        # The memory for kept attention is that of one model.
        settings.quantization = "none"
        settings.kept_attention_blocks = 0

    def load_full() -> Loaded:
        device = choose_device(config.model.device if ranks is None else "cpu")
        loaded = load(settings, device, config.seed, uses_lm_head)
        # On several ranks an MLP has collectives, which all ranks must call equally often.
        if ranks is None and config.model.activation_checkpointing:
            from postgrad.model.passes.recompute import chunk_mlps

            chunk_mlps(loaded.model)
        return loaded

    try:
        if ranks is None or config.model.lora.rank:
            return load_full()
        from postgrad.model.parallel.meta_model import load_on_meta, load_on_ranks

        return load_on_ranks(ranks, load_full, lambda: load_on_meta(settings, config.seed))
    except ConfigError as error:
        if name == "policy":
            raise
        # The message is about model.path, but this is the model of another role.
        raise error.reworded(f"{name}: {error}", at=name) from error

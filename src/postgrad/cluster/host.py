"""Builds all models of a run in one process, from the configuration alone.

The driver's process is a host with cluster.backend=local, a child process with process.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from postgrad.cluster.engines import build_engine, is_remote
from postgrad.cluster.remote_roles import is_remote_role
from postgrad.config.schema import Config, EngineConfig
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.methods.method import Method, Role
from postgrad.methods.objective import Objective
from postgrad.model.device import choose_device
from postgrad.model.load.formats import Loaded
from postgrad.model.load.load import base_model_name, load
from postgrad.model.lora import add_adapters
from postgrad.model.policy import BaseModelPolicy, FrozenPolicy, LocalPolicy
from postgrad.model.quantized import round_linears
from postgrad.model.threads import set_threads
from postgrad.user_code import import_named

if TYPE_CHECKING:
    from postgrad.model.parallel.ranks import Ranks
    from postgrad.model.scored import RewardModel

GENERATING = ("engine", "chat")  # kinds of roles that generate text
# Traits.scores -> class of the trained model
POLICY_CLASSES = {
    False: "postgrad.model.policy:LocalPolicy",
    True: "postgrad.model.scored:RewardPolicy",
}


@dataclass
class Host:
    """The policy, the engine and the other models of a run, by role, in this process."""

    policy: LocalPolicy
    engine: Any  # None if a server samples
    models: dict[str, Any] = field(default_factory=dict)


def build_host(config: Config) -> Host:
    """Loads the models of a run. The configuration has no `auto` settings left.

    Raises: ConfigError for a model that cannot be loaded.
    """
    set_threads(config.model.threads)
    method = find_method(config.method.name)(config)
    objective = method.objective
    loaded = load_policy(config, method, objective)
    engine = None if is_remote(config) else build_engine(config, loaded)
    policy = import_named(POLICY_CLASSES[method.traits.scores])(config, loaded, objective)
    models: dict[str, Any] = {}
    for name, role in method.all_roles().items():
        if not is_remote_role(role.path):
            models[name] = build_role(config, method, name, role, policy)
    return Host(policy, engine, models)


def load_policy(
    config: Config, method: Method, objective: Objective, ranks: "Ranks | None" = None
) -> Loaded:
    """Returns the model to train, checked by the objective, with new LoRA adapters if configured.

    With `ranks` only the first one reads the weights.
    """
    loaded = load_role(
        config, "policy", config.model.path, ranks, uses_lm_head=not method.traits.scores
    )
    if ranks is None or ranks.is_first:
        objective.check_model(loaded.model)
    if config.model.lora.rank:
        base_name = base_model_name(config.model.path, config.seed)
        add_adapters(loaded.model, config.model.lora, config.seed, base_name)
    return loaded


def is_base_model(config: Config, role: Role) -> bool:
    """Returns whether a role is the policy without its adapters, so it needs no second copy."""
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
    """Returns the model of a role behind its port.

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
    if role.kind == "synced":
        from postgrad.model.synced import SyncedPolicy

        if config.model.quantization == "4bit":  # it starts as the policy's base model
            round_linears(loaded.model)
        return SyncedPolicy(config, loaded, name, role.share, ranks)
    loaded.model.requires_grad_(False)
    return FrozenPolicy(config, loaded, ranks)


def load_reward_model(config: Config | EngineConfig, path: str) -> "RewardModel":
    """Returns the reward model at a path. Raises: ConfigError that names its setting."""
    from postgrad.model.scored import RewardModel

    settings = dataclasses.replace(config.model, path=path)
    try:
        return RewardModel(settings, choose_device(config.model.device), config.seed)
    except ConfigError as error:
        # The message is about model.path, which is the policy's setting.
        reason = str(error).removeprefix(f"model.path={path}").removeprefix(":").strip()
        raise ConfigError(f"reward.verifier=model:{path}: {reason}") from error


def load_role(
    config: Config | EngineConfig,
    name: str,
    path: str,
    ranks: "Ranks | None" = None,
    uses_lm_head: bool = True,
) -> Loaded:
    """Returns the model of a role on the configured device.

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
        raise ConfigError(f"{name}: {error}") from error

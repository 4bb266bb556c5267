"""Checks of settings for every method, before a run writes anything. All raise ConfigError."""

from typing import Any

from postgrad.config.schema import Config
from postgrad.errors import Conflict, Missing, Unsupported, UserCode, WrongValue
from postgrad.rollout.kinds import find_engine


def engine_apart(config: Config) -> bool:
    """Whether the engine has its own copy of the weights."""
    return config.cluster.engines > 0 or not find_engine(config.rollout.engine).shares_weights


def check_sampling(method: Any) -> None:
    """Refuse settings that make the sampled policy another than the trained one."""
    if method.traits.samples:
        _check_truncated_sampling(method)
    else:
        _check_given_temperature(method)


def _check_given_temperature(method: Any) -> None:
    """Refuse a temperature for responses that nobody sampled; it would change their log-probs."""
    temperature = method.config.rollout.temperature
    if temperature != 1.0:
        raise Conflict(
            f"rollout.temperature={temperature:g}: {method.settings.name} learns from given "
            "responses, whose log-probs have temperature 1; remove it, or set "
            "training.validation_temperature for validations"
        )


def _check_truncated_sampling(method: Any) -> None:
    """Refuse top-p, top-k and min-p where the loss cannot replay what they kept."""
    rollout = method.config.rollout
    filters = {
        "top_p": rollout.top_p != 1.0,
        "top_k": rollout.top_k != 0,
        "min_p": rollout.min_p != 0.0,
    }
    for name, is_on in filters.items():
        if is_on and not method.traits.truncated_sampling:
            raise Unsupported(
                f"rollout.{name} changes what is sampled but not the log-probs of the loss; "
                f"{method.settings.name} cannot use it: remove rollout.{name}"
            )
        if is_on and not find_engine(rollout.engine).records_kept:
            raise Unsupported(
                f"rollout.{name} needs an engine that records which tokens it kept, and "
                f"rollout.engine={rollout.engine} does not: remove rollout.{name}, or use "
                "rollout.engine=native"
            )


def check_traits(method: Any) -> None:
    """Refuse settings that need what the rows of the method do not have."""
    config, traits = method.config, method.traits
    judge = config.reward.judge
    needs: list[tuple[str, Any, bool, str]] = [
        ("rollout.tools", config.rollout.tools, traits.tools, "grpo"),
        ("environment", config.environment.name, traits.environments, "grpo"),
        ("agent", config.agent.command, traits.tools and traits.environments, "grpo"),
        ("reward.judge.monitor", judge.monitor, traits.thoughts, "classmate"),
        ("rollout.staleness", config.rollout.staleness, traits.samples, "grpo"),
    ]
    for key, value, is_supported, other in needs:
        if value and not is_supported:
            raise Unsupported(
                f"{key}={value}: {method.settings.name} does not support it; "
                f"remove it, or use method={other}"
            )


def check_turns(config: Config) -> None:
    """Refuse tools without a second turn, and an agent beside an environment or tools."""
    rollout, environment, agent = config.rollout, config.environment, config.agent
    if rollout.tools and rollout.max_turns < 2 and not environment.name:
        raise WrongValue("rollout.max_turns=1 answers no tool call; use at least 2")
    if agent.command and (environment.name or rollout.tools):
        other = "environment" if environment.name else "rollout.tools"
        raise Conflict(
            f"agent={agent.command} answers its own tool calls, and {other} is set; "
            "remove one of the two"
        )


def check_staleness(method: Any) -> None:
    """Refuse rollouts of older weights where no engine keeps them, or nothing corrects them."""
    rollout = method.config.rollout
    key = f"rollout.staleness={rollout.staleness}"
    if not rollout.staleness:
        return
    if not (method.config.cluster.engines or find_engine(rollout.engine).remote):
        raise Conflict(
            f"{key} samples while the policy is trained, which needs an engine of its own; add "
            "cluster.engines=1 with cluster.backend=process or ray"
        )
    if getattr(method.settings, "correction", "none") == "none":
        raise Conflict(
            f"{key} trains on rows of older weights, and method.correction=none does not correct "
            "them; remove method.correction, or use method.correction=bypass if the loss itself "
            "compares with behavior_logprobs"
        )


# What rollout.stream replaces: it samples group by group, before the step that trains is known.
STREAMED = ("draw", "compose", "sample", "assemble", "generate")


def check_stream(method: Any, base: type) -> None:
    """Refuse rollout.stream for engines and methods that cannot; `base` is the class Method."""
    config = method.config
    rollout = config.rollout
    if not rollout.stream:
        return
    key = "rollout.stream=true"
    if rollout.staleness < 1:
        raise Missing(
            f"{key} needs a bound on the age of tokens, in updates; add rollout.staleness=2"
        )
    if not find_engine(rollout.engine).streams:
        raise Unsupported(
            f"{key}: rollout.engine={rollout.engine} cannot change its weights between two tokens; "
            "use rollout.engine=native, or remove rollout.stream"
        )
    others = {
        "rollout.tools": bool(rollout.tools),
        "environment": bool(config.environment.name),
        "agent": bool(config.agent.command),
        "method.max_refills": bool(getattr(method.settings, "max_refills", 0)),
    }
    for name, is_set in others.items():
        if is_set:
            raise Unsupported(f"{key} does not support {name}; remove one of the two")
    own = [name for name in STREAMED if getattr(type(method), name) is not getattr(base, name)]
    if own:
        raise Unsupported(
            f"{key}: {method.settings.name} has its own stage {own[0]}, which needs all problems "
            "of a step; remove rollout.stream"
        )


def check_numbers(config: Config) -> None:
    """Refuse numbers that do not fit together."""
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise WrongValue(
            f"optimizer.betas={betas} is out of range; use two numbers of at least 0 and below 1, "
            "such as [0.9,0.999]"
        )
    updates = config.training.updates_per_step
    problems = config.training.problems_per_step
    if updates > problems:
        raise Conflict(
            f"training.updates_per_step={updates} exceeds training.problems_per_step={problems}; "
            "an update needs at least one problem"
        )


def check_memory_saving(config: Config) -> None:
    """Refuse 4-bit weights and offloaded activations where they cannot work."""
    model = config.model
    if model.quantization == "4bit":
        quantization = "model.quantization=4bit"
        if not model.lora.rank:
            raise Conflict(
                f"{quantization} freezes the linear layers, so nothing could be trained; add "
                "model.lora.rank=16"
            )
        if config.cluster.backend == "ray":
            raise Unsupported(
                f"{quantization} is not supported with cluster.backend=ray, which shards weights; "
                "use cluster.backend=local"
            )
        if engine_apart(config):
            raise Conflict(
                f"{quantization} needs an engine that samples from the trainer's own weights; use "
                "rollout.engine=native without cluster.engines"
            )
        if model.path.endswith(".gguf"):
            raise Conflict(
                f"{quantization} would quantize the weights of a GGUF file a second time; use the "
                "model's original folder"
            )
    if model.kept_attention_blocks:
        kept = f"model.kept_attention_blocks={model.kept_attention_blocks}"
        if config.cluster.backend == "ray":
            raise Unsupported(f"{kept} is not supported with cluster.backend=ray; remove it")


def check_method(method: Any) -> None:
    """Refuse a method that cannot run with its configuration."""
    check_sampling(method)
    check_traits(method)
    check_turns(method.config)
    check_staleness(method)
    check_state(method)
    check_numbers(method.config)
    check_memory_saving(method.config)


def check_state(method: Any) -> None:
    """Refuse a state() without a load(): what a checkpoint holds would be dropped at a resume."""
    for cls in type(method).__mro__:
        if "load" in vars(cls):
            return
        if "state" in vars(cls):
            raise UserCode(
                f"method={method.config.method.name}: {cls.__name__} defines state() and not "
                "load(state), so a resumed run would not get it back; define both"
            )

"""Checks and loads everything a run needs, before anything is written."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from postgrad import phases
from postgrad.config.schema import ClusterConfig, Config, ModelConfig, engine_config
from postgrad.data.cursor import Cursor
from postgrad.data.overlong import RowEncoder
from postgrad.data.problems import load_problems
from postgrad.data.styles import stop_strings
from postgrad.environments.port import choose_verifier
from postgrad.errors import ConfigError
from postgrad.machine import available_cores
from postgrad.methods import find_method
from postgrad.methods.method import Method
from postgrad.methods.support.judging import check_judge, check_judge_used, check_references
from postgrad.methods.support.synced_roles import check_synced_roles
from postgrad.model.device import (
    KERNEL_DEVICE,
    choose_device,
    choose_dtype,
    is_gpu,
    supports_triton,
)
from postgrad.model.load.context import context_length
from postgrad.model.load.load import load_tokenizer, model_config, model_hidden_size
from postgrad.model.threads import probe_threads
from postgrad.rollout.conversations import make_turns
from postgrad.rollout.kinds import check_engine
from postgrad.rollout.served_path import is_served
from postgrad.rollout.turns import TurnRunner
from postgrad.sizing.devices import GpuSpec
from postgrad.training.auto_passes import resolve_passes
from postgrad.training.run import resume_config
from postgrad.training.trackers import check_tracker
from postgrad.training.validation import load_sets
from postgrad.types import Problem

if TYPE_CHECKING:
    from postgrad.agents.runner import Agents
    from postgrad.data.render import Prompts
    from postgrad.environments.lookup import Environments
    from postgrad.verifiers.scorer import Scorer

MAX_ROWS_CPU = 256  # default of rollout.max_rows
MAX_ROWS_GPU = 2048


@dataclass
class Inputs:
    """What the driver needs besides the models."""

    train: list[Problem]
    validation: dict[str, list[Problem]]  # sets by name
    prompts: "Prompts"
    scorer: "Scorer"
    notes: tuple[str, ...] = ()  # lines about the data that the start of a run reports
    turns: TurnRunner | None = None  # None without tools, environment and agent


def make_method(config: Config, planned: GpuSpec | None = None) -> Method:
    """Return the method with its configuration checked and resolved. Raises ConfigError.

    `planned`: the run is only estimated, for this GPU, which this machine need not have.
    """
    method = find_method(config.method.name)(config)
    method.check()
    method.config = resolve(resume_config(config), method, planned)
    return method


def resolve(config: Config, method: Method | None = None, planned: GpuSpec | None = None) -> Config:
    """Replace every auto by what this machine offers, or the GPU of a `planned` run.

    The `method` says which models load besides the policy. config.yaml keeps the values, and a
    resumed run uses them. Raises ConfigError.
    """
    check_cluster(config.cluster)
    if config.cluster.backend == "ray":
        from postgrad.cluster.meshes import check_meshes

        check_meshes(config, method.all_roles() if method else {})
    if config.training.profile_steps and config.cluster.backend != "local":
        raise ConfigError(
            f"training.profile_steps profiles this process only, but cluster.backend="
            f"{config.cluster.backend} runs the models in others; use cluster.backend=local"
        )
    if not planned:
        check_engine(engine_config(config))
    device = _resolve_device(config, planned)
    if config.model.kept_attention_blocks and not (planned or supports_triton(device)):
        raise ConfigError(
            f"model.kept_attention_blocks={config.model.kept_attention_blocks} needs a device with "
            f"Triton's kernels, and model.device={device.type}; remove it"
        )
    if config.model.threads == 0:
        config.model.threads = 1 if planned else _choose_threads(config, device)
    if config.rollout.max_rows == 0:
        config.rollout.max_rows = MAX_ROWS_CPU if device.type == "cpu" else MAX_ROWS_GPU
    config.rollout.stop = stop_strings(config.rollout.stop, config.data.prompt_style)
    resolve_passes(config, method, device, planned)
    return config


def _resolve_device(config: Config, planned: GpuSpec | None) -> torch.device:
    """Set model.device and model.dtype; return the device."""
    model: ModelConfig = config.model
    if planned:
        model.device = KERNEL_DEVICE
    if planned or (config.cluster.address and is_gpu(model.device)):
        # The workers of the Ray cluster have the GPU; this machine need not have one.
        device = torch.device(model.device)
        if model.dtype == "auto":
            model.dtype = "bfloat16"
    else:
        device = choose_device(model.device)
    model.device = device.type
    model.dtype = choose_dtype(model.dtype, device)
    return device


def _choose_threads(config: Config, device: torch.device) -> int:
    """Return the CPU threads per process; Ray workers share the cores of a machine.

    Where a GPU computes, threads serve little but an optimizer on the host: all cores.
    """
    if device.type == "cpu":
        width = model_hidden_size(config.model, config.seed)
        threads = probe_threads(width, config.model.dtype)
    else:
        threads = available_cores()
    cluster = config.cluster
    if cluster.backend != "ray":
        return threads
    num_workers = cluster.workers + sum(cluster.pools.values())
    num_workers += cluster.engines * config.rollout.tensor_parallel
    return max(1, min(threads, available_cores() // num_workers))


def check_cluster(cluster: ClusterConfig) -> None:
    """Raise ConfigError for settings that the chosen cluster.backend does not have."""
    if cluster.engine_apart and cluster.backend == "local":
        raise ConfigError(
            "cluster.engine_apart=true needs a process for the engine; add cluster.backend=process"
        )
    if cluster.backend == "ray":
        cluster.engines = cluster.engines or int(cluster.engine_apart)
        cluster.engine_apart = cluster.engines > 0
        for name, size in cluster.pools.items():
            if size < 1:
                raise ConfigError(
                    f"cluster.pools.{name}={size} is out of range; it must be at least 1"
                )
        return
    ray_settings = {
        "workers": cluster.workers > 1,
        "tensor_parallel": cluster.tensor_parallel > 1,
        "expert_parallel": cluster.expert_parallel > 1,
        "sequence_parallel": cluster.sequence_parallel > 1,
        "shard_workers": cluster.shard_workers > 0,
        "engines": cluster.engines > 0,
        "pools": bool(cluster.pools),
        "offload": bool(cluster.offload),
        "address": bool(cluster.address),
    }
    for key, is_set in ray_settings.items():
        if is_set:
            raise ConfigError(
                f"cluster.{key} is a setting of Ray, and cluster.backend={cluster.backend}; "
                "add cluster=ray"
            )


def _check_tokenizers(config: Config, method: Method, tokenizer: Any) -> None:
    """Refuse a frozen model with other ids of tokens than the policy's.

    Its log-probs would be those of other texts. One of the two may have further tokens.
    """
    own = tokenizer.get_vocab()
    for name, role in method.roles().items():
        if role.kind != "frozen" or role.path in ("", config.model.path) or is_served(role.path):
            continue
        settings = dataclasses.replace(config.model, path=role.path)
        other = load_tokenizer(settings, config.seed).get_vocab()
        if any(other.get(token, number) != number for token, number in own.items()):
            raise ConfigError(
                f"the model {name} ({role.path}) has another tokenizer than "
                f"model.path={config.model.path}, so it gives no log-probs of the policy's tokens"
            )


def load_inputs(config: Config, method: Method) -> Inputs:
    """Return problems, prompts, tools and the scorer, all checked. Raises ConfigError."""
    from postgrad.data.render import make_prompts

    check_tracker(config)
    phases.begin(f"reading {config.data.train}")
    notes: list[str] = []
    loaded_train = load_problems(config.data.train, notes.append)
    loaded_validation = load_sets(config, notes.append)
    tokenizer = load_tokenizer(config.model, config.seed)
    environments = _open_environments(config)
    has_environment = environments is not None and environments.has_environment
    schemas = environments.schemas if environments else ()
    prompts = make_prompts(tokenizer, config.data, schemas, may_be_empty=has_environment)
    agents = _open_agents(config, prompts)
    phases.begin(f"encoding the prompts of {len(loaded_train):,} problems")
    train = _fitting(config, method, prompts, loaded_train)
    validation: dict[str, list[Problem]] = {}
    for name, problems in loaded_validation.items():
        validation[name] = _fitting(config, method, prompts, problems)
    Cursor(len(train)).take(config.training.problems_per_step)  # raises if there are too few
    if config.training.epochs:
        problems = config.training.epochs * len(train)
        config.training.steps = max(1, int(problems / config.training.problems_per_step))
    held_out = [problem for problems in validation.values() for problem in problems]
    check_synced_roles(method)
    method.check_problems(train)
    method.check_validation_problems(held_out)
    _check_tokenizers(config, method, tokenizer)
    encoder = method.row_encoder(prompts)
    prompt_lengths = [len(encoder.encode(problem)) for problem in [*train, *held_out]]
    if method.traits.demonstrations:
        _check_given_rows(
            config, encoder, prompt_lengths, [*train, *held_out], method.traits.mixes_rows
        )
    else:
        _check_context(config, prompt_lengths)
    if held_out and method.needs_verifier():  # validation samples responses
        _check_context(config, [len(prompts.encode(problem)) for problem in held_out])
    if agents is not None:  # which write their own prompts
        _check_context(config, [config.data.max_prompt_tokens])
    counts = [_count_overlong(config, encoder, "data.train", loaded_train, train)]
    for name, problems in loaded_validation.items():
        label = f"validation set {name}"
        counts.append(_count_overlong(config, encoder, label, problems, validation[name]))
    too_long = _describe_overlong(config, [count for count in counts if count])
    scorer = _make_scorer(config, method, environments, agents, [*train, *held_out])
    _check_fit(method, scorer, train, validation)
    notes += [*([too_long] if too_long else []), *method.data_notes(prompts, train)]
    if supply := method.supply(prompts, train):
        if not supply.num:
            raise ConfigError(f"{supply.line}; {supply.fix}")
        notes.append(supply.line)
    if prompts.is_plain_by_default and config.model.path != "tiny":
        notes.append(
            "the tokenizer has no chat template, so prompts are plain text (data.template=plain)"
        )
    if method.needs_verifier():
        notes += scorer.notes(train)
        scored = {"data.train": train} if method.scores_training_rows() else {}
        scored |= {f"validation set {name}": problems for name, problems in validation.items()}
        notes += scorer.truth_notes(scored)
    return Inputs(
        train=train,
        validation=validation,
        prompts=prompts,
        scorer=scorer,
        notes=tuple(notes),
        turns=make_turns(environments, prompts, config.rollout.max_turns) or agents,
    )


def _open_environments(config: Config) -> "Environments | None":
    """Return the environments and tools of a run; None if it has none."""
    if not config.environment.name and not config.rollout.tools:
        return None
    from postgrad.environments.lookup import open_environments

    return open_environments(config.environment, config.rollout)


def _open_agents(config: Config, prompts: "Prompts") -> "Agents | None":
    """Return the agents of a run; None if it has none."""
    if not config.agent.command:
        return None
    from postgrad.agents.runner import open_agents

    return open_agents(config.agent, prompts, config.reward.verifier)


def _fitting(
    config: Config, method: Method, prompts: "Prompts", problems: list[Problem]
) -> list[Problem]:
    """Return the problems whose prompts fit; also the demonstrations if the method trains on them.

    Raises ConfigError for the others unless data.overlong=drop.
    """
    encoder = method.row_encoder(prompts)
    problems, _ = encoder.drop_overlong(problems)
    if method.traits.demonstrations:
        limit = config.rollout.max_response_tokens
        problems, _ = encoder.drop_overlong_demonstrations(problems, limit)
    return problems


def _make_scorer(
    config: Config,
    method: Method,
    environments: "Environments | None",
    agents: "Agents | None",
    problems: list[Problem],
) -> "Scorer":
    """Return the scorer of reward.*, checked against the problems if the method uses it."""
    from postgrad.verifiers.scorer import Scorer

    reward = config.reward
    verifier = choose_verifier(reward.verifier, environments or agents)
    if environments is not None:
        for problem in problems:
            environments.choose(problem)
    check_judge(reward)
    check_judge_used(reward)
    minimize = reward.objective == "minimize"
    scorer = Scorer(verifier, reward.timeout_s, reward.workers, minimize)
    if method.needs_verifier():
        scorer.check(problems, method.reward_arguments())
        check_references(reward, problems)
    return scorer


def _check_fit(
    method: Method, scorer: "Scorer", train: list[Problem], validation: dict[str, list[Problem]]
) -> None:
    """Raise ConfigError for a verifier that can score no row of a set that the run scores.

    Also for a part of the score that the method reads and the verifier does not report.
    """
    if method.scores_training_rows():
        scorer.check_fit(train, "data.train")
        if parts := method.reward_parts():
            scorer.check_parts(train, parts)
    if method.needs_verifier():
        for name, problems in validation.items():
            scorer.check_fit(problems, f"validation set {name}")


def _count_overlong(
    config: Config,
    encoder: RowEncoder,
    label: str,
    loaded: list[Problem],
    fitting: list[Problem],
) -> str:
    """Return "3 of 12 in data.train": the problems that were dropped or cut; "" if none."""
    num_dropped = len(loaded) - len(fitting)
    count = num_dropped if config.data.overlong == "drop" else encoder.num_truncated(fitting)
    return f"{count} of {len(loaded)} in {label}" if count else ""


def _describe_overlong(config: Config, counts: list[str]) -> str:
    """Return one line about the problems that were too long; "" if there were none."""
    data = config.data
    if not counts:
        return ""
    cut = f"cut to data.max_prompt_tokens={data.max_prompt_tokens}"
    action = "left out" if data.overlong == "drop" else cut
    return f"too long: {', '.join(counts)}; {action} (data.overlong={data.overlong})"


def _check_given_rows(
    config: Config,
    encoder: RowEncoder,
    prompt_lengths: list[int],
    problems: list[Problem],
    mixes_rows: bool,
) -> None:
    """Raise ConfigError if a prompt and a response that a pass reads exceed the model's context.

    With `mixes_rows` a prompt is also read with the responses of other rows, so the longest of both
    must fit.
    """
    context = context_length(model_config(config.model, config.seed))
    lengths = [
        (prompt, encoder.response_length(problem))
        for prompt, problem in zip(prompt_lengths, problems, strict=True)
    ]
    if mixes_rows:
        lengths = [(max(p for p, _ in lengths), max(r for _, r in lengths))]
    prompt, response = max(lengths, key=sum)
    if prompt + response > context:
        drops = config.data.overlong == "drop"
        raise ConfigError(
            f"a prompt of {prompt} tokens and a response of {response} in the data exceed the "
            f"model's context of {context}; {'' if drops else 'set data.overlong=drop and '}lower "
            "rollout.max_response_tokens or data.max_prompt_tokens: longer rows are left out"
        )


def _check_context(config: Config, prompt_lengths: list[int]) -> None:
    """Raise ConfigError if a prompt and its response may exceed the model's context."""
    context = context_length(model_config(config.model, config.seed))
    prompt = max(prompt_lengths, default=0)
    response = config.rollout.max_response_tokens
    if prompt + response > context:
        raise ConfigError(
            f"a prompt of {prompt} tokens and rollout.max_response_tokens={response} exceed the "
            f"model's context of {context}; lower rollout.max_response_tokens "
            "or data.max_prompt_tokens"
        )

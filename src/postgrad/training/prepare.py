"""Everything that can be wrong before a run is looked at here, before anything is written."""

import os
from dataclasses import dataclass

import torch

from postgrad.cluster.engines import engine_config
from postgrad.config.schema import ClusterConfig, Config
from postgrad.data.cursor import Cursor
from postgrad.data.problems import load_problems
from postgrad.data.render import Prompts, make_prompts
from postgrad.data.styles import stop_strings
from postgrad.errors import ConfigError
from postgrad.methods.base import Method
from postgrad.methods.support.judging import check_judge, check_judge_used, check_references
from postgrad.model.device import choose_device, choose_dtype, is_gpu, probe_threads
from postgrad.model.load import load_tokenizer, model_config, model_hidden_size
from postgrad.model.passes.layout import default_token_budget
from postgrad.rollout.kinds import check_engine
from postgrad.rollout.tools import open_toolbox
from postgrad.rollout.turns import Turns
from postgrad.training import trackers as mirror
from postgrad.training.validation import load_sets
from postgrad.types import Problem
from postgrad.verifiers.scorer import Scorer


@dataclass
class Inputs:
    """What the driver needs beside the models."""

    train: list[Problem]
    validation: dict[str, list[Problem]]  # sets by name
    prompts: Prompts
    scorer: Scorer
    too_long: str = (
        ""  # one line: how many problems were, and what became of them; empty: none were
    )
    turns: Turns | None = None  # where the policy may call tools


def resolve(config: Config) -> Config:
    """Replace every auto by what this machine offers; the answers go into config.yaml and are kept on resume."""
    check_cluster(config.cluster)
    if config.training.profile_steps and config.cluster.backend != "local":
        raise ConfigError(
            f"training.profile_steps sees this process only, and cluster.backend={config.cluster.backend} works in others"
        )
    check_engine(engine_config(config))
    if config.cluster.address and is_gpu(
        config.model.device
    ):  # the workers have it; this machine need not
        device = torch.device(config.model.device)
        config.model.dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    else:
        device = choose_device(config.model.device)
    config.model.device = device.type
    config.model.dtype = choose_dtype(config.model.dtype, device)
    if config.model.threads == 0:
        config.model.threads = probe_threads(
            model_hidden_size(config.model, config.seed), config.model.dtype
        )
        if config.cluster.backend == "ray":  # the workers of one machine share its cores
            cluster = config.cluster
            workers = cluster.workers + cluster.engines + sum(cluster.pools.values())
            config.model.threads = max(
                1, min(config.model.threads, (os.cpu_count() or 1) // workers)
            )
    launched = bool(
        config.model.lora.rank or config.model.activation_checkpointing
    )  # see model/passes/captured.py
    config.training.token_budget = config.training.token_budget or default_token_budget(
        device, launched
    )
    if config.rollout.max_rows == 0:
        config.rollout.max_rows = 256 if device.type == "cpu" else 2048
    config.rollout.stop = stop_strings(config.rollout.stop, config.data.prompt_style)
    return config


def check_cluster(cluster: ClusterConfig) -> None:
    """Refuse settings of another place than the chosen one. Raises ConfigError."""
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
    only_ray = {
        "workers": cluster.workers > 1,
        "engines": cluster.engines,
        "pools": cluster.pools,
        "offload": cluster.offload,
    }
    only_ray |= {
        "address": cluster.address,
        "engine_restarts": cluster.engine_restarts != ClusterConfig.engine_restarts,
    }
    for key, given in only_ray.items():
        if given:
            raise ConfigError(
                f"cluster.{key} is a setting of Ray, and cluster.backend={cluster.backend}; add cluster=ray"
            )


def load_inputs(config: Config, method: Method) -> Inputs:
    """Problems, prompts and verifiers, all checked."""
    mirror.check(config)
    train = load_problems(config.data.train)
    validation = load_sets(config)
    tokenizer = load_tokenizer(config.model, config.seed)
    toolbox = open_toolbox(config.rollout)
    prompts = make_prompts(tokenizer, config.data, toolbox.schemas if toolbox else ())
    turns = Turns(toolbox, prompts, config.rollout.max_turns) if toolbox else None
    sets = {"data.train": train} | {
        f"validation set {name}": problems for name, problems in validation.items()
    }
    fitting = {name: _fitting(config, method, prompts, problems) for name, problems in sets.items()}
    train, *others = fitting.values()
    Cursor(len(train)).take(config.training.problems_per_step)  # refuses data that are too small
    validation = dict(zip(validation, others, strict=True))
    held_out = [problem for problems in validation.values() for problem in problems]
    method.check_problems(train)
    method.check_held_out(held_out)
    _check_context(config, prompts, [*train, *held_out])
    reward = config.reward
    check_judge(reward)
    check_judge_used(reward)
    scorer = Scorer(
        reward.verifier, reward.timeout_s, reward.workers, reward.objective == "minimize"
    )
    if method.judges():
        scorer.check([*train, *held_out])
        check_references(reward, [*train, *held_out])
    return Inputs(
        train, validation, prompts, scorer, _too_long(config, prompts, sets, fitting), turns
    )


def _fitting(
    config: Config, method: Method, prompts: Prompts, problems: list[Problem]
) -> list[Problem]:
    """The problems whose prompts fit, and whose demonstrations do where those are learned; refuses the others or leaves them out."""
    problems, _ = prompts.drop_overlong(problems)
    if method.learns_demonstrations:
        problems, _ = prompts.drop_overlong_demonstrations(
            problems, config.rollout.max_response_tokens
        )
    return problems


def _too_long(
    config: Config,
    prompts: Prompts,
    sets: dict[str, list[Problem]],
    fitting: dict[str, list[Problem]],
) -> str:
    """How many problems were dropped or cut, and by which setting, in one line."""
    data = config.data
    dropping = data.overlong == "drop"
    counts = {
        name: len(sets[name]) - len(kept) if dropping else prompts.num_truncated(kept)
        for name, kept in fitting.items()
    }
    told = ", ".join(
        f"{count} of {len(sets[name])} in {name}" for name, count in counts.items() if count
    )
    done = "left out" if dropping else f"cut to data.max_prompt_tokens={data.max_prompt_tokens}"
    return f"too long: {told}; {done} (data.overlong={data.overlong})" if told else ""


def _check_context(config: Config, prompts: Prompts, problems: list[Problem]) -> None:
    """Refuse rows that are longer than the model can read."""
    context = int(model_config(config.model, config.seed).get_text_config().max_position_embeddings)
    longest, response = (
        max(len(prompts.encode(problem)) for problem in problems),
        config.rollout.max_response_tokens,
    )
    if longest + response > context:
        raise ConfigError(
            f"a prompt of {longest} tokens and rollout.max_response_tokens={response} exceed the model's context of {context}; "
            "lower rollout.max_response_tokens or data.max_prompt_tokens"
        )

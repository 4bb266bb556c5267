"""Everything that can be wrong with an evaluation is looked at here, before anything is written."""

import dataclasses
import hashlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from postgrad import __version__
from postgrad.config.schema import EngineConfig, ModelConfig, RolloutConfig
from postgrad.data.problems import load_problems
from postgrad.data.render import Prompts
from postgrad.data.sets import split_sets
from postgrad.data.styles import stop_strings
from postgrad.errors import ConfigError
from postgrad.evaluation.model import Target, weights_fingerprint
from postgrad.evaluation.settings import EvalConfig
from postgrad.judge.llm import RATINGS_STEM
from postgrad.judge.templates import is_pairwise
from postgrad.methods.support.judging import check_judge, check_judge_used, check_references
from postgrad.model.device import choose_device, choose_dtype
from postgrad.model.load import load_tokenizer, model_config
from postgrad.problem import Problem
from postgrad.rollout.engine import Sampling, sampling_of
from postgrad.rollout.kinds import check_engine
from postgrad.rollout.tools import open_toolbox
from postgrad.rollout.turns import Turns
from postgrad.training.prepare import check_cluster
from postgrad.verifiers.scorer import LLM_JUDGE, Scorer

Section = TypeVar("Section")
CPU_RESPONSES, OTHER_RESPONSES = 32, 1024  # of one batch
PACKAGES = ("torch", "transformers", "math-verify")
TRAINING_ONLY = (
    "model.lora.rank",
    "model.activation_checkpointing",
    "rollout.staleness",
    "rollout.max_gap",
    "reward.judge.monitor",
)
# Settings that change nothing in the result files.
FREE = ("out", "reward.workers", "cluster")


@dataclass
class Plan:
    """An evaluation that can start."""

    config: EvalConfig
    target: Target
    folder: Path
    sets: dict[str, list[Problem]]
    dropped: dict[str, int]
    cut: dict[str, int]
    prompts: Prompts
    scorer: Scorer
    identity: dict[str, Any]  # what the result depends on; a folder holds results of one
    turns: Turns | None = None

    @property
    def sampling(self) -> Sampling:
        return sampling_of(self.config.rollout, self.config.rollout.temperature or 0.0)

    @property
    def pairwise(self) -> bool:
        """Whether a language model compares each response with the problem's reference."""
        return self.config.reward.verifier == LLM_JUDGE and is_pairwise(self.config.reward.judge)


def make_plan(config: EvalConfig, target: Target) -> Plan:
    """Problems, prompts, verifiers and the folder, all checked. `auto` settings stay for `settle`."""
    _check_used(config)
    config.rollout.stop = stop_strings(config.rollout.stop, config.data.prompt_style)
    places = split_sets(config.data.sets)
    sets = {
        name: load_problems(place)[: config.data.limit or None] for name, place in places.items()
    }
    tokenizer = load_tokenizer(config.model, config.seed)
    context = int(model_config(config.model, config.seed).get_text_config().max_position_embeddings)
    room = context - config.rollout.max_response_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_response_tokens={config.rollout.max_response_tokens} leaves no room for a prompt in the context of {context}"
        )
    longest = (
        room if config.data.max_prompt_tokens is None else min(room, config.data.max_prompt_tokens)
    )
    data = config.data
    toolbox = open_toolbox(config.rollout)
    tools = toolbox.schemas if toolbox else ()
    prompts = Prompts(
        tokenizer,
        data.template,
        longest,
        data.overlong,
        data.prompt_style,
        data.template_options,
        tools,
    )
    dropped: dict[str, int] = {}
    for name in sets:
        sets[name], dropped[name] = prompts.drop_overlong(sets[name])
    cut = {name: prompts.num_truncated(problems) for name, problems in sets.items()}
    if config.reward.verifier == LLM_JUDGE:
        _check_judged(
            config, [problem for problems in sets.values() for problem in problems], list(sets)
        )
    if config.reward.objective != "maximize":
        raise ConfigError(
            f"reward.objective={config.reward.objective} is for training runs; an evaluation counts what the verifier finds right"
        )
    scorer = Scorer(config.reward.verifier, config.reward.timeout_s, config.reward.workers)
    scorer.check(problem for problems in sets.values() for problem in problems)
    identity = _identity(config, sets)
    turns = Turns(toolbox, prompts, config.rollout.max_turns) if toolbox else None
    return Plan(
        config,
        target,
        _folder(config, target, identity),
        sets,
        dropped,
        cut,
        prompts,
        scorer,
        identity,
        turns,
    )


def _check_used(config: EvalConfig) -> None:
    """Refuse settings that an evaluation has no use for. Raises ConfigError."""
    check_cluster(config.cluster)
    for key in TRAINING_ONLY:
        section, leaf = key.rsplit(".", 1)
        given, plain = config, EvalConfig()
        for part in section.split("."):
            given, plain = getattr(given, part), getattr(plain, part)
        if (value := getattr(given, leaf)) != getattr(plain, leaf):
            raise ConfigError(
                f"{key}={value} is for training runs; an evaluation has no use for it: remove it"
            )
    check_judge(config.reward)
    check_judge_used(config.reward)


def _check_judged(config: EvalConfig, problems: list[Problem], names: list[str]) -> None:
    """Refuse what a language model cannot judge to any purpose. Raises ConfigError."""
    reward = config.reward
    lowest, usual = (
        (0, 1) if is_pairwise(reward.judge) else (reward.judge.lowest, reward.judge.highest - 2)
    )
    if reward.pass_score <= lowest:
        raise ConfigError(
            f"every rating of a judge reaches reward.pass_score={reward.pass_score:g}; say from which rating on a response "
            f"counts as right, e.g. reward.pass_score={usual}"
        )
    if RATINGS_STEM in names:
        raise ConfigError(
            f"a set cannot be called {RATINGS_STEM}: {RATINGS_STEM}.jsonl holds the judge's ratings; name it: data=NAME=FILE"
        )
    check_references(reward, problems)


def settle(plan: Plan) -> None:
    """Replace every auto by what this machine offers; unlike training's, the choice never depends on a measured time."""
    model, rollout = plan.config.model, plan.config.rollout
    check_engine(engine_config(plan.config))
    device = choose_device(model.device)
    model.device = device.type
    model.dtype = (
        "float32"
        if model.dtype == "auto" and device.type == "cpu"
        else choose_dtype(model.dtype, device)
    )
    model.threads = model.threads or torch.get_num_threads()
    rollout.batch = rollout.batch or -(
        -(CPU_RESPONSES if device.type == "cpu" else OTHER_RESPONSES) // rollout.samples
    )
    plan.identity = _identity(plan.config, plan.sets)


def engine_config(config: EvalConfig) -> EngineConfig:
    """Return the settings that the engine of an evaluation is built from."""
    rollout = _as(RolloutConfig, config.rollout)
    rollout.temperature = 1.0  # unused: each call of the engine names its own, which may be 0
    settings = EngineConfig(config.seed, _as(ModelConfig, config.model), rollout, config.cluster)
    if config.data.max_prompt_tokens is not None:
        settings.max_prompt_tokens = config.data.max_prompt_tokens
    return settings


def _as(kind: type[Section], section: Any) -> Section:
    """A section without what evaluation added to it."""
    return kind(**{f.name: getattr(section, f.name) for f in dataclasses.fields(kind)})  # type: ignore[arg-type]


def _identity(config: EvalConfig, sets: dict[str, list[Problem]]) -> dict[str, Any]:
    """What the result files depend on. Sets are named by their content, so that a moved file is the same set."""
    values = dataclasses.asdict(config)
    for key in FREE:
        section, _, leaf = key.rpartition(".")
        del (values[section] if section else values)[leaf]
    values["data"]["sets"] = {
        name: {"problems": len(problems), "content": _content(problems)}
        for name, problems in sets.items()
    }
    values["model"]["weights"] = weights_fingerprint(config.model.path, config.seed)
    values["versions"] = {"postgrad": __version__} | {
        name: importlib.metadata.version(name) for name in PACKAGES
    }
    return values


def _content(problems: list[Problem]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for problem in problems:
        digest.update(
            json.dumps(
                [problem.uid, problem.data_source, list(problem.messages), problem.ground_truth]
            ).encode()
        )
    return digest.hexdigest()


def _folder(config: EvalConfig, target: Target, identity: dict[str, Any]) -> Path:
    if config.out:
        return Path(config.out).expanduser()
    digest = hashlib.blake2b(
        json.dumps(identity, sort_keys=True).encode(), digest_size=4
    ).hexdigest()
    label = re.sub(r"[^A-Za-z0-9_.-]+", "-", target.label)
    return (
        target.run / "eval" / f"{label}-{digest}"
        if target.run
        else Path("eval") / f"{label}-{digest}"
    )

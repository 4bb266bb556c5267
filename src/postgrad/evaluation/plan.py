"""Checks everything about an evaluation before anything is written."""

import dataclasses
import hashlib
import importlib.metadata
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from postgrad.config.schema import EngineConfig, ModelConfig, RolloutConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.data.encode.encoder import make_encoder as make_encoder_of
from postgrad.data.encode.styles import stop_strings
from postgrad.data.problems import load_problems
from postgrad.data.sets import split_sets
from postgrad.errors import Conflict, NoEffect, TooLarge, WrongValue
from postgrad.evaluation.folder import output_folder
from postgrad.evaluation.model import Target, folder_fingerprint, weights_fingerprint
from postgrad.evaluation.settings import EvalConfig
from postgrad.judge.llm import RATINGS_STEM
from postgrad.judge.templates import has_rubric, is_pairwise
from postgrad.methods.support.judging import check_judge, check_references
from postgrad.model.device import choose_device, choose_dtype
from postgrad.model.load.context import context_length
from postgrad.model.load.load import load_tokenizer, model_config
from postgrad.problem import Problem, sent_fields
from postgrad.rollout.engine import Sampling, make_sampling
from postgrad.rollout.kinds import check_engine
from postgrad.rollout.turns import TurnRunner
from postgrad.training.players import open_players
from postgrad.training.resolve import check_cluster
from postgrad.training.run import hash_files, names_in
from postgrad.verifiers.expression import LLM_JUDGE, asks_judge, parse_reward
from postgrad.verifiers.scorer import Scorer
from postgrad.version import __version__

Section = TypeVar("Section")
# Responses per batch if rollout.batch is 0.
CPU_RESPONSES = 32
GPU_RESPONSES = 1024
PACKAGES = ("torch", "transformers", "math-verify")
TRAINING_ONLY = (
    "model.lora.rank",
    "model.activation_checkpointing",
    "model.kept_attention_blocks",
    "model.quantization",
    "rollout.staleness",
    "rollout.stream",
    "rollout.max_logprob_difference",
    "reward.judge.monitor",
)


@dataclass
class Plan:
    """An evaluation that passed all checks.

    `notes` say which columns of the files were read.
    `dropped` and `truncated_prompts` count the problems whose prompts are too long, per set.
    `identity` are the settings and versions that the results depend on; a result folder has
    results of one identity only.
    """

    config: EvalConfig
    target: Target
    folder: Path
    sets: dict[str, list[Problem]]
    dropped: dict[str, int]
    truncated_prompts: dict[str, int]
    encoder: Encoder
    scorer: Scorer
    identity: dict[str, Any]
    turns: TurnRunner | None = None
    notes: tuple[str, ...] = ()

    @property
    def sampling(self) -> Sampling:
        return make_sampling(self.config.rollout, self.config.rollout.temperature or 0.0)

    @property
    def is_pairwise(self) -> bool:
        """Whether the score is a comparison of the response with the problem's reference answer."""
        reward = self.config.reward
        return reward.verifier == LLM_JUDGE and is_pairwise(reward.judge)


def make_plan(config: EvalConfig, target: Target, is_scored: bool = True) -> Plan:
    """Return the checked plan; `auto` settings remain until `resolve_auto_settings`.

    With `is_scored=False` the problems need no ground truth and no verifier.

    Raises: ConfigError for any setting, file or problem that cannot be evaluated.
    """
    _check_settings(config)
    config.rollout.stop = stop_strings(config.rollout.stop, config.data.prompt_style)
    sets: dict[str, list[Problem]] = {}
    notes: list[str] = []
    for name, path in split_sets(config.data.sets).items():
        sets[name] = load_problems(path, notes.append)[: config.data.limit or None]
    players = open_players(config, partial(make_encoder, config))
    encoder = players.encoder
    dropped: dict[str, int] = {}
    truncated_prompts: dict[str, int] = {}
    for name in sets:
        _check_context(config, encoder, sets[name])
        fitting, truncated_prompts[name] = encoder.fit(sets[name])
        dropped[name] = len(sets[name]) - len(fitting)
        sets[name] = fitting
    problems = [problem for problems in sets.values() for problem in problems]
    if asks_judge(config.reward.verifier):
        _check_judge(config, problems, list(sets))
    verifier = players.verifier(config.reward.verifier)
    scorer = Scorer(verifier, config.reward.timeout_s, config.reward.workers)
    if is_scored:
        scorer.check(problems, has_token_ids=True)
    identity = _identity(config, sets)
    label = re.sub(r"[^A-Za-z0-9_.-]+", "-", target.label)
    return Plan(
        config=config,
        target=target,
        folder=output_folder(config.out, target.run or Path(), label, identity),
        sets=sets,
        dropped=dropped,
        truncated_prompts=truncated_prompts,
        encoder=encoder,
        scorer=scorer,
        identity=identity,
        turns=players.turns,
        notes=tuple(notes),
    )


def make_encoder(config: EvalConfig, tool_schemas: Any, may_be_empty: bool) -> Encoder:
    """Return the prompts of the model; they must fit its context beside the response."""
    tokenizer = load_tokenizer(config.model, config.seed)
    context = context_length(model_config(config.model, config.seed))
    max_tokens = context - config.rollout.max_response_tokens
    if max_tokens < 1:
        raise TooLarge(
            f"rollout.max_response_tokens={config.rollout.max_response_tokens} leaves no tokens "
            f"for a prompt in the model's context of {context}; lower it"
        )
    if config.data.max_prompt_tokens is not None:
        max_tokens = min(max_tokens, config.data.max_prompt_tokens)
    data: Any = dataclasses.replace(config.data, max_prompt_tokens=max_tokens)
    return make_encoder_of(tokenizer, data, tool_schemas, may_be_empty)


def _check_context(config: EvalConfig, encoder: Encoder, problems: list[Problem]) -> None:
    """Raise ConfigError for a prompt that the model's context, and no setting, is too short for.

    Only if such prompts are neither dropped nor truncated.
    """
    given = config.data.max_prompt_tokens
    limit = encoder.max_prompt_tokens
    if config.data.overlong != "error" or (given is not None and given <= limit):
        return
    longest = max(len(encoder.prompt(problem)) for problem in problems)
    response = config.rollout.max_response_tokens
    if longest > limit:
        raise TooLarge(
            f"a prompt of {longest} tokens and rollout.max_response_tokens={response} exceed the "
            f"model's context of {limit + response}; lower rollout.max_response_tokens, or drop or "
            "truncate long prompts with data.overlong",
            at="rollout.max_response_tokens",
        )


def _check_settings(config: EvalConfig) -> None:
    """Raise ConfigError for settings that an evaluation does not use."""
    check_cluster(config.cluster)
    defaults = EvalConfig()
    for key in TRAINING_ONLY:
        value = _value_at(config, key)
        default = _value_at(defaults, key)
        if value != default and (value or default):  # null and false are the same here
            raise NoEffect(f"{key}={value} is for training only; remove it")
    if config.reward.objective != "maximize":
        raise NoEffect(
            f"reward.objective={config.reward.objective} is for training only; remove it"
        )
    check_judge(config.reward)


def _value_at(config: EvalConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _check_judge(config: EvalConfig, problems: list[Problem], set_names: list[str]) -> None:
    """Raise ConfigError for settings and problems that a judge cannot score usefully."""
    reward = config.reward
    lowest = reward.judge.lowest
    suggestion = reward.judge.highest - 2
    if is_pairwise(reward.judge) or has_rubric(reward.judge):
        lowest = 0
        suggestion = 1
    if reward.verifier == LLM_JUDGE and reward.pass_score <= lowest:
        raise WrongValue(
            f"reward.pass_score={reward.pass_score:g} counts every response as right, because the "
            f"judge's lowest rating is {lowest}; try reward.pass_score={suggestion}"
        )
    if RATINGS_STEM in set_names:
        raise Conflict(
            f"a set cannot be named {RATINGS_STEM}, because {RATINGS_STEM}.jsonl has the judge's "
            "ratings; give another name with data=NAME=FILE",
            at="data",
        )
    check_references(reward, problems)


def resolve_auto_settings(plan: Plan) -> None:
    """Replace `auto` settings by values for this machine.

    Unlike in training, no value depends on a measured time, so that results can be repeated.
    """
    resolve_engine_settings(plan.config)
    rollout = plan.config.rollout
    num_responses = CPU_RESPONSES if plan.config.model.device == "cpu" else GPU_RESPONSES
    rollout.batch = rollout.batch or -(-num_responses // rollout.samples)
    plan.identity = _identity(plan.config, plan.sets)


def resolve_engine_settings(config: EvalConfig) -> None:
    """Replace the `auto` settings of model and engine by values for this machine."""
    model = config.model
    check_engine(engine_config(config))
    device = choose_device(model.device)
    model.device = device.type
    if model.dtype == "auto" and device.type == "cpu":
        model.dtype = "float32"
    model.dtype = choose_dtype(model.dtype, device)
    model.threads = model.threads or torch.get_num_threads()


def engine_config(config: EvalConfig) -> EngineConfig:
    """Return the settings that the engine of an evaluation is built from."""
    rollout = _base_section(RolloutConfig, config.rollout)
    rollout.temperature = 1.0  # unused: each call of the engine names its own, which may be 0
    model = _base_section(ModelConfig, config.model)
    settings = EngineConfig(config.seed, model, rollout, config.cluster)
    if config.data.max_prompt_tokens is not None:
        settings.max_prompt_tokens = config.data.max_prompt_tokens
    return settings


def _base_section(kind: type[Section], section: Any) -> Section:
    """Return a section of training without the keys that evaluation adds."""
    values = {f.name: getattr(section, f.name) for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**values)


def _identity(config: EvalConfig, sets: dict[str, list[Problem]]) -> dict[str, Any]:
    """Return the settings and versions that the result files depend on.

    Sets are identified by their content, so a file may be moved.
    """
    values: dict[str, Any] = dataclasses.asdict(config)
    del values["out"]
    del values["cluster"]
    del values["reward"]["workers"]
    values["data"]["sets"] = {
        name: {"problems": len(problems), "content": _content_hash(problems)}
        for name, problems in sets.items()
    }
    values["model"]["weights"] = weights_fingerprint(config.model.path, config.seed)
    for term in parse_reward(config.reward.verifier).models:
        values["reward"][f"{term.role}_weights"] = folder_fingerprint(
            Path(term.model_path).expanduser()
        )
    # Code and templates that produce or score responses.
    names = names_in([values[section] for section in ("rollout", "environment", "agent", "reward")])
    if hashes := hash_files(names):
        values["files"] = [f"{name} {digest[:8]}" for name, digest in hashes.items()]
    values["versions"] = {"postgrad": __version__}
    for name in PACKAGES:
        values["versions"][name] = importlib.metadata.version(name)
    return values


def _content_hash(problems: list[Problem]) -> str:
    """Return a hash of all that prompts and verifiers may read of these problems."""
    digest = hashlib.blake2b(digest_size=8)
    for problem in problems:
        digest.update(json.dumps(sent_fields(problem), default=str).encode())
    return digest.hexdigest()

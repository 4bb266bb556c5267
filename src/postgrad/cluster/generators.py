"""Models of roles with their tokenizers: they generate text or score responses.

They are loaded by the run, the run's own engine, or a server.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from postgrad.cluster.host import load_reward_model, load_role
from postgrad.cluster.ports import GENERATING, is_remote_role
from postgrad.config.schema import Config, EngineConfig, RewardConfig, engine_config
from postgrad.data.encode.encoder import Encoder
from postgrad.errors import ConfigError
from postgrad.methods.ports import LIVE, Role
from postgrad.model.load.context import context_length
from postgrad.model.load.load import load_tokenizer, model_config
from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Engine
from postgrad.rollout.generator import Chat, Generator
from postgrad.rollout.served_path import is_served, parse_served_path
from postgrad.verifiers.expression import Term, asks_judge, parse_reward
from postgrad.verifiers.scorer import JudgeModel

MAX_CALLS = 64  # concurrent calls to a served engine


def open_chat(config: EngineConfig, path: str, engine: Engine | None, template: str) -> Chat:
    """Return the model that answers messages at a role's path, without the rest of a run.

    It is a server's model, `engine` itself, or a model that is loaded in this process.

    Args:
        config: the settings of the engine of the run or the evaluation.
        path: as of a role: a model path, http://host:8000/v1#model, policy:live, ...
        engine: the engine of the run or the evaluation; None where no path is policy:live.
        template: how messages become a prompt (data.template).
    """
    model = None
    if not is_remote_role(path):
        from postgrad.rollout.native.engine import NativeEngine

        loaded = load_role(config, "judge", path)
        loaded.model.requires_grad_(False)
        model = NativeEngine(loaded, config.rollout)
    return _make_generator(config, Role("chat", path), engine, model, template)


def add_generators(
    config: Config, roles: dict[str, Role], engine: Engine, models: dict[str, Any]
) -> dict[str, Any]:
    """Return the models by role; those that generate text become a Generator or a Chat.

    Reward models become a ModelVerifier, frozen models of a server HttpLogprobs.

    Raises: ConfigError that names the role.
    """
    settings = engine_config(config)
    terms = {term.role: term for term in parse_reward(config.reward.verifier).models}
    all_models = dict(models)
    for name, role in roles.items():
        if role.kind == "scores":
            all_models[name] = _make_verifier(settings, terms[name], models[name])
        if role.kind == "frozen" and is_served(role.path):
            from postgrad.rollout.http_client import Address
            from postgrad.rollout.http_logprobs import HttpLogprobs

            url, _ = parse_served_path(role.path)
            all_models[name] = HttpLogprobs(Address.parse(url), config.cluster.wait_s, MAX_CALLS)
        if role.kind not in GENERATING:
            continue
        try:
            all_models[name] = _make_generator(
                settings, role, engine, models.get(name), config.data.template
            )
        except ConfigError as error:
            raise error.reworded(f"{name}: {error}", at=name) from error
    return all_models


def open_scoring_models(
    config: EngineConfig, reward: RewardConfig, engine: Engine | None = None, template: str = "auto"
) -> dict[str, Any]:
    """Return the models that score responses by role, loaded in this process or behind a server.

    Those are the reward models of reward.verifier, and the judge; see `open_chat`.
    """
    models: dict[str, Any] = {
        term.role: _make_verifier(config, term, load_reward_model(config, term.model_path))
        for term in parse_reward(reward.verifier).models
    }
    if asks_judge(reward.verifier):
        judge = reward.judge
        models["judge"] = open_chat(config, judge.model, engine, template)
    return models


def _make_verifier(config: EngineConfig, term: Term, model: Any) -> JudgeModel:
    settings = dataclasses.replace(config.model, path=term.model_path)
    encoder = Encoder(load_tokenizer(settings, config.seed))
    return ModelVerifier(model, encoder)


def _make_generator(
    config: EngineConfig,
    role: Role,
    engine: Engine | None,
    model: Any,
    template: str,
) -> Any:
    if is_served(role.path):
        return _make_served(config, role, template)
    model_settings = config.model
    if role.path and not is_remote_role(role.path):
        model_settings = dataclasses.replace(config.model, path=role.path)
    encoder = Encoder(load_tokenizer(model_settings, config.seed), template)
    context = context_length(model_config(model_settings, config.seed))
    source: Any = engine if role.path == LIVE else model
    return Generator(source, encoder, context)


def _make_served(config: EngineConfig, role: Role, template: str) -> Any:
    from postgrad.rollout.http import HttpChat, HttpEngine
    from postgrad.rollout.http_client import Address

    url, tokenizer_path = parse_served_path(role.path)
    address = Address.parse(url)
    if role.kind == "chat":
        return HttpChat(address, config.cluster.wait_s)
    model_settings = dataclasses.replace(config.model, path=tokenizer_path)
    try:
        tokenizer = load_tokenizer(model_settings, config.seed)
    except ConfigError as error:
        raise error.reworded(
            f"no tokenizer for the served model ({error}); "
            "give its path: http://host:8000/v1?tokenizer=PATH#model"
        ) from error
    encoder = Encoder(tokenizer, template)
    num_calls = min(MAX_CALLS, config.rollout.max_rows)
    engine = HttpEngine(address, encoder, config.cluster.wait_s, num_calls)
    return Generator(engine, encoder, engine.max_context)


class ModelVerifier:
    """Scores responses with a reward model, whose own tokenizer and chat template are used.

    `model` is one in this process or another one; its port has `scores`.
    """

    def __init__(self, model: Any, encoder: Encoder) -> None:
        self.model = model
        self.encoder = encoder

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Score | Failure]:
        """One Score per response; a Failure for a conversation longer than the context."""
        pairs = zip(problems, responses, strict=True)
        rows = [self.encoder.scored(problem, text) for problem, text in pairs]
        images = [problem.prompt_images for problem in problems]
        values = self.model.scores(rows, images).tolist()
        return [_as_score(value, row) for value, row in zip(values, rows, strict=True)]


def _as_score(value: float, row: Sequence[int]) -> Score | Failure:
    if math.isfinite(value):
        return Score(value)
    return Failure("reward_model", f"no score for a conversation of {len(row)} tokens")

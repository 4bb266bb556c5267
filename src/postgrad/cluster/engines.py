"""Builds the engine of a run or of an evaluation from its settings.

rollout/kinds.py has the table of engines. An engine runs beside the trained model, alone in a
process of its own, or in the driver's process in front of a server.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from postgrad.config.compose import compose_section
from postgrad.config.schema import Config, EngineConfig, engine_config
from postgrad.config.values import read_yaml
from postgrad.model.device import choose_device
from postgrad.model.load.formats import Loaded, check_is_language_model
from postgrad.model.load.load import load, load_tokenizer, model_config, resolve_path
from postgrad.model.threads import set_threads
from postgrad.rollout.engine import Engine
from postgrad.rollout.kinds import find_engine


class StandaloneEngine(NamedTuple):
    """An engine without a trainer beside it."""

    engine: Engine
    loaded: Loaded | None  # the model it samples from; None when the engine keeps its own weights


def read_engine_config(text: str) -> EngineConfig:
    """Parse the YAML that `to_yaml` wrote of an EngineConfig. Raises ConfigError."""
    values = read_yaml(text)
    assert isinstance(values, dict), "to_yaml writes a mapping"
    return compose_section(EngineConfig, [], values)  # type: ignore[arg-type]


def shares_weights(config: Config) -> bool:
    """Return whether the run's engine samples from the parameters that are trained."""
    return find_engine(config.rollout.engine).shares_weights and not config.cluster.engines


def is_remote(config: Config | EngineConfig) -> bool:
    """Return whether a server samples, so that only the driver's process holds the engine."""
    return find_engine(config.rollout.engine).remote


def build_engine(config: Config, loaded: Loaded) -> Engine:
    """Build the run's engine in the process that holds the trained model."""
    return find_engine(config.rollout.engine).build(engine_config(config), loaded, None)


def build_remote_engine(config: Config) -> Engine:
    """Build the run's engine in front of a server, which takes new weights after each step."""
    settings = engine_config(config)
    folder = Path(config.runs) / config.name / "weights"
    return find_engine(config.rollout.engine).build(settings, describe_model(settings), folder)


def load_engine(config: EngineConfig) -> StandaloneEngine:
    """Load the model where the engine needs one, and build the engine. Nothing is trained.

    An adapter folder's weights are merged into its base model. With rollout.stream the engine
    decodes in polls.
    """
    kind = find_engine(config.rollout.engine)
    set_threads(config.model.threads)
    loaded = None
    if kind.shares_weights:
        loaded = load(config.model, choose_device(config.model.device), config.seed)
    engine = kind.build(config, loaded or describe_model(config), None)
    if config.rollout.stream:
        from postgrad.rollout.continuous import ContinuousEngine

        engine = ContinuousEngine(engine, config.rollout)
    return StandaloneEngine(engine, loaded)


@contextmanager
def open_local_engine(config: EngineConfig) -> Iterator[Engine]:
    """Yield an engine alone, in this process."""
    yield load_engine(config).engine


def describe_model(config: EngineConfig) -> Loaded:
    """Return a model without weights: its configuration, generation settings and tokenizer.

    Raises ConfigError for a reward model, which generates no text.
    """
    from transformers import GenerationConfig

    architecture = model_config(config.model, config.seed)
    check_is_language_model(architecture, config.model.path)
    path = resolve_path(config.model.path, config.seed)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the file is optional
        generation = GenerationConfig.from_model_config(architecture)
    model = SimpleNamespace(config=architecture, generation_config=generation)
    return Loaded(model, load_tokenizer(config.model, config.seed))

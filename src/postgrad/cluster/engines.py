"""Which engine samples: built from the configuration, beside the model or alone.

native and hf sample from the trainer's own parameters where they live beside it. vllm and http keep weights of their own, which are
handed over after each step.
"""

from pathlib import Path
from types import SimpleNamespace

from postgrad.config.schema import Config
from postgrad.data.render import Prompts
from postgrad.errors import ConfigError
from postgrad.model.load import load_tokenizer, model_config, resolve_path, stop_ids
from postgrad.model.loaded import Loaded
from postgrad.rollout.engine import Engine
from postgrad.rollout.http import Address, HttpEngine
from postgrad.rollout.refresh import HttpRollouts

OVER_A_MODEL = ("native", "hf")  # engines over a model that is loaded beside them
EXAMPLE = "http://host:8000/v1#model"
MOST_CALLS = 256  # to a server at a time


def shares_weights(config: Config) -> bool:
    """Whether the run's engine samples from the very parameters that are trained."""
    return config.rollout.engine in OVER_A_MODEL and not config.cluster.engine_apart


def check_engine(config: Config) -> None:
    """Refuse an engine that cannot be had, before anything is loaded. Raises ConfigError."""
    rollout = config.rollout
    if bool(rollout.url) != (rollout.engine == "http"):
        raise ConfigError(
            f"rollout.engine=http needs the server's address: add rollout.url={EXAMPLE}"
            if rollout.engine == "http"
            else f"rollout.url={rollout.url} is for rollout.engine=http, and rollout.engine={rollout.engine}; change one of them"
        )
    if rollout.engine == "http":
        Address.of(rollout.url)
        if config.cluster.engine_apart:
            raise ConfigError("rollout.engine=http is apart already; remove cluster.engine_apart")
    if rollout.engine == "vllm":
        from postgrad.rollout.vllm import check_vllm

        check_vllm()


def build_engine(config: Config, loaded: Loaded | None) -> Engine:
    """The engine of a host. `loaded` is the model beside it; None where the engine keeps its own."""
    kind = config.rollout.engine
    if kind == "vllm":
        from postgrad.rollout.vllm import VllmEngine

        return VllmEngine(loaded or _described(config), config)
    if loaded is None:
        raise ConfigError(f"rollout.engine={kind} needs the model beside it")
    if kind == "hf":
        from postgrad.rollout.hf import HfEngine

        return HfEngine(loaded, config.rollout)
    from postgrad.rollout.native.engine import NativeEngine

    return NativeEngine(loaded, config.rollout)


def served_engine(config: Config, trains: bool) -> Engine:
    """The engine behind rollout.url; one that `trains` must take new weights."""
    described = _described(config)
    prompts = Prompts(described.tokenizer, config.data.template)
    address, wait_s = Address.of(config.rollout.url), config.cluster.wait_s
    calls = min(MOST_CALLS, config.rollout.max_rows or MOST_CALLS)
    if not trains:
        return HttpEngine(address, prompts, wait_s, calls)
    folder = Path(config.runs) / config.name / "weights"
    return HttpRollouts(address, prompts, stop_ids(described), folder, wait_s, calls)


def _described(config: Config) -> Loaded:
    """What a model is like, without its weights: its configuration, its generation settings and its tokenizer."""
    from transformers import GenerationConfig

    shape = model_config(config.model, config.seed)
    path = resolve_path(config.model.path, config.seed)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # the file is not a must
        generation = GenerationConfig.from_model_config(shape)
    return Loaded(
        SimpleNamespace(config=shape, generation_config=generation),
        load_tokenizer(config.model, config.seed),
    )

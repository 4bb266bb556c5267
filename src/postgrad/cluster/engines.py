"""Which engine samples: built from the configuration, beside the model or alone.

native and hf sample from the trainer's own parameters where they live beside it. vllm and http keep weights of their own, which are
handed over after each step.
"""

from postgrad.config.schema import Config
from postgrad.model.load import Loaded
from postgrad.rollout.engine import Engine

SHARING = ("native", "hf")  # engines over a model that is loaded here


def needs_model(config: Config) -> bool:
    """Whether the engine samples from a model loaded in its own process."""
    return config.rollout.engine in SHARING


def shares_weights(config: Config) -> bool:
    """Whether the run's engine samples from the very parameters that are trained."""
    return needs_model(config) and not config.cluster.engine_apart


def build_engine(config: Config, loaded: Loaded) -> Engine:
    """The engine that rollout.engine names. Raises ConfigError where it cannot be had."""
    if config.rollout.engine == "hf":
        from postgrad.rollout.hf import HfEngine

        return HfEngine(loaded, config.rollout)
    from postgrad.rollout.native.engine import NativeEngine

    return NativeEngine(loaded, config.rollout)

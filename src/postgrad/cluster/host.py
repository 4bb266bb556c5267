"""A host: the models of a run as they live in one process, built from the configuration alone.

The driver's process is a host when cluster.place=local; a child process is one when cluster.place=process. Both are the same code.
"""

from dataclasses import dataclass

from postgrad.config.schema import Config
from postgrad.methods import find_method
from postgrad.model.device import choose_device, set_threads
from postgrad.model.load import load
from postgrad.model.policy import LocalPolicy
from postgrad.rollout.native.engine import NativeEngine

ENGINES = {"native": NativeEngine}


@dataclass
class Host:
    """A policy, and an engine that samples from its very parameters."""

    policy: LocalPolicy
    engine: NativeEngine


def build_host(config: Config) -> Host:
    """Load the model and put the ports around it. The configuration is resolved: no auto is left in it."""
    set_threads(config.model.threads)
    loaded = load(config.model, choose_device(config.model.device), config.seed)
    method = find_method(config.method.name)(config)
    return Host(LocalPolicy(config, loaded, method), ENGINES[config.rollout.engine](loaded, config.rollout.max_rows))

"""The ports of models in another process: the methods that can be called, and how a call fails.

The driver's side is RemotePort; the worker's side is call_port. Imports no torch.
"""

import re
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError

from postgrad.errors import ConfigError, RunError
from postgrad.methods.ports import LIVE
from postgrad.rollout.served_path import is_served
from postgrad.user_code import user_error

START_S = 300.0  # time limit of a worker's start, which imports torch and loads the model

# Names of the ports that every run has; the others are named after their roles.
POLICY = "policy"
ENGINE = "engine"
GENERATING = ("engine", "chat")  # kinds of roles that generate text
_SAVE = ("save", "load")
# The methods of each kind of port. No other attribute of an object can be called.
METHODS = {
    "policy": ("logprobs", "top_logprobs", "update", "token_stats", "weights", *_SAVE),
    "engine": ("generate", "publish", "poll"),
    "chat": ("generate",),
    "frozen": ("logprobs", "top_logprobs"),
    "scores": ("scores",),
    "critic": ("values", "update", *_SAVE),
}

# Status of a rank whose collective operation failed: another rank or its node was lost.
LOST_PEER = "lost peer"
_GLOO_PLACE = re.compile(r"^\[[^\]]*gloo[^\]]*\]\s*")

Ports = dict[str, tuple[str, Any]]  # port name -> kind and object


class RunModels(NamedTuple):
    """The models of a run behind their ports; `models` are those of the method's roles."""

    policy: Any
    engine: Any  # None where a server samples
    models: dict[str, Any]


class Caller(Protocol):
    """Sends calls to a child process or to actors on Ray."""

    def call(self, port: str, method: str, *arguments: Any) -> Any: ...


class RemotePort:
    """A model in another process: the methods of its kind, with the numbers of a local model.

    `shares_weights` is an attribute of engines: whether it samples from the trained parameters.
    """

    def __init__(self, caller: Caller, name: str, kind: str, shares_weights: bool = False) -> None:
        self.caller = caller
        self.shares_weights = shares_weights
        for method in METHODS[kind]:
            setattr(self, method, partial(caller.call, name, method))


def is_remote_role(path: str) -> bool:
    """Return whether no process loads a role's model: it is the run's own engine, or a server."""
    return path == LIVE or is_served(path)


def call_port(ports: Ports, port: str, method: str, arguments: list[Any]) -> tuple[str, Any]:
    """Call a method of a port; returns ("ok", result) or its failure as `attempt` does."""
    kind, target = ports.get(port, ("", None))
    if method not in METHODS.get(kind, ()):
        return "error", f"no port method {port}.{method}"
    return attempt(lambda: getattr(target, method)(*arguments))


def attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    """Return ("ok", result), ("config", a ConfigError's parts), else ("error", message).

    The status is LOST_PEER if the connection to another rank failed. The message of an error in the
    user's own code has the file and the line; an unexpected one is also printed with its traceback.
    """
    try:
        return "ok", work()
    except ConfigError as error:
        return "config", error.to_wire()
    except RunError as error:
        return "error", str(error)
    except (OSError, SafetensorError) as error:  # a full disk or a damaged file: no traceback
        return "error", f"{type(error).__name__}: {error}"
    except Exception as error:
        if _is_lost_peer(error):
            traceback.print_exc()
            return LOST_PEER, _GLOO_PLACE.sub("", str(error)).split(". ")[0]
        if text := user_error(error):
            return "error", text
        traceback.print_exc()
        return "error", f"{type(error).__name__}: {error}"


def _is_lost_peer(error: Exception) -> bool:
    """Return whether an exception is of a process group: NCCL has a type, gloo only a text."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return False
    return isinstance(error, distributed.DistError) or bool(_GLOO_PLACE.match(str(error)))


def to_exception(kind: str, message: Any) -> ConfigError | RunError:
    """Return the exception that the driver raises for a failure of `attempt`."""
    return ConfigError.from_wire(message) if kind == "config" else RunError(message)

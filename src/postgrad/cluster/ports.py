"""The worker's side of the ports: which methods can be called, and failures as messages."""

import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from postgrad.errors import ConfigError, RunError

# Names of the ports that every run has; the others are named after their roles.
POLICY = "policy"
ENGINE = "engine"
# The methods of each kind of port. No other attribute of an object can be called.
METHODS = {
    "policy": (
        "logprobs",
        "top_logprobs",
        "update",
        "token_stats",
        "weights",
        "save",
        "load",
        "begin_save",
        "saved",
    ),
    "engine": ("generate", "publish", "poll"),
    "chat": ("generate",),
    "frozen": ("logprobs", "top_logprobs"),
    "synced": ("logprobs", "top_logprobs", "publish", "save", "load", "begin_save", "saved"),
    "scores": ("scores",),
    "critic": ("values", "update", "save", "load", "begin_save", "saved"),
}

# Status of a rank whose collective operation failed: another rank or its node was lost.
LOST_PEER = "lost peer"
_GLOO_PLACE = re.compile(r"^\[[^\]]*gloo[^\]]*\]\s*")

Ports = dict[str, tuple[str, Any]]  # port name -> kind and object


def call_port(ports: Ports, port: str, method: str, arguments: list[Any]) -> tuple[str, Any]:
    """Calls a method of a port; returns ("ok", result) or its failure as `attempt` does."""
    kind, target = ports.get(port, ("", None))
    if method not in METHODS.get(kind, ()):
        return "error", f"no port method {port}.{method}"
    return attempt(lambda: getattr(target, method)(*arguments))


def attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    """Returns ("ok", result), ("config", message) for a ConfigError, else ("error", message).

    The status is LOST_PEER if the connection to another rank failed. An unexpected exception is
    also printed to stderr with its traceback.
    """
    try:
        return "ok", work()
    except ConfigError as error:
        return "config", str(error)
    except RunError as error:
        return "error", str(error)
    except (OSError, SafetensorError) as error:  # a full disk or a damaged file: no traceback
        return "error", f"{type(error).__name__}: {error}"
    except Exception as error:
        traceback.print_exc()
        if _is_lost_peer(error):
            return LOST_PEER, _GLOO_PLACE.sub("", str(error)).split(". ")[0]
        return "error", f"{type(error).__name__}: {error}"


def _is_lost_peer(error: Exception) -> bool:
    """Returns whether an exception is of a process group: NCCL has a type, gloo only a text."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return False
    return isinstance(error, distributed.DistError) or bool(_GLOO_PLACE.match(str(error)))


def to_exception(kind: str, message: str) -> ConfigError | RunError:
    """Returns the exception that the driver raises for a failure of `attempt`."""
    return ConfigError(message) if kind == "config" else RunError(message)

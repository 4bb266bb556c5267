"""From the settings to the environments of a run: which class, for which problem."""

import hashlib
import inspect
import uuid
from typing import Any

from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.environments.calls import CallParser
from postgrad.environments.host import Host, ThreadHost
from postgrad.environments.mcp_tools import close_run
from postgrad.environments.pool import ChildPool
from postgrad.environments.port import tool_methods
from postgrad.environments.remote import check_remote, fetch_schema, is_url
from postgrad.environments.session import SessionSpec, forget_loaded_code, load_environment
from postgrad.environments.tools import Toolbox, tool_schema
from postgrad.errors import ConfigError, did_you_mean
from postgrad.problem import Problem, named
from postgrad.user_code import PythonObject, is_path

REMOTE = "postgrad.environments.remote:RemoteEnvironment"
COLUMN = "environment"  # of a row: the name of its environment


class Environments:
    """The environments and tools of a run.

    `environment.name` is one environment, or several as `NAME=ENVIRONMENT,NAME=ENVIRONMENT`. Of
    several, a row's column `environment` names its own; rows without it are divided by
    `environment.weights`, always in the same way.

    Raises:
        ConfigError: there is no such class, or it does not take its options.
    """

    def __init__(self, environment: EnvironmentConfig, rollout: RolloutConfig) -> None:
        forget_loaded_code()
        fetch_schema.cache_clear()  # the server may have been restarted since an earlier run
        self.run = uuid.uuid4().hex  # names the connections to servers, which no two runs share
        self.workers = environment.workers
        self.limits = {
            "timeout_s": environment.timeout_s,
            "max_chars": environment.max_chars,
            "tool_timeout_s": rollout.tool_timeout_s,
            "tool_chars": rollout.tool_chars,
        }
        self.tools = tuple(rollout.tools)
        self.tool_format = rollout.tool_format
        self.paths = _read_names(environment.name)
        self.options = _read_options(environment.options, self.paths)
        self.is_remote = bool(self.paths) and all(map(is_url, self.paths.values()))
        self._find_servers()
        self.weights = _read_weights(environment.weights, self.paths)
        toolbox = Toolbox(rollout.tools, rollout.tool_timeout_s, rollout.tool_chars, self.run)
        self.schemas = list(toolbox.schemas)
        for name, path in self.paths.items():
            environment_class = load_environment(path)
            check_options(environment_class, self.options[name], path)
            for function in tool_methods(environment_class).values():
                toolbox.add(function, path)
                self.schemas.append(tool_schema(function, path))

    def _find_servers(self) -> None:
        """Replace the addresses of servers by RemoteEnvironment. Raises ConfigError."""
        for name, path in self.paths.items():
            if is_url(path):
                check_remote(path, self.options[name])
                self.options[name] |= {"url": path, "timeout_s": self.limits["timeout_s"]}
                self.paths[name] = REMOTE

    @property
    def has_environment(self) -> bool:
        return bool(self.paths)

    def spec_for(self, problem: Problem) -> SessionSpec:
        """Return what the sessions of a problem are made from. Raises ConfigError."""
        name = self.choose(problem)
        return SessionSpec(
            environment=self.paths.get(name, ""),
            options=self.options.get(name, {}),
            tools=self.tools,
            run=self.run,
            **self.limits,
        )

    def close(self) -> None:
        """End the connections of this run to servers of tools."""
        close_run(self.run)

    def choose(self, problem: Problem) -> str:
        """Return the name of a problem's environment; "" if there are only tools."""
        if len(self.paths) < 2:
            return next(iter(self.paths), "")
        name = problem.extra.get(COLUMN)
        if name is not None:
            if name not in self.paths:
                hint = did_you_mean(str(name), self.paths)
                raise ConfigError(f"{named(problem)}: environment={name} is unknown; {hint}")
            return name
        digest = hashlib.blake2b(problem.uid.encode(), digest_size=8).digest()
        point = int.from_bytes(digest, "little") / 2**64 * sum(self.weights.values())
        for name, weight in self.weights.items():
            point -= weight
            if point < 0:
                return name
        return next(reversed(self.weights))

    def call_parser(self, tokenizer: Any) -> CallParser:
        """Return what finds the tool calls of a model with this tokenizer."""
        return CallParser(self.tool_format, tokenizer, self.schemas)

    def new_host(self) -> Host:
        """Return what runs the sessions.

        That is child processes for environments, and threads for servers and tools, which wait. A
        class or a tool of this process, such as one of a notebook, runs in threads too: another
        process could not import it.
        """
        needed = [*self.paths.values(), *self.tools]
        has_objects = any(isinstance(path, PythonObject) for path in needed)
        if self.has_environment and self.workers and not self.is_remote and not has_objects:
            return ChildPool(self.workers)
        return ThreadHost()


def open_environments(
    environment: EnvironmentConfig, rollout: RolloutConfig
) -> Environments | None:
    """Return the environments and tools of the settings; None if there are none."""
    if not environment.name and not rollout.tools:
        return None
    return Environments(environment, rollout)


def _read_names(text: str) -> dict[str, str]:
    """Return the path of each named environment; the only one has the name ""."""
    if isinstance(text, PythonObject):  # a class of this process
        return {"": text}
    parts = [part.strip() for part in text.split(",")] if text else []
    if len(parts) == 1 and ("=" not in parts[0] or is_url(parts[0])):
        return {"": find_environment(parts[0])}
    paths: dict[str, str] = {}
    for part in parts:
        name, equals, path = part.partition("=")
        if not equals or not name or name in paths:
            raise ConfigError(
                f"environment={text}: several environments need different names; "
                "write NAME=file.py:Class,NAME=file.py:Class"
            )
        paths[name] = find_environment(path)
    return paths


def find_environment(name: str) -> str:
    """Return the path of an environment's class; the address of a server stays as it is.

    Raises ConfigError.
    """
    if not is_url(name) and not is_path(name):
        raise ConfigError(
            f"environment={name} is not an environment; "
            "use environment=file.py:Class, package.module:Class or http://HOST:PORT"
        )
    return name


def _read_options(options: dict[str, Any], paths: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the options of each environment: of several, environment.options.NAME.OPTION."""
    if set(paths) <= {""}:
        return {name: dict(options) for name in paths}
    for name in options:
        if name not in paths:
            raise ConfigError(
                f"environment.options.{name}: no environment has this name; "
                f"{did_you_mean(name, paths)}"
            )
    return {name: dict(options.get(name, {})) for name in paths}


def _read_weights(weights: dict[str, float], paths: dict[str, str]) -> dict[str, float]:
    for name, weight in weights.items():
        if name not in paths or not name:
            hint = did_you_mean(name, paths)
            raise ConfigError(f"environment.weights.{name}: no such environment; {hint}")
        if weight < 0:
            raise ConfigError(f"environment.weights.{name}={weight:g} must be at least 0")
    filled = {name: weights.get(name, 1.0) for name in paths}
    if len(filled) > 1 and not sum(filled.values()):
        raise ConfigError("environment.weights: at least one weight must be above 0")
    return filled


def check_options(environment_class: type, options: dict[str, Any], path: str) -> None:
    """Refuse options that the class does not take. Raises ConfigError."""
    signature = inspect.signature(environment_class)
    try:
        signature.bind(**options)
    except TypeError as error:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        taken = [name for name, one in signature.parameters.items() if one.kind in kinds]
        unknown = [name for name in options if name not in taken]
        if unknown:
            hint = did_you_mean(unknown[0], taken) if taken else "it takes none"
            raise ConfigError(
                f"environment.options.{unknown[0]}: {path} has no such argument; {hint}"
            ) from error
        raise ConfigError(
            f"environment.options: {path} {error}; set environment.options.NAME=VALUE"
        ) from error

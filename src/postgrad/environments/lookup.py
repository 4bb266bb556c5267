"""From the settings to the environments of a run: which class, for which problem."""

import hashlib
import inspect
import uuid
from dataclasses import dataclass
from typing import Any

from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.environments.calls import CallParser
from postgrad.environments.host import Host, ThreadHost
from postgrad.environments.pool import ChildPool
from postgrad.environments.port import tool_methods
from postgrad.environments.remote import check_remote, fetch_schema, is_url
from postgrad.environments.session import (
    SessionSpec,
    close_toolboxes,
    load_environment,
    load_toolbox,
)
from postgrad.environments.tools import tool_schema
from postgrad.errors import Conflict, UnknownName, UserCode, WrongValue, did_you_mean
from postgrad.problem import Problem, problem_label
from postgrad.user_code import PythonObject, is_path

REMOTE = "postgrad.environments.remote:RemoteEnvironment"
COLUMN = "environment"  # of a row: the name of its environment


@dataclass
class Entry:
    """One environment of a run: the path of its class, the options, its share of the rows."""

    path: str
    options: dict[str, Any]
    weight: float


NO_ENTRY = Entry("", {}, 0.0)  # there are only tools


class Environments:
    """The environments and tools of a run.

    `environment.name` is one environment, or several as `NAME=ENVIRONMENT,NAME=ENVIRONMENT`. Of
    several, a row's column `environment` names its own; rows without it are divided by
    `environment.weights`, always in the same way.

    Raises:
        ConfigError: there is no such class, or it does not take its options.
    """

    def __init__(self, environment: EnvironmentConfig, rollout: RolloutConfig) -> None:
        load_environment.cache_clear()  # the file may have changed since an earlier run
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
        self.entries = _read_entries(environment)
        # Servers, whose sessions only wait. Their addresses become options of RemoteEnvironment.
        servers = [entry for entry in self.entries.values() if is_url(entry.path)]
        self.is_remote = 0 < len(servers) == len(self.entries)
        for entry in servers:
            check_remote(entry.path, entry.options)
            entry.options |= {"url": entry.path, "timeout_s": environment.timeout_s}
            entry.path = REMOTE
        toolbox = load_toolbox(self._make_spec(NO_ENTRY)).with_functions({})
        self.schemas = list(toolbox.schemas)
        for entry in self.entries.values():
            environment_class = load_environment(entry.path)
            check_options(environment_class, entry.options, entry.path)
            for function in tool_methods(environment_class).values():
                toolbox.add(function, entry.path)
                self.schemas.append(tool_schema(function, entry.path))

    @property
    def has_environment(self) -> bool:
        return bool(self.entries)

    def spec_for(self, problem: Problem) -> SessionSpec:
        """Return what the sessions of a problem are made from. Raises ConfigError."""
        return self._make_spec(self.entries.get(self.choose(problem), NO_ENTRY))

    def _make_spec(self, entry: Entry) -> SessionSpec:
        return SessionSpec(
            environment=entry.path,
            options=entry.options,
            tools=self.tools,
            run=self.run,
            **self.limits,
        )

    def close(self) -> None:
        """End the connections of this run to servers of tools."""
        close_toolboxes(self.run)

    def choose(self, problem: Problem) -> str:
        """Return the name of a problem's environment; "" if there are only tools."""
        if len(self.entries) < 2:
            return next(iter(self.entries), "")
        name = problem.extra.get(COLUMN)
        if name is not None:
            if name not in self.entries:
                hint = did_you_mean(str(name), self.entries)
                raise UnknownName(
                    f"{problem_label(problem)}: environment={name} is unknown; {hint}",
                    at="environment",
                )
            return name
        digest = hashlib.blake2b(problem.uid.encode(), digest_size=8).digest()
        total = sum(entry.weight for entry in self.entries.values())
        point = int.from_bytes(digest, "little") / 2**64 * total
        for name, entry in self.entries.items():
            point -= entry.weight
            if point < 0:
                return name
        return next(reversed(self.entries))

    def call_parser(self, tokenizer: Any) -> CallParser:
        """Return what finds the tool calls of a model with this tokenizer."""
        return CallParser(self.tool_format, tokenizer, self.schemas)

    def new_host(self) -> Host:
        """Return what runs the sessions.

        That is child processes for environments, and threads for servers and tools, which wait. A
        class or a tool of this process, such as one of a notebook, runs in threads too: another
        process could not import it.
        """
        needed = [*(entry.path for entry in self.entries.values()), *self.tools]
        has_objects = any(isinstance(path, PythonObject) for path in needed)
        if self.has_environment and self.workers and not self.is_remote and not has_objects:
            return ChildPool(self.workers)
        return ThreadHost()


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
            raise Conflict(
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
        raise UnknownName(
            f"environment={name} is not an environment; "
            "use environment=file.py:Class, package.module:Class or http://HOST:PORT"
        )
    return name


def _read_entries(environment: EnvironmentConfig) -> dict[str, Entry]:
    """Return each environment; of several, the options are environment.options.NAME.OPTION."""
    paths = _read_names(environment.name)
    is_named = bool(set(paths) - {""})
    options = environment.options if is_named else {"": environment.options}
    for key, given in (("options", options if is_named else {}), ("weights", environment.weights)):
        for name in given:
            if name not in paths or not name:
                hint = did_you_mean(name, paths)
                raise UnknownName(f"environment.{key}.{name}: no such environment; {hint}")
    weights = {name: environment.weights.get(name, 1.0) for name in paths}
    for name, weight in weights.items():
        if weight < 0:
            raise WrongValue(f"environment.weights.{name}={weight:g} must be at least 0")
    if paths and not sum(weights.values()):
        raise WrongValue("environment.weights: at least one weight must be above 0")
    return {
        name: Entry(path, dict(options.get(name, {})), weights[name])
        for name, path in paths.items()
    }


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
            raise UnknownName(
                f"environment.options.{unknown[0]}: {path} has no such argument; {hint}"
            ) from error
        raise UserCode(
            f"environment.options: {path} {error}; set environment.options.NAME=VALUE"
        ) from error

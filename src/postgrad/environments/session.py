"""One trajectory's environment and tools. Every operation has a time limit and may fail."""

import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from postgrad.environments.calls import Call
from postgrad.environments.port import (
    EnvironmentFailure,
    Observation,
    Outcome,
    Shown,
    is_environment,
    read_reward,
    read_shown,
    read_step,
    tool_methods,
)
from postgrad.environments.tools import ERROR, Toolbox, run_in_thread, shorten_shown
from postgrad.errors import UserCode
from postgrad.problem import Problem
from postgrad.processes.channel import as_json_value
from postgrad.user_code import load_object, place_of
from postgrad.verifiers.port import one_line


@dataclass(frozen=True)
class SessionSpec:
    """What a session is made from.

    Attributes:
        environment: path of the class; "" if there are only tools.
        options: arguments of the class.
        tools: names of tools, as in rollout.tools.
        timeout_s: time limit per call of the environment.
        max_chars: longest observation.
        tool_timeout_s: time limit per tool call.
        tool_chars: longest result of a tool call.
        run: names the run that connections to servers belong to.
    """

    environment: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    timeout_s: float = 30.0
    max_chars: int = 4096
    tool_timeout_s: float = 10.0
    tool_chars: int = 1024
    run: str = ""


@dataclass(frozen=True)
class Operation:
    """What a session does next: `kind` is open, act or finish; an act has the policy's turn."""

    kind: str
    action: str = ""
    calls: tuple[Call, ...] = ()


@cache
def load_environment(path: str) -> type:
    """Return the class at `file.py:Class` or `package.module:Class`. Raises ConfigError."""
    found = load_object(path, f"environment={path}", inspect.isclass, "environment class")
    if not is_environment(found):
        missing = "step(action)" if callable(getattr(found, "reset", None)) else "reset(problem)"
        raise UserCode(
            f"environment={path}: {found.__name__} has no {missing}, which an environment class "
            "needs"
        )
    return found


_toolboxes: dict[tuple[Any, ...], Toolbox] = {}  # by their settings and the run
_loading = threading.Lock()


def load_toolbox(spec: SessionSpec) -> Toolbox:
    """Return the tools of a run in this process: they are loaded, and servers reached, once."""
    key = (spec.run, tuple(spec.tools), spec.tool_timeout_s, spec.tool_chars)
    with _loading:  # of two threads the second one waits for the first one's connections
        if key not in _toolboxes:
            _toolboxes[key] = Toolbox(spec.tools, spec.tool_timeout_s, spec.tool_chars)
        return _toolboxes[key]


def close_toolboxes(run: str) -> None:
    """End what the tools of a run hold in this process."""
    for key in [key for key in _toolboxes if key[0] == run]:
        _toolboxes.pop(key).close()


class Session:
    """The environment object of one trajectory and the tools that its policy may call.

    The methods raise EnvironmentFailure if the environment fails. A tool never fails: its error is
    the answer to the call.
    """

    def __init__(self, spec: SessionSpec, problem: Problem, seed: int) -> None:
        self.spec = spec
        self.problem = problem
        self.seed = seed
        self.environment: Any = None
        self.toolbox = load_toolbox(spec).for_session()
        self.tool_state: dict[str, Any] = {}

    def run(self, operation: Operation) -> Observation | Outcome:
        """Do an operation; returns its result."""
        if operation.kind == "open":
            return self.open()
        if operation.kind == "act":
            return self.act(operation.action, operation.calls)
        return self.finish()

    def open(self) -> Observation:
        """Make the environment and reset it; returns what belongs to the prompt."""
        if not self.spec.environment:
            return Observation()
        text = self._call("reset", self._make_and_reset)
        methods = {name: getattr(self.environment, name) for name in tool_methods(self._class)}
        if methods:
            self.toolbox = self.toolbox.with_functions(methods)
        return self._seen(read_shown(text, "reset"))

    def act(self, action: str, calls: Sequence[Call]) -> Observation:
        """Return what follows a turn of the policy.

        Calls are answered by tools. A turn without calls is an action of the environment's step().
        """
        if calls:
            answers = self.toolbox.answer_turn(calls, self.problem, self.tool_state)
            return Observation.of(
                [{"role": "tool", "content": answer} for answer in answers],
                calls=len(answers),
                errors=sum(isinstance(one, str) and one.startswith(ERROR) for one in answers),
            )
        step = getattr(self.environment, "step", None)
        if step is None:
            return Observation(done=True)
        text, score, done = read_step(self._call("step", lambda: step(action)))
        return self._seen(text, reward=score.value, parts=score.parts, done=done)

    def _seen(self, shown: Shown, **fields: Any) -> Observation:
        content = shorten_shown(shown, self.spec.max_chars)
        return Observation.of([{"role": "user", "content": content}], **fields)

    def finish(self) -> Outcome:
        """Return the results of score() and get_state()."""
        score = getattr(self.environment, "score", None)
        if score is None:
            return Outcome(state=self.get_state())
        reward = read_reward(self._call("score", score), "score")
        return Outcome(reward.value, reward.parts, self.get_state())

    def get_state(self) -> Any:
        """Return the result of get_state() as values of JSON; None if the environment has none."""
        state = self._call_if_present("get_state")
        try:
            return json.loads(json.dumps(state, default=as_json_value))
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"get_state returned what JSON cannot hold: {one_line(error)}"
            raise EnvironmentFailure("invalid", reason) from error

    def close(self) -> None:
        """Call the environment's close(), if it has one, and ignore its errors.

        Also ends the trajectory's own connections to servers.
        """
        with contextlib.suppress(EnvironmentFailure):
            self._call_if_present("close")
        self.toolbox.close_session()

    @property
    def _class(self) -> type:
        return load_environment(self.spec.environment)

    def _make_and_reset(self) -> Any:
        self.environment = self._class(**self.spec.options)
        given = {"problem": self.problem, "seed": self.seed}
        parameters = inspect.signature(self.environment.reset).parameters
        names = [name for name in parameters if name in given]
        if not names and parameters:  # one argument of another name is the problem
            return self.environment.reset(self.problem)
        return self.environment.reset(**{name: given[name] for name in names})

    def _call_if_present(self, name: str) -> Any:
        method = getattr(self.environment, name, None)
        return None if method is None else self._call(name, method)

    def _call(self, name: str, function: Callable[[], Any]) -> Any:
        """Return the function's result; EnvironmentFailure if it raises or takes too long."""
        finished = run_in_thread(function, self.spec.timeout_s)
        if finished is None:
            reason = f"{name} did not return within {self.spec.timeout_s:g} s"
            raise EnvironmentFailure("timeout", reason)
        error = finished.exception()
        if error is None:
            return finished.result()
        if isinstance(error, EnvironmentFailure):
            raise error
        raise EnvironmentFailure("error", f"{name} raised {one_line(error)}{place_of(error)}")

"""Loading functions by path: `package.module:function` or `path/to/file.py:function`."""

import asyncio
import functools
import inspect
from typing import Any

from postgrad.errors import ConfigError
from postgrad.problem import Problem
from postgrad.user_code import load_object
from postgrad.verifiers.port import Verifier

# Names of a second argument that expects the answer, where a verifier gets the whole problem.
ANSWER_NAMES = ("answer", "gold", "ground_truth", "label", "reference", "solution", "target")


def load_function(path: str, kind: str) -> Any:
    """Return the function at `path`; `kind` says what it is, in error messages.

    Raises:
        ConfigError: the module cannot be imported or has no such function.
    """
    return load_object(path, f"{kind} {path}", callable, "function")


def load_verifier_function(path: str) -> Verifier:
    """Return the function at `path` as a verifier. An `async def` function is run to its end.

    Raises:
        ConfigError: it cannot be loaded, or cannot be called as function(response, problem).
    """
    function = load_function(path, "verifier")
    if inspect.iscoroutinefunction(function):
        function = _run_to_its_end(function)
    return as_verifier(function, f"verifier {path}")


def as_verifier(function: Any, label: str) -> Verifier:
    """Return a function as a verifier; `label` starts the error message.

    A function with verl's argument solution_str is wrapped; it gets those of data_source,
    solution_str, ground_truth and extra_info that it takes, by name.

    Raises:
        ConfigError: it cannot be called as function(response, problem).
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return function
    names = list(signature.parameters)
    if "solution_str" in names:
        return _with_verl_arguments(function, names)
    if "completions" in names:
        raise ConfigError(
            f"{label}{signature} takes completions, as in TRL; here a reward scores one response: "
            "def reward(response, problem), where problem.ground_truth and problem.extra hold the "
            "columns of the row"
        )
    if len(names) > 1 and names[1] in ANSWER_NAMES:
        raise ConfigError(
            f"{label}{signature}: the second argument {names[1]} would be a Problem; "
            "write def reward(response, problem), and read the answer as problem.ground_truth"
        )
    try:
        # Further arguments are numbers from the setting, as in brief(limit=100).
        signature.bind_partial("response", "problem")
    except TypeError as error:
        raise ConfigError(
            f"{label}{signature} cannot be called as function(response, problem); "
            "define it with these two arguments (a str and a Problem)"
        ) from error
    return function


def _run_to_its_end(function: Any) -> Any:
    """An `async def` as a plain function: each call runs in an event loop of its own."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return asyncio.run(function(*arguments, **named))

    return call


def _with_verl_arguments(function: Any, names: list[str]) -> Verifier:
    def verifier(response: str, problem: Problem) -> Any:
        arguments = {
            "data_source": problem.data_source,
            "solution_str": response,
            "ground_truth": problem.ground_truth,
            "extra_info": problem.extra.get("extra_info") or {},
        }
        return function(**{name: value for name, value in arguments.items() if name in names})

    return verifier

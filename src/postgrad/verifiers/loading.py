"""Loading functions by path: `package.module:function` or `path/to/file.py:function`."""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from postgrad.errors import ConfigError
from postgrad.problem import Problem
from postgrad.user_code import load_object
from postgrad.verifiers.port import Verifier

# Names of a second argument that expects the answer, where a verifier gets the whole problem.
ANSWER_NAMES = ("answer", "gold", "label", "reference", "solution", "target")
# Names of a first argument that expects something else than a response.
PROMPT_NAMES = ("prompt", "prompts", "question", "questions", "problem", "problems")
# Arguments that are lists with one entry per response, and who calls functions so.
LIST_ARGUMENTS = {"completions": "TRL", "queries": "OpenRLHF"}
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
REQUIRED = "required_names"  # attribute of an adapted function


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
    if inspect.isbuiltin(function) and str(function.__module__) in sys.stdlib_module_names:
        raise ConfigError(
            f"verifier {path} is a function of Python itself, and a response must not be its "
            "argument; write def reward(response, problem) into a file and give file.py:reward"
        )
    if inspect.iscoroutinefunction(function):
        function = _run_to_its_end(function)
    return as_verifier(function, f"verifier {path}")


def as_verifier(function: Any, label: str) -> Verifier:
    """Return a function as a verifier; `label` starts the error message.

    A function with verl's argument solution_str is wrapped; it gets those of data_source,
    solution_str, ground_truth and extra_info that it takes, by name. A function (response,
    ground_truth), as in CS336, gets the problem's ground truth.

    Raises:
        ConfigError: it cannot be called as function(response, problem).
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return function
    names = list(signature.parameters)
    if "solution_str" in names:
        return _adapt(function, partial(_verl_arguments, names), VERL_ARGUMENTS)
    for name, trainer in LIST_ARGUMENTS.items():
        if name in names:
            raise ConfigError(
                f"{label}{signature} takes {name}, as in {trainer}; here a reward scores one "
                "response: def reward(response, problem), where problem.ground_truth and "
                "problem.extra hold the columns of the row"
            )
    if names[1:2] == ["ground_truth"]:
        return _adapt(function, partial(_cs336_arguments, names[0]), names[:2])
    if names and names[0] in PROMPT_NAMES:
        raise ConfigError(
            f"{label}{signature}: the first argument {names[0]} would be a response; "
            "write def reward(response, problem), or TRL's def reward(completions, **columns)"
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


def required_arguments(function: Any) -> list[str]:
    """The arguments after response and problem that have no default; none of wrapped functions."""
    if hasattr(function, "__wrapped__"):
        return []
    if hasattr(function, REQUIRED):
        return getattr(function, REQUIRED)
    try:
        parameters = list(inspect.signature(function).parameters.values())[2:]
    except (TypeError, ValueError):  # some functions written in C have no signature
        return []
    return _without_defaults(parameters)


def _without_defaults(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """The names of parameters that every call must give."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [one for one in parameters if one.default is one.empty]
    return [one.name for one in required if one.kind not in variadic]


def _run_to_its_end(function: Any) -> Any:
    """An `async def` as a plain function: each call runs in an event loop of its own."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return asyncio.run(function(*arguments, **named))

    return call


def _adapt(
    function: Any, arguments: Callable[[str, Problem], dict[str, Any]], given: Sequence[str]
) -> Verifier:
    """The function as a verifier; `arguments` makes its `given` arguments.

    It is async if the function is.
    """

    async def async_verifier(response: str, problem: Problem, **options: Any) -> Any:
        return await function(**arguments(response, problem), **options)

    def verifier(response: str, problem: Problem, **options: Any) -> Any:
        return function(**arguments(response, problem), **options)

    adapted = async_verifier if inspect.iscoroutinefunction(function) else verifier
    required: list[str] = []
    if not hasattr(function, "__wrapped__"):  # a decorator may give arguments of its own
        parameters = inspect.signature(function).parameters.values()
        required = _without_defaults([one for one in parameters if one.name not in given])
    setattr(adapted, REQUIRED, required)
    return adapted


def _verl_arguments(names: Sequence[str], response: str, problem: Problem) -> dict[str, Any]:
    """Those of verl's arguments that are in `names`.

    The ground truth has the type that it has in the data.
    """
    reward_model = problem.extra.get("reward_model") or {}
    values = (
        problem.data_source,
        response,
        reward_model.get("ground_truth", problem.ground_truth),
        problem.extra.get("extra_info") or {},
    )
    arguments = dict(zip(VERL_ARGUMENTS, values, strict=True))
    return {name: value for name, value in arguments.items() if name in names}


def _cs336_arguments(first: str, response: str, problem: Problem) -> dict[str, Any]:
    return {first: response, "ground_truth": problem.ground_truth}

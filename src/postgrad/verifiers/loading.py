"""From a name to a verifier: a built-in one, or a user's function by path.

A user's function is `(response, problem)`, or has the arguments of verl or of CS336.
"""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from postgrad.errors import Missing, UnknownName, Unsupported, UserCode, did_you_mean
from postgrad.problem import Problem
from postgrad.user_code import load_object, refuse_object_name
from postgrad.verifiers.expression import split_rule
from postgrad.verifiers.port import Verifier
from postgrad.verifiers.table import VERIFIERS, VerifierSpec

# Names of arguments that expect something else than one response and its problem.
OTHER_FIRST = ("prompt", "prompts", "question", "questions", "problem", "problems")
OTHER_SECOND = ("answer", "gold", "label", "reference", "solution", "target")
LISTS = ("completions", "queries")  # of TRL and OpenRLHF
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def find_verifier(rule: str) -> VerifierSpec:
    """Return where a verifier is: `math`, `length(limit=100)`, `file.py:reward`.

    A user's verifier is loaded once, so that a mistake shows before the run starts.

    Raises:
        ConfigError: there is no such verifier, module, file or function, or its arguments differ.
    """
    name, arguments = split_rule(rule)
    spec = VERIFIERS.get(name) or _find_own(name)
    if arguments or spec.is_own:
        _check_arguments(name, load_verifier(spec.path), arguments)
    return replace(spec, arguments=arguments)


def _find_own(name: str) -> VerifierSpec:
    refuse_object_name(name, f"reward.verifier={name}")
    module_path, _, function = name.rpartition(":")
    if name.endswith(".py"):
        raise Missing(
            f"reward.verifier={name} names a file without a function; "
            f"write reward.verifier={name}:FUNCTION"
        )
    if not module_path or not function:
        raise UnknownName(
            f"reward.verifier={name} is not a verifier; {did_you_mean(name, VERIFIERS)} "
            "(your own is given as package.module:function or file.py:function)"
        )
    if module_path.endswith(".py"):
        module_path = str(Path(module_path).expanduser().resolve())
    return VerifierSpec(f"{module_path}:{function}", is_own=True)


def _check_arguments(name: str, verifier: Verifier, arguments: Collection[str]) -> None:
    for argument in arguments:
        known = list(inspect.signature(verifier).parameters)[2:]
        if argument not in known:
            raise UnknownName(
                f"reward.verifier: {name} has no argument {argument}; "
                f"{did_you_mean(argument, known)}"
            )
    for needed in required_arguments(verifier):
        if needed not in arguments:
            function = name.rpartition(":")[2]
            raise Missing(
                f"reward.verifier={name}: {function} also needs {needed}; give it a number, as in "
                f"{name}({needed}=1), or a default in the file"
            )


def load_function(path: str, kind: str) -> Any:
    """Return the function at `path`; `kind` says what it is, in error messages.

    Raises:
        ConfigError: the module cannot be imported or has no such function.
    """
    return load_object(path, f"{kind} {path}", callable, "function")


@cache
def load_verifier(path: str) -> Verifier:
    """Return the function at a VerifierSpec's path as a verifier; an async one runs to its end.

    Raises:
        ConfigError: it cannot be loaded, or cannot be called as function(response, problem).
    """
    function = load_function(path, "verifier")
    if inspect.isbuiltin(function) and str(function.__module__) in sys.stdlib_module_names:
        raise Unsupported(
            f"verifier {path} is a function of Python itself, and a response must not be its "
            "argument; write def reward(response, problem) into a file and give file.py:reward",
            at="verifier",
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
    if names[1:2] == ["ground_truth"] and names[0] not in LISTS:
        return _adapt(function, partial(_cs336_arguments, names[0]), names[:2])
    is_other = (
        {*names[:1]} & {*OTHER_FIRST} or {*names[1:2]} & {*OTHER_SECOND} or {*names} & {*LISTS}
    )
    try:
        # Further arguments are numbers from the setting, as in brief(limit=100).
        signature.bind_partial("response", "problem")
    except TypeError:
        is_other = True
    if is_other:
        raise UserCode(
            f"{label}{signature} cannot be called as function(response, problem); define it with "
            "these two arguments, a str and a Problem: problem.ground_truth is the answer, "
            "problem.extra has the columns of the row",
            at="reward",
        )
    return function


def required_arguments(function: Any) -> list[str]:
    """Return the arguments after response and problem without a default; none of decorated ones."""
    if hasattr(function, "__wrapped__"):
        return []
    try:
        parameters = list(inspect.signature(function).parameters.values())[2:]
    except (TypeError, ValueError):  # some functions written in C have no signature
        return []
    return [one.name for one in parameters if _is_required(one)]


def _is_required(parameter: inspect.Parameter) -> bool:
    is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not is_variadic


def _run_to_its_end(function: Any) -> Any:
    """Return an `async def` as a plain function: each call runs in an event loop of its own."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return asyncio.run(function(*arguments, **named))

    return call


def _adapt(
    function: Any, arguments: Callable[[str, Problem], dict[str, Any]], given: Collection[str]
) -> Verifier:
    """Return the function as a verifier; `arguments` makes its `given` arguments.

    It is async if the function is, and its signature has the function's further arguments.
    """

    async def async_verifier(response: str, problem: Problem, **options: Any) -> Any:
        return await function(**arguments(response, problem), **options)

    def verifier(response: str, problem: Problem, **options: Any) -> Any:
        return function(**arguments(response, problem), **options)

    adapted: Any = async_verifier if inspect.iscoroutinefunction(function) else verifier
    parameters = list(inspect.signature(verifier).parameters.values())[:2]
    is_decorated = hasattr(function, "__wrapped__")  # the decorator may give arguments of its own
    for name, parameter in inspect.signature(function).parameters.items():
        is_given = name in given or (is_decorated and _is_required(parameter))
        if not is_given and parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
    adapted.__signature__ = inspect.Signature(parameters)
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

"""Tools that a policy may call in a response: Python functions, shown to it as schemas. What goes wrong with a call is its answer.

A call is a JSON object with `name` and `arguments` between <tool_call> and </tool_call>, as Hermes, Qwen2.5 and Qwen3 write it. A tool is
a function with type hints and a docstring whose `Args:` describes each argument. It may also take `problem`, the problem that is being
answered, and `state`, a dict that lasts from turn to turn of one response; the policy sees neither. Tools run in threads of this process.
"""

import ast
import inspect
import json
import operator
import re
import threading
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from postgrad.config.schema import RolloutConfig
from postgrad.errors import ConfigError, did_you_mean
from postgrad.problem import Problem
from postgrad.verifiers.loading import load_function
from postgrad.verifiers.port import one_line

OPENING, CLOSING = "<tool_call>", "</tool_call>"
HIDDEN = ("problem", "state")  # what a tool may ask of us
ERROR = "error: "  # begins the answer to a call that failed
THREADS = 16
MOST_CALLS = 8  # of one turn that are made

_CALL = re.compile(rf"{OPENING}\s*(.*?)\s*(?:{CLOSING}|$)", re.DOTALL)
_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MOST_POWER = 10_000  # bits of a power's result


@dataclass(frozen=True)
class Call:
    """One call as it was written; `mistake` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    mistake: str = ""


def calls_in(text: str) -> list[Call]:
    """The calls of a turn, in order. What stands in a closed thought before the turn's answer is none."""
    return [_read(body) for body in _CALL.findall(text.rpartition("</think>")[2])]


def _read(body: str) -> Call:
    try:
        found = json.loads(body)
        arguments = found.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if isinstance(found.get("name"), str) and isinstance(arguments, dict):
            return Call(found["name"], arguments)
    except (ValueError, AttributeError, RecursionError):
        pass
    return Call(mistake='a call is a JSON object: {"name": "...", "arguments": {...}}')


class Toolbox:
    """The tools of a run, by the names of their functions.

    Args:
        names: `calculator`, `python` (a program in the sandbox), `package.module:function` or `path/to/file.py:function`.
        timeout_s: for one call.
        max_chars: longest answer; a longer one is cut in its middle.

    Raises:
        ConfigError: a tool that is not there or cannot be described.
    """

    def __init__(
        self, names: Sequence[str], timeout_s: float = 10.0, max_chars: int = 1024
    ) -> None:
        self.timeout_s, self.max_chars = timeout_s, max_chars
        self.functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[dict[str, Any]] = []
        for name in names:
            function = find_tool(name)
            if function.__name__ in self.functions:
                raise ConfigError(
                    f"rollout.tools has two tools named {function.__name__}; a call could not tell them apart"
                )
            self.functions[function.__name__] = function
            self.schemas.append(schema_of(function, name))

    def answer_all(
        self, asked: Sequence[tuple[Sequence[Call], Problem, dict[str, Any]]]
    ) -> list[list[str]]:
        """For each response's (calls, problem, state) the answers to its calls, which are made one after the other."""

        def answer(one: tuple[Sequence[Call], Problem, dict[str, Any]]) -> list[str]:
            calls, problem, state = one
            made = [self.answer(call, problem, state) for call in calls[:MOST_CALLS]]
            return made + [f"{ERROR}at most {MOST_CALLS} calls in a turn"] * (
                len(calls) - len(made)
            )

        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(answer, asked))

    def answer(self, call: Call, problem: Problem, state: dict[str, Any]) -> str:
        """What the policy is told. Never raises."""
        if call.mistake:
            return ERROR + call.mistake
        function = self.functions.get(call.name)
        if function is None:
            return f"{ERROR}there is no tool {call.name}; there are: {', '.join(self.functions)}"
        wanted = inspect.signature(function).parameters
        if hidden := [name for name in HIDDEN if name in call.arguments]:
            return f"{ERROR}{call.name} has no argument {hidden[0]}"
        ours = {
            name: value
            for name, value in (("problem", problem), ("state", state))
            if name in wanted
        }
        return self._cut(_within(self.timeout_s, function, call.arguments | ours))

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        head = self.max_chars // 2
        return f"{text[:head]} ... {text[len(text) - (self.max_chars - head) :]}"


def open_toolbox(rollout: RolloutConfig) -> Toolbox | None:
    """The tools that a configuration names, if any. Raises ConfigError."""
    return (
        Toolbox(rollout.tools, rollout.tool_timeout_s, rollout.tool_chars)
        if rollout.tools
        else None
    )


def find_tool(name: str) -> Callable[..., Any]:
    """A built-in tool by its name, or one of the user's. Raises ConfigError."""
    if name in BUILT_IN:
        if name == "python":
            _sandbox()
        return BUILT_IN[name]
    if ":" not in name:
        hint = did_you_mean(name, BUILT_IN)
        raise ConfigError(
            f"rollout.tools: {name} is not a tool; {hint} (your own is given as package.module:function or file.py:function)"
        )
    return load_function(name, "tool")


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """What the policy is shown of a tool, in OpenAI's form. Raises ConfigError where its hints or its docstring say too little."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        hints, signature = typing.get_type_hints(function), inspect.signature(function)

        def shown() -> None: ...

        shown.__name__, shown.__doc__ = function.__name__, inspect.getdoc(function)
        shown.__annotations__ = {key: hint for key, hint in hints.items() if key not in HIDDEN}
        kept = [parameter for key, parameter in signature.parameters.items() if key not in HIDDEN]
        shown.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        schema = get_json_schema(shown)
    except Exception as error:
        reason = one_line(error)
        raise ConfigError(
            f"rollout.tools: {name} cannot be described to the model: {reason}; a tool has type hints and a docstring with Args:"
        ) from error
    schema["function"].pop("return", None)
    return schema


def _within(seconds: float, function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """The function's answer as text. One that overruns is left behind: a thread cannot be stopped."""
    said: list[str] = []

    def run() -> None:
        try:
            inspect.signature(function).bind(**arguments)
            value = function(**arguments)
            said.append(value if isinstance(value, str) else json.dumps(value, default=str))
        except BaseException as error:  # SystemExit too: a tool must not end the run
            said.append(ERROR + one_line(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return said[0] if said else f"{ERROR}no answer within {seconds:g} s"


# ---- built-in tools


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and brackets, e.g. (12+3)*4
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return (
        str(int(value))
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        else str(value)
    )


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(op=ast.Pow()):
            base, power = _value(node.left), _value(node.right)
            if isinstance(base, int) and abs(power) * base.bit_length() > MOST_POWER:
                raise ValueError("the result is too large")
            return base**power
        case ast.BinOp(op=op) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(node.left), _value(node.right))
        case ast.UnaryOp(op=op) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(node.operand))
    raise ValueError("only numbers, + - * / // % ** and brackets can be computed")


def python(program: str) -> str:
    """Run a Python program and read what it prints. Nothing is kept from one program to the next.

    Args:
        program: the whole program; it must print its result
    """
    outcome = _sandbox().run(program)
    said = outcome.output + (
        f"\n{outcome.errors.strip().splitlines()[-1]}" if outcome.errors.strip() else ""
    )
    if outcome.stopped:
        said += f"\n{ERROR}stopped by its limit of {outcome.stopped}"
    return said.strip() or "(the program printed nothing)"


def _sandbox() -> Any:
    from postgrad.sandbox.outcome import SandboxError
    from postgrad.verifiers.code import sandbox

    try:
        return sandbox()
    except SandboxError as error:
        raise ConfigError(f"rollout.tools: python needs the sandbox: {error}") from error


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}

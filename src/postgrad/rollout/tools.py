"""Tools that a policy may call in a response: Python functions, shown to the policy as schemas.

A call is a JSON object with `name` and `arguments` between <tool_call> and </tool_call>, as Hermes,
Qwen2.5 and Qwen3 write it. A tool is a function with type hints and a docstring whose `Args:`
describe each argument. It may also take `problem`, the problem that is being answered, and `state`,
a dict that lasts from turn to turn of one response; the policy sees neither. Tools run in threads
of this process. A call that fails is answered with an error text and never stops the run.
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

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
HIDDEN = ("problem", "state")  # arguments that we fill in and the policy does not see
ERROR = "error: "  # the start of the answer to a call that failed
NUM_THREADS = 16
MAX_CALLS_PER_TURN = 8
MAX_POWER_BITS = 10_000  # of the result of the calculator's **

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


@dataclass(frozen=True)
class Call:
    """One call as the policy wrote it; `mistake` says why it cannot be made."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    mistake: str = ""


CallsOfRow = tuple[Sequence[Call], Problem, dict[str, Any]]  # calls, the row's problem, its state


def parse_calls(text: str) -> list[Call]:
    """Return the calls of a turn, in order. Text up to a closing </think> holds no calls."""
    answer = text.rpartition("</think>")[2]
    return [_parse_call(body) for body in _CALL.findall(answer)]


def _parse_call(body: str) -> Call:
    try:
        call = json.loads(body)
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if isinstance(call.get("name"), str) and isinstance(arguments, dict):
            return Call(call["name"], arguments)
    except (ValueError, AttributeError, RecursionError):
        pass
    return Call(mistake='a call is a JSON object: {"name": "...", "arguments": {...}}')


class Toolbox:
    """The tools of a run, by the names of their functions.

    Args:
        names: `calculator`, `python` (a program in the sandbox), `package.module:function` or
            `path/to/file.py:function`.
        timeout_s: time limit per call.
        max_chars: longest answer; the middle of a longer one is cut out.

    Raises:
        ConfigError: a tool does not exist or cannot be described.
    """

    def __init__(
        self, names: Sequence[str], timeout_s: float = 10.0, max_chars: int = 1024
    ) -> None:
        self.timeout_s = timeout_s
        self.max_chars = max_chars
        self.functions: dict[str, Callable[..., Any]] = {}
        self.schemas: list[dict[str, Any]] = []
        for name in names:
            function = find_tool(name)
            if function.__name__ in self.functions:
                raise ConfigError(
                    f"rollout.tools has two tools named {function.__name__}, which a call cannot "
                    "tell apart; rename one of the functions"
                )
            self.functions[function.__name__] = function
            self.schemas.append(tool_schema(function, name))

    def answer_all(self, rows: Sequence[CallsOfRow]) -> list[list[str]]:
        """Return the answers to the calls of each row. Rows run in parallel, calls in order."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            return list(pool.map(self._answer_row, rows))

    def _answer_row(self, row: CallsOfRow) -> list[str]:
        calls, problem, state = row
        answers = [self.answer(call, problem, state) for call in calls[:MAX_CALLS_PER_TURN]]
        num_refused = len(calls) - len(answers)
        return answers + [f"{ERROR}at most {MAX_CALLS_PER_TURN} calls in a turn"] * num_refused

    def answer(self, call: Call, problem: Problem, state: dict[str, Any]) -> str:
        """Return the text that answers a call. Never raises."""
        if call.mistake:
            return ERROR + call.mistake
        function = self.functions.get(call.name)
        if function is None:
            return f"{ERROR}there is no tool {call.name}; there are: {', '.join(self.functions)}"
        for name in HIDDEN:
            if name in call.arguments:
                return f"{ERROR}{call.name} has no argument {name}"
        arguments = dict(call.arguments)
        parameters = inspect.signature(function).parameters
        for name, value in (("problem", problem), ("state", state)):
            if name in parameters:
                arguments[name] = value
        return self._shorten(_run_with_timeout(self.timeout_s, function, arguments))

    def _shorten(self, text: str) -> str:
        if len(text) <= self.max_chars:
            return text
        head = self.max_chars // 2
        tail = self.max_chars - head
        return f"{text[:head]} ... {text[len(text) - tail :]}"


def open_toolbox(rollout: RolloutConfig) -> Toolbox | None:
    """Return the tools of rollout.tools, None if there are none. Raises ConfigError."""
    if not rollout.tools:
        return None
    return Toolbox(rollout.tools, rollout.tool_timeout_s, rollout.tool_chars)


def find_tool(name: str) -> Callable[..., Any]:
    """Return a built-in tool by its name, or the user's own by its path. Raises ConfigError."""
    if name in BUILT_IN:
        if name == "python":
            _sandbox()  # refuse now where there is no sandbox
        return BUILT_IN[name]
    if ":" not in name:
        raise ConfigError(
            f"rollout.tools: {name} is not a tool; {did_you_mean(name, BUILT_IN)} "
            "(your own: package.module:function or file.py:function)"
        )
    return load_function(name, "tool")


def tool_schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return a tool's description in OpenAI's form, as the chat template shows it to the policy.

    Raises ConfigError when type hints or the docstring are missing.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(_without_hidden_arguments(function))
    except Exception as error:
        raise ConfigError(
            f"rollout.tools: {name} cannot be described to the model: {one_line(error)}; "
            "a tool needs type hints and a docstring with Args:"
        ) from error
    schema["function"].pop("return", None)
    return schema


def _without_hidden_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an empty function with the same name, docstring and visible arguments."""

    def visible() -> None: ...

    signature = inspect.signature(function)
    hints = typing.get_type_hints(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name not in HIDDEN]
    visible.__name__ = function.__name__
    visible.__doc__ = inspect.getdoc(function)
    visible.__annotations__ = {name: hint for name, hint in hints.items() if name not in HIDDEN}
    visible.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return visible


def _run_with_timeout(
    timeout_s: float, function: Callable[..., Any], arguments: dict[str, Any]
) -> str:
    """Return the function's result as text. A thread that overruns keeps running unattended."""
    results: list[str] = []

    def run() -> None:
        try:
            inspect.signature(function).bind(**arguments)
            value = function(**arguments)
            results.append(value if isinstance(value, str) else json.dumps(value, default=str))
        except BaseException as error:  # SystemExit too: a tool must not end the run
            results.append(ERROR + one_line(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else f"{ERROR}no answer within {timeout_s:g} s"


# ---- built-in tools


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and brackets, e.g. (12+3)*4
    """
    value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(op=ast.Pow()):
            base = _evaluate(node.left)
            power = _evaluate(node.right)
            if isinstance(base, int) and abs(power) * base.bit_length() > MAX_POWER_BITS:
                raise ValueError("the result is too large")
            return base**power
        case ast.BinOp(op=op) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_evaluate(node.left), _evaluate(node.right))
        case ast.UnaryOp(op=op) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_evaluate(node.operand))
    raise ValueError("only numbers, + - * / // % ** and brackets can be computed")


def python(program: str) -> str:
    """Run a Python program and read what it prints. Nothing is kept from one program to the next.

    Args:
        program: the whole program; it must print its result
    """
    outcome = _sandbox().run(program)
    text = outcome.output
    if outcome.errors.strip():
        text += f"\n{outcome.errors.strip().splitlines()[-1]}"
    if outcome.stopped:
        text += f"\n{ERROR}stopped by its limit of {outcome.stopped}"
    return text.strip() or "(the program printed nothing)"


def _sandbox() -> Any:
    from postgrad.sandbox.outcome import SandboxError
    from postgrad.verifiers.code import sandbox

    try:
        return sandbox()
    except SandboxError as error:
        raise ConfigError(f"rollout.tools: python needs the sandbox: {error}") from error


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}

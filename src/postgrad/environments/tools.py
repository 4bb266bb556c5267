"""Tools that a policy may call in a response: Python functions, shown to the policy as schemas.

A tool is a function with type hints and a docstring whose `Args:`
describe each argument. It may also take `problem`, the problem that is being answered, and `state`,
a dict that lasts from turn to turn of one response; the policy sees neither. Tools run in threads
of this process. A call that fails is answered with an error text and never stops the run.
"""

import ast
import asyncio
import copy
import inspect
import json
import operator
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from postgrad.environments.calls import Call
from postgrad.environments.mcp_tools import (
    PREFIXES,
    McpServer,
    McpTool,
    SessionServer,
    find_mcp_tools,
)
from postgrad.environments.port import Shown
from postgrad.errors import Conflict, NotInstalled, UnknownName, UserCode, did_you_mean
from postgrad.pictures import shown_parts
from postgrad.problem import Problem
from postgrad.verifiers.loading import load_function
from postgrad.verifiers.port import one_line

HIDDEN = ("problem", "state", "self")  # arguments that we fill in and the policy does not see
ERROR = "error: "  # the start of the answer to a call that failed
NUM_THREADS = 16  # calls that run at the same time, per process
MAX_CALLS_PER_TURN = 8
MAX_POWER_BITS = 10_000  # of the result of the calculator's **

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


class Toolbox:
    """The tools of a run, by the names of their functions.

    Args:
        names: `calculator`, `python` (a program in the sandbox), `package.module:function` or
            `path/to/file.py:function`, or all tools of a server: `mcp:COMMAND`, `mcp:URL`, or
            `mcp_session:` for a connection per trajectory.
        timeout_s: time limit per call.
        max_chars: longest answer; the middle of a longer one is cut out.

    Raises:
        ConfigError: a tool does not exist or cannot be described.
    """

    def __init__(
        self,
        names: Sequence[str],
        timeout_s: float = 10.0,
        max_chars: int = 1024,
    ) -> None:
        self.timeout_s = timeout_s
        self.max_chars = max_chars
        self.functions: dict[str, Callable[..., Any]] = {}
        self.paths: dict[str, str] = {}  # by the name of the function: what the setting says
        self._slots = threading.BoundedSemaphore(NUM_THREADS)
        for name in names:
            is_server = name.startswith(PREFIXES)
            found = find_mcp_tools(name) if is_server else [find_tool(name)]
            for function in found:
                self.add(function, name)

    def add(self, function: Callable[..., Any], path: str) -> None:
        """Add a tool. Raises ConfigError if there is one of its name."""
        name = function.__name__
        if name in self.functions:
            raise Conflict(
                f"{path}: there are two tools named {name}, which a call cannot tell apart; "
                "rename one of the functions",
                at="rollout.tools",
            )
        self.functions[name] = function
        self.paths[name] = path

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' descriptions, as the chat template shows them. Raises ConfigError."""
        return [
            function.schema
            if isinstance(function, McpTool)
            else tool_schema(function, self.paths[name])
            for name, function in self.functions.items()
        ]

    @property
    def servers(self) -> list[McpServer | SessionServer]:
        """The servers of its tools."""
        tools = [one for one in self.functions.values() if isinstance(one, McpTool)]
        return list({id(tool.server): tool.server for tool in tools}.values())

    def close(self) -> None:
        """End all connections to servers."""
        for server in self.servers:
            server.stop()
        for server in self.servers:
            server.join()

    def for_session(self) -> "Toolbox":
        """Return the toolbox of one trajectory, with its own connections of `mcp_session:`."""
        servers = {id(one): one.copy() for one in self.servers if isinstance(one, SessionServer)}
        functions: dict[str, Callable[..., Any]] = {}
        for name, function in self.functions.items():
            if isinstance(function, McpTool) and id(function.server) in servers:
                functions[name] = McpTool(servers[id(function.server)], function.schema)
        return self.with_functions(functions) if functions else self

    def close_session(self) -> None:
        """End the connections of a toolbox that for_session() returned."""
        for server in self.servers:
            if isinstance(server, SessionServer):
                server.close()

    def with_functions(self, functions: Mapping[str, Callable[..., Any]]) -> "Toolbox":
        """Return a toolbox that also has these functions, with the same limits."""
        toolbox = copy.copy(self)
        toolbox.functions = {**self.functions, **functions}
        toolbox.paths = dict(self.paths)
        return toolbox

    def answer_turn(
        self, calls: Sequence[Call], problem: Problem, state: dict[str, Any]
    ) -> list[Shown]:
        """Return the answers to the calls of one turn. They are made in order."""
        answers = [self.answer(call, problem, state) for call in calls[:MAX_CALLS_PER_TURN]]
        num_refused = len(calls) - len(answers)
        return answers + [f"{ERROR}at most {MAX_CALLS_PER_TURN} calls in a turn"] * num_refused

    def answer(self, call: Call, problem: Problem, state: dict[str, Any]) -> Shown:
        """Return the text that answers a call, or parts with pictures. Never raises."""
        return shorten_shown(self._answer(call, problem, state), self.max_chars)

    def _answer(self, call: Call, problem: Problem, state: dict[str, Any]) -> Shown:
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
        with self._slots:
            return _call_tool(function, arguments, self.timeout_s)


def shorten_shown(shown: Shown, max_chars: int) -> Shown:
    """Return a text, or parts with texts, that are not too long."""
    if isinstance(shown, str):
        return shorten(shown, max_chars)
    return [
        {**part, "text": shorten(part["text"], max_chars)} if "text" in part else part
        for part in shown
    ]


def shorten(text: str, max_chars: int) -> str:
    """Return the text; if it is too long, its start and its end.

    Half a surrogate pair, which no tokenizer reads, becomes a question mark.
    """
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    tail = max_chars - head
    return f"{text[:head]} ... {text[len(text) - tail :]}"


def find_tool(name: str) -> Callable[..., Any]:
    """Return a built-in tool by its name, or the user's own by its path. Raises ConfigError."""
    if name in BUILT_IN:
        if name == "python":
            _sandbox()  # refuse now where there is no sandbox
        return BUILT_IN[name]
    if ":" not in name:
        raise UnknownName(
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
        raise UserCode(
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


def _call_tool(function: Callable[..., Any], arguments: dict[str, Any], timeout_s: float) -> Shown:
    """Return the function's result, or its error, as text; with pictures as parts."""

    def call() -> Shown:
        inspect.signature(function).bind(**arguments)
        value = function(**arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if isinstance(value, str):
            return value
        return shown_parts(value) or json.dumps(value, default=str)

    finished = run_in_thread(call, timeout_s)
    if finished is None:
        return f"{ERROR}no answer within {timeout_s:g} s"
    error = finished.exception()
    return finished.result() if error is None else ERROR + one_line(error)


def run_in_thread(function: Callable[[], Any], limit_s: float) -> "Future[Any] | None":
    """Return what a function returned or raised; None if it takes longer than the limit.

    A thread that overruns keeps running unattended.
    """
    finished: Future[Any] = Future()

    def run() -> None:
        try:
            finished.set_result(function())
        except BaseException as error:  # SystemExit too: the user's code must not end the run
            finished.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return finished if finished.done() else None


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
    from postgrad.verifiers.grading.code import sandbox

    try:
        return sandbox()
    except SandboxError as error:
        raise NotInstalled(f"rollout.tools: python needs the sandbox: {error}") from error


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator, "python": python}

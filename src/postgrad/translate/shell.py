"""Shell scripts: which programs they start, and with which arguments.

Nothing of a script is executed. Variables that the script sets itself are filled in.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S.*|\"\")\s*$")
_PARTS = re.compile(r";\s+|\s(?=(?:then|else|do)\s)")  # between commands of one line
_KEYWORD = re.compile(r"^\s*(?:then|else|do)\s+")
_SETTING = re.compile(
    r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)="
    r"((?:\"[^\"\s]*\"|'[^'\s]*'){2,}|\"[^\"]*\"|'[^']*'|\[[^\]]*\]|\$\(\([^\n]*?\)\)+|\S*)"
)
_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)+)\}")
THIS_FOLDER = re.compile(r"\$\(pwd\)|`pwd`|\$PWD\b|\$\{PWD\}")
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::-((?:[^{}]|\$\{[^{}]*\})*))?\}|\$(\w+)")
_ARRAY = re.compile(r"(?ms)^\s*(\w+)=\(\s*\n(.*?)^\s*\)")
_QUOTED_ARRAY = re.compile(r'"(\$\{\w+\[[@*]\]\})"')
_ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)(?!\))")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_PROGRAM = re.compile(
    r"(?:-m|--module)\s+([A-Za-z_][\w.]+)"
    r"|\b(trl (?:sft|dpo|grpo|kto|reward|rloo))\b"
    r"|\bpython3?\s+(?:-u\s+)?([\w./${}-]+\.py)\b"
    r"|\b(?:accelerate launch|torchrun)\s(?:(?!-m\s|--module\s|\btrl )[^\n])*?"
    r"(?<=\s)([\w./${}-]+\.py)(?=\s|$)"
)
_END_OF_COMMAND = re.compile(r"\s(?:\|\|?|&&|;|&?>>?|2>&?1?|&)(?=\s|$)")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,  # the shell's division of whole numbers
    ast.Mod: operator.mod,
}


@dataclass
class Command:
    """One program that a script starts, with the text after its name."""

    program: str
    arguments: str


@dataclass
class Script:
    """A shell script.

    Attributes:
        commands: Python programs that it starts, in order.
        variables: the last value of each variable that it sets.
        several: variables that it sets to several values, which depend on what runs.
    """

    text: str
    commands: list[Command] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    several: dict[str, list[str]] = field(default_factory=dict)

    def settings(self, program: str) -> dict[str, str]:
        """Return the section.key=value arguments, except those of other programs than `program`."""
        found: dict[str, str] = {}
        for line in self.text.splitlines():
            match = _PROGRAM.search(line)
            if match and program and _name(match) != program:
                continue
            for setting in _SETTING.finditer(line):
                value = setting[2].strip("\"'").replace("\"'", "").replace("'\"", "")
                found[setting[1]] = THIS_FOLDER.sub(".", expand(value, self.variables))
        return {
            key: _REFERENCE.sub(lambda match: found.get(match[1], match[0]), value)
            for key, value in found.items()
        }

    def flags(self, command: Command) -> dict[str, str]:
        """Return the --name value arguments of a command; several values are joined by spaces.

        A flag alone is True.
        """
        text = _END_OF_COMMAND.split(command.arguments)[0]
        text = expand(text, self.variables)
        try:
            words = shlex.split(text)
        except ValueError:  # an open quote
            words = text.split()
        found: dict[str, list[str]] = {}
        name = ""
        for word in words:
            if word.startswith("--") and len(word) > 2:
                name, equals, value = word.removeprefix("--").partition("=")
                found[name] = [value] if equals else []
            elif name and word != "EOF":
                found[name].append(word)
        return {name: " ".join(values) if values else "True" for name, values in found.items()}

    def notes(self) -> list[str]:
        """Return lines about variables whose value depends on what the script runs."""
        lines: list[str] = []
        for name, values in self.several.items():
            if re.search(rf"\$\{{?{name}\b", self.text):
                lines.append(
                    f"${name}: the script sets it to {', then to '.join(values)}; "
                    "the last value is used here"
                )
        return lines


def read_script(text: str) -> Script:
    """Return the commands and variables of a shell script."""
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    script = Script(_QUOTED_ARRAY.sub(r"\1", text.replace("\\\n", " ")))
    for line in text.splitlines():
        for part in _PARTS.split(line.split(" #")[0]):
            match = _ASSIGNMENT.match(_KEYWORD.sub("", part))
            if match:
                _assign(script, match[1], match[2])
    for array in _ARRAY.finditer(text):
        script.variables[array[1]] = expand(" ".join(array[2].split()), script.variables)
    for line in script.text.splitlines():
        match = _PROGRAM.search(line)
        if match:
            script.commands.append(Command(_name(match), line[match.end() :]))
    return script


def _assign(script: Script, name: str, text: str) -> None:
    text = text.strip()
    text = text.strip("'") if text.startswith("'") else text.replace('"', "").strip("'")
    value = expand(text, script.variables)
    old = script.variables.get(name)
    refers_to_itself = re.search(rf"\$\{{?{name}\b", text)
    if old is not None and old != value and not refers_to_itself:
        script.several.setdefault(name, [old]).append(value)
    script.variables[name] = value


def _name(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group)


def expand(value: str, variables: dict[str, str]) -> str:
    """Return the value with variables and arithmetic filled in, where they are known."""

    def replace(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name]
        return match[0] if match[2] is None else expand(match[2].strip("\"'"), variables)

    def calculate(match: re.Match[str]) -> str:
        expression = _NAME.sub(lambda name: variables.get(name[1], name[0]), match[1])
        try:
            return str(_value(ast.parse(expression.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return match[0]

    return _VARIABLE.sub(replace, _ARITHMETIC.sub(calculate, value))


def _value(node: ast.expr) -> int:
    """Return the value of a shell expression of whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.unparse(node))

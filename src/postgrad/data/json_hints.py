"""What to do about common mistakes in JSON files, for error messages."""

import ast
import json
from typing import Any


def line_advice(text: str) -> str:
    """How to mend a line that is not JSON; "" if no common mistake explains it."""
    if text == "{":
        return "write each object on one line (json.dumps without indent)"
    if _is_object(text.removesuffix(",")):
        return "remove the comma at the end of the line"
    if _is_python(text):
        return "it is Python's notation; write the line with json.dumps"
    return ""


def are_columns(values: list[Any]) -> bool:
    """Whether values are the columns of one table: {"0": value, ...}, or lists of plain values."""
    if len(values) < 2 or not all(values):
        return False
    for value in values:
        is_numbered = isinstance(value, dict) and all(map(str.isdigit, value))
        is_list = isinstance(value, list) and not any(isinstance(one, dict | list) for one in value)
        if not (is_numbered or is_list):
            return False
    return len({len(value) for value in values}) == 1


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_python(text: str) -> bool:
    """Whether a text is a dict as Python prints it. Nothing of it is executed."""
    if not text.startswith("{'"):
        return False
    try:
        return isinstance(ast.literal_eval(text), dict)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False

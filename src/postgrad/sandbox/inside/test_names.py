"""What the names in a test mean: Python's own objects, or the program's."""

import ast
import builtins
import importlib
import math
import sys
from typing import Any

# Names that mean Python's own objects in a test, even if the program defines them (def abs ...).
STANDARD_NAMES = {
    "Counter": "collections",
    "Decimal": "decimal",
    "Fraction": "fractions",
    "OrderedDict": "collections",
    "deepcopy": "copy",
    "defaultdict": "collections",
    "deque": "collections",
    "namedtuple": "collections",
    "timedelta": "datetime",
} | {name: "math" for name in vars(math) if not name.startswith("_")}
RESERVED = set(vars(builtins)) | set(sys.stdlib_module_names) | set(STANDARD_NAMES)
MODULES = sys.stdlib_module_names - {"__main__", "antigravity", "this", "idlelib", "turtle"}


def kind_of(description: Any) -> str:
    """Return the tag of an encoded value, or "" for JSON's own values."""
    return description["type"] if isinstance(description, dict) else ""


def bind_names(
    tree: ast.Module, names: dict[str, Any], entry_point: str
) -> tuple[dict[str, Any], set[str]]:
    """Return Python's own objects for names in the test, and the names that are the program's.

    A name of Python's own is the program's only if it is the function under test: the entry point,
    or the first name if the test uses no other name of the program.
    """
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {name for node in tree.body for name in _defined_names(node)}
    known = [name for name in dict.fromkeys(used) if name in names and name not in defined]
    unreserved = [name for name in known if name not in RESERVED]
    tested = set(unreserved) or set(known[:1])
    if entry_point in names:
        tested = {entry_point}
    standard: dict[str, Any] = {}
    program_names: set[str] = set()
    for name in known:
        kind = kind_of(names[name])
        imported = names[name].get("imported") if kind else None
        if kind == "module" or (name in RESERVED and name not in tested):
            standard |= standard_object(name)
        elif imported and imported[1] == name:
            standard |= imported_object(*imported)
        else:
            program_names.add(name)
    return standard, program_names


def _defined_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement of the test defines or imports."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    return []


def standard_object(name: str) -> dict[str, Any]:
    """Return {name: object} for a module or a name of the standard library; {} for a builtin."""
    if name in vars(builtins):
        return {}
    if name in MODULES:
        return {name: importlib.import_module(name)}
    if name in STANDARD_NAMES:
        return {name: getattr(importlib.import_module(STANDARD_NAMES[name]), name)}
    return {}


def imported_object(module_name: Any, name: str) -> dict[str, Any]:
    """Return {name: object} for what the program imported from the standard library."""
    if module_name not in MODULES:
        return {}
    module = importlib.import_module(module_name)
    return {name: getattr(module, name)} if hasattr(module, name) else {}

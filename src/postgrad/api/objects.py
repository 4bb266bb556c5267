"""Functions, classes and other Python objects as values of settings."""

import dataclasses
import hashlib
import sys
from types import CodeType
from typing import Any

from postgrad.user_code import PythonObject

# Objects by id. It holds them: the id of an object that is gone may belong to another one.
Visited = dict[int, Any]
SIMPLE = (bool, int, float, complex, str, bytes, type(None))


def as_setting(value: Any) -> str:
    """Return the text of a setting for an object: its import path, or a PythonObject.

    An object that other processes can import is given by its path, as on the command line. Another
    one, such as a function of a notebook, is a PythonObject; its text has a hash of its code, so
    that a run does not continue with changed code unnoticed.
    """
    return importable_path(value) or PythonObject(describe(value), value)


def importable_path(value: Any) -> str:
    """Return `module:name` of a function or class that another process can import, else ""."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return ""
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is value else ""


def describe(value: Any) -> str:
    """Return `NAME#HASH`: the name of an object and a hash of its code and simple values."""
    name = getattr(value, "__name__", type(value).__name__).strip("<>")
    return f"{name}#{fingerprint(value)}"


def fingerprint(value: Any) -> str:
    """Return 8 hex digits that change with the code of a function, a class or an object.

    Covered are bytecode, constants, defaults, closures, and the functions and constants of the same
    module that the code names. Other data that the code reads is not covered.
    """
    digest = hashlib.blake2b(digest_size=4)
    _add(digest, value, {})
    return digest.hexdigest()


def _add(digest: Any, value: Any, visited: Visited) -> None:
    """Add an object to the hash; each object once."""
    if isinstance(value, SIMPLE):
        digest.update(f"{type(value).__name__}={value!r};".encode())
        return
    if id(value) in visited:
        return
    visited[id(value)] = value
    if isinstance(value, CodeType):
        digest.update(value.co_code + repr(value.co_names).encode())
        for constant in value.co_consts:
            _add(digest, constant, visited)
    elif isinstance(value, tuple | list):
        for item in value:
            _add(digest, item, visited)
    elif isinstance(value, set | frozenset):
        for text in sorted(map(repr, value)):
            digest.update(text.encode())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _add(digest, value[key], visited)
    elif hasattr(value, "__code__"):
        _add_function(digest, value, visited)
    elif isinstance(value, type):
        _add_class(digest, value, visited)
    elif dataclasses.is_dataclass(value):
        for spec in dataclasses.fields(value):
            _add(digest, getattr(value, spec.name), visited)
    else:
        digest.update(type(value).__qualname__.encode())
        _add(digest, type(value), visited)
        state = getattr(value, "__dict__", {})
        _add(digest, {key: one for key, one in state.items() if isinstance(one, SIMPLE)}, visited)


def _add_function(digest: Any, function: Any, visited: Visited) -> None:
    _add(digest, function.__code__, visited)
    _add(digest, function.__defaults__ or (), visited)
    _add(digest, function.__kwdefaults__ or {}, visited)
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(content, SIMPLE) or hasattr(content, "__code__"):
            _add(digest, content, visited)
    names = getattr(function, "__globals__", {})
    for name in function.__code__.co_names:
        used = names.get(name)
        is_own_function = hasattr(used, "__code__") and used.__module__ == function.__module__
        if name in names and (isinstance(used, SIMPLE) or is_own_function):
            _add(digest, used, visited)


def _add_class(digest: Any, kind: type, visited: Visited) -> None:
    for base in kind.__bases__:
        digest.update(base.__qualname__.encode())
    for name, member in sorted(vars(kind).items()):
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if hasattr(function, "__code__") or isinstance(function, SIMPLE):
            if name in ("__doc__", "__module__", "__firstlineno__"):
                continue
            digest.update(name.encode())
            _add(digest, function, visited)

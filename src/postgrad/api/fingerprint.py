"""A hash of Python objects that changes with what a run would compute with them."""

import builtins
import dataclasses
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, CodeType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

# Objects by id. It holds them: the id of an object that is gone may belong to another one.
Visited = dict[int, Any]
SIMPLE = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (tuple, list, dict, set, frozenset)
MAX_ITEMS = 10_000  # of a container; of a larger one as many are looked at
MAX_VALUES = 1_000_000  # of an array, likewise
NOT_CODE = ("__doc__", "__module__", "__firstlineno__", "__static_attributes__", "__annotations__")
OWN_PACKAGE = __name__.split(".")[0]
PLACES = ("stdlib", "platstdlib", "purelib", "platlib")
INSTALLED = [Path(sysconfig.get_path(name)) for name in PLACES]


def fingerprint(value: Any) -> str:
    """Return 8 hex digits that change with the code of a function, a class or an object.

    Covered are bytecode, constants, defaults, closures, arguments of partial functions, objects of
    bound methods, attributes, base classes, and the functions, classes and values of modules that
    the code names. Code of installed packages is not covered, nor is what the code reads elsewhere.
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
    if isinstance(value, CONTAINERS):
        _add_container(digest, value, visited)
    elif isinstance(value, CodeType):
        digest.update(value.co_code + repr(value.co_names).encode())
        _add(digest, value.co_consts, visited)
    elif isinstance(value, functools.partial):
        _add(digest, [value.func, value.args, value.keywords], visited)
    elif isinstance(value, MethodType):
        _add(digest, [value.__func__, value.__self__], visited)
    elif hasattr(value, "__code__"):
        _add_function(digest, value, visited)
    elif isinstance(value, type):
        _add_class(digest, value, visited)
    elif isinstance(value, ModuleType | BuiltinFunctionType):
        digest.update(value.__name__.encode())
    elif callable(getattr(value, "__wrapped__", None)):  # such as functools.lru_cache
        _add(digest, value.__wrapped__, visited)
    elif hasattr(value, "__array__"):
        _add_array(digest, value)
    else:
        _add_object(digest, value, visited)


def _add_container(digest: Any, value: Any, visited: Visited) -> None:
    digest.update(f"{type(value).__name__}{len(value)}(".encode())
    if isinstance(value, dict):
        for key in _some(sorted(value, key=str)):
            digest.update(f"{key}:".encode())
            _add(digest, value[key], visited)
    elif isinstance(value, set | frozenset):
        for text in _some(sorted(map(repr, value))):
            digest.update(text.encode())
    else:
        for item in _some(value):
            _add(digest, item, visited)
    digest.update(b")")


def _some(items: Sequence[Any]) -> Sequence[Any]:
    """Return all items, or those at both ends if there are many."""
    if len(items) <= MAX_ITEMS:
        return items
    return [*items[: MAX_ITEMS // 2], *items[-MAX_ITEMS // 2 :]]


def _add_function(digest: Any, function: Any, visited: Visited) -> None:
    code = function.__code__
    _add(digest, code, visited)
    _add(digest, function.__defaults__ or (), visited)
    _add(digest, function.__kwdefaults__ or {}, visited)
    for cell in function.__closure__ or ():
        try:
            _add_used(digest, cell.cell_contents, visited)
        except ValueError:  # not assigned yet
            continue
    known = getattr(function, "__globals__", {})
    names = list(dict.fromkeys(_names(code)))
    for name in names:
        used = known.get(name)
        if isinstance(used, ModuleType) and _is_own(used):
            for one in names:
                _add_used(digest, getattr(used, one, None), visited)
        elif name in known:
            _add_used(digest, used, visited)


def _names(code: CodeType) -> Iterator[str]:
    """Return the names in a function's code and in the code of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _add_used(digest: Any, value: Any, visited: Visited) -> None:
    """Add what code uses: values, and code that is not of an installed package."""
    is_value = isinstance(value, (*SIMPLE, *CONTAINERS, functools.partial, MethodType))
    inner = getattr(value, "__wrapped__", value)  # of a function with a cache
    if is_value or hasattr(value, "__array__") or _is_own(inner):
        _add(digest, value, visited)


def _is_own(value: Any) -> bool:
    """Return whether a module, a function, a class or an object's class is the user's code."""
    if isinstance(value, ModuleType):
        name = value.__name__
    else:
        kind = value if isinstance(value, type) or hasattr(value, "__code__") else type(value)
        name = kind.__module__
        if name in (None, "builtins"):  # so it is for code that was given to exec
            return getattr(builtins, kind.__qualname__, None) is not kind
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None or name.split(".")[0] == OWN_PACKAGE:
        return name == "__main__"
    path = Path(file)
    return "site-packages" not in path.parts and not any(map(path.is_relative_to, INSTALLED))


def _add_class(digest: Any, kind: type, visited: Visited) -> None:
    digest.update(kind.__qualname__.encode())
    if not _is_own(kind):
        return
    for base in kind.__bases__:
        _add(digest, base, visited)
    for name, member in sorted(vars(kind).items()):
        if name in NOT_CODE:
            continue
        functions = [getattr(member, key, None) for key in ("__func__", "fget", "fset", "func")]
        code = [one for one in functions if hasattr(one, "__code__")]
        for one in code or [member]:
            if hasattr(one, "__code__") or isinstance(one, (*SIMPLE, *CONTAINERS, type)):
                digest.update(name.encode())
                _add(digest, one, visited)


def _add_array(digest: Any, value: Any) -> None:
    """Add a torch tensor, a numpy array or a table: its shape and its values."""
    digest.update(f"{type(value).__name__} {getattr(value, 'shape', '')}".encode())
    flat: Any = value.detach() if hasattr(value, "detach") else np.asarray(value)
    flat = flat.reshape(-1)
    flat = flat[:: max(1, len(flat) // MAX_VALUES)]
    with suppress(RuntimeError, NotImplementedError):  # a tensor without values
        if hasattr(flat, "cpu"):
            flat = flat.cpu().contiguous().view(torch.uint8).numpy()
        digest.update(repr(flat.tolist()).encode() if flat.dtype == object else flat.tobytes())


def _add_object(digest: Any, value: Any, visited: Visited) -> None:
    _add(digest, type(value), visited)
    if dataclasses.is_dataclass(value):
        state = {spec.name: getattr(value, spec.name, None) for spec in dataclasses.fields(value)}
    else:
        state = dict(getattr(value, "__dict__", {}))
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        state |= {name: getattr(value, name, None) for name in slots if isinstance(name, str)}
    for name in sorted(state):
        digest.update(name.encode())
        _add_used(digest, state[name], visited)

"""Functions, classes and other Python objects as values of settings."""

import sys
from typing import Any

from postgrad.user_code import PythonObject


def as_setting(value: Any) -> str:
    """Return the text of a setting for an object: its import path, or a PythonObject.

    An object that other processes can import is given by its path, as on the command line. Another
    one, such as a function of a notebook, is a PythonObject.
    """
    return importable_path(value) or PythonObject(object_name(value), value)


def importable_path(value: Any) -> str:
    """Return `module:name` of a function or class that another process can import, else ""."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        return ""
    found = getattr(sys.modules.get(module), name, None)
    return f"{module}:{name}" if found is value else ""


def object_name(value: Any) -> str:
    """Return the name of a function or a class, or of an object's class."""
    return getattr(value, "__name__", type(value).__name__).strip("<>")

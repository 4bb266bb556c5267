"""Loads a user's own class or function, given as `file.py:name` or `package.module:name`.

Methods, losses, advantages, verifiers, tools and engines are found this way. Nothing registers
itself at import. From Python they may also be given as objects (PythonObject).
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from postgrad.errors import ConfigError, Conflict, UnknownName, Unsupported, UserCode, did_you_mean

# Folders of code that is not the user's: Python's, installed packages, and Postgrad's own.
_LIBRARIES = (
    "<frozen",
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parent),
)
PYTHON = "python"  # before the colon in the text of a PythonObject


class PythonObject(str):
    """The value of a setting that is an object of this process, such as a function of a notebook.

    As text it is `python:NAME`; config.yaml holds that. A copy by dataclasses.asdict is plain text,
    so other processes see the text only, and refuse it with one line.
    """

    value: Any

    def __new__(cls, name: str, value: Any) -> "PythonObject":
        text = super().__new__(cls, f"{PYTHON}:{name}")
        text.value = value
        return text

    def __eq__(self, other: object) -> bool:
        """Whether both are the same text, and the same object if both have one.

        Caches by setting therefore never mix up two objects whose code is equal.
        """
        is_same = not isinstance(other, PythonObject) or self.value is other.value
        return is_same and str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __deepcopy__(self, memo: Any) -> str:
        return str(self)

    def __str__(self) -> str:
        return "".join(self)  # a plain str


def import_named(path: str) -> Any:
    """Return the object at `package.module:name` of a table of this package."""
    module_name, _, name = path.partition(":")
    return getattr(importlib.import_module(module_name), name)


def is_path(name: str) -> bool:
    """Whether a setting's value names a user's own object instead of a built-in one."""
    return ":" in name


def load_object(path: str, label: str, is_valid: Callable[[Any], bool], kind: str) -> Any:
    """Return the object at `file.py:name` or `package.module:name`.

    Args:
        path: a file or module, a colon, and a name defined in it. A relative file is looked up in
            the current folder, then in the folders of sys.path, as modules are.
        label: the start of error messages, such as `method.loss=mine.py:soft`.
        is_valid: whether an object of the module is of the wanted kind.
        kind: the wanted kind, for error messages, such as `function`.

    Raises:
        ConfigError: the module cannot be imported, or has no such object.
    """
    if isinstance(path, PythonObject):
        if not is_valid(path.value):
            raise UserCode(f"{label} is no {kind}")
        return path.value
    place, _, name = path.rpartition(":")
    module = load_module(place, label)
    value = vars(module).get(name)
    if not is_valid(value):
        others = [
            key
            for key, other in vars(module).items()
            if is_valid(other) and not key.startswith("_")
        ]
        raise UnknownName(f"{label}: {place} has no {kind} {name}; {did_you_mean(name, others)}")
    return value


def place_of(error: BaseException) -> str:
    """Return the last line of the user's own code that an exception passed, e.g. ` (a.py, line 3)`.

    Empty if it passed none.
    """
    place = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            place = f" ({Path(file).name}, line {traceback.tb_lineno})"
        traceback = traceback.tb_next
    return place


def user_error(error: BaseException) -> str:
    """Return an error that the user's own code raised as one line with file and line; else ""."""
    place = place_of(error)
    return f"{describe_error(error)}{place}" if place else ""


def describe_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def load_module(place: str, label: str) -> ModuleType:
    """Return the module of a file or of a dotted name.

    Raises ConfigError, which starts with `label`.
    """
    refuse_object_name(f"{place}:", label)
    add_current_folder()
    try:
        if place.endswith(".py"):
            file = find_file(place)
            return _load_file(file, file.stat().st_mtime_ns)
        _check_not_shadowed(place)
        return importlib.import_module(place)
    except ConfigError as error:
        raise error.reworded(f"{label}: {error}") from error
    except Exception as error:
        reason = describe_error(error) + place_of(error)
        raise UserCode(f"{label} cannot be imported: {reason}") from error


def _check_not_shadowed(place: str) -> None:
    """Raise ConfigError if a module was imported from another file than a new process would use.

    That happens when a Python program starts runs in two folders that have modules of one name.
    """
    top = place.partition(".")[0]
    loaded = getattr(sys.modules.get(top), "__file__", None)
    found = importlib.machinery.PathFinder.find_spec(top)
    if not loaded or found is None or not found.origin:
        return
    if Path(loaded).resolve() != Path(found.origin).resolve():
        raise Conflict(
            f"the module {top} was imported from {loaded}, but is now found at {found.origin}; "
            "give your own file as file.py:NAME, or start a new Python process",
            at=top,
        )


def refuse_object_name(text: str, label: str) -> None:
    """Raise ConfigError for the text of a PythonObject, whose object another process had."""
    if text.startswith(f"{PYTHON}:"):
        raise Unsupported(
            f"{label} is an object of another Python process; give it again from Python, "
            "or put it into a file and give file.py:NAME"
        )


def add_current_folder() -> None:
    """Let modules of the current folder be imported, as `python -m` does."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)


def find_file(place: str) -> Path:
    """Return the absolute path of a Python file. Raises FileNotFoundError.

    Worker processes may run in another folder. They get the driver's sys.path, so that they find
    the same file.
    """
    file = Path(place).expanduser()
    for folder in (Path.cwd(), *map(Path, sys.path)):
        candidate = folder / file  # an absolute file ignores the folder
        if candidate.is_file():
            return candidate.resolve()
    raise FileNotFoundError(f"there is no such file in {Path.cwd()}")


@cache
def _load_file(file: Path, modified_ns: int) -> ModuleType:
    """Execute a file as a module. A file that was changed since is executed again."""
    digest = hashlib.blake2b(f"{file}/{modified_ns}".encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"postgrad_user_{file.stem}_{digest}", file)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses of the file look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def check_functions(cls: type) -> None:
    """Refuse a user's class with a function that cannot do what its name says.

    Raises:
        ConfigError: an `__init__` that does not call the one of the base class, or a misspelled
            name: a function that nothing calls, named almost as one of the base class.
    """
    own: dict[str, FunctionType] = {}
    inherited: set[str] = set()
    for owner in cls.__mro__:
        functions = {
            name: one for name, one in vars(owner).items() if isinstance(one, FunctionType)
        }
        if owner.__module__.partition(".")[0] == "postgrad":
            inherited |= functions.keys()
        else:
            own |= functions
    names = {name for function in own.values() for name in _names(function.__code__)}
    if "__init__" in own and "__init__" not in _names(own["__init__"].__code__):
        raise UserCode(
            f"{cls.__qualname__}.__init__ does not call super().__init__(config); begin it with "
            "that, and give it the arguments self and config",
            at="method",
        )
    for name in own.keys() - inherited - names:
        similar = [] if name.startswith("_") else get_close_matches(name, inherited, 1, 0.8)
        if similar:
            raise UnknownName(
                f"{cls.__qualname__}.{name}: nothing calls a function of this name; did you mean "
                f"{similar[0]}?",
                at="method",
            )


def _names(code: CodeType) -> set[str]:
    """Return the attributes and globals that a function's code names, with inner functions."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)

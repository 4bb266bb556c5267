"""What a test holds instead of an object of the program.

A test gets plain values by value (plain.py). For everything else it gets a handle, and every
operation on a handle is a request to the program. The program can reply what it likes; so the
question is which replies may decide an assert.

- `ClassHandle` and `ObjectHandle`: a class that the test itself uses as a class (test_source.py
  says when), and its instances. Attributes and operators are the program's own, as the test wants
  them. But an instance is never equal to a plain value, nor smaller or larger, whatever it says.
- `FunctionHandle`: functions, methods and other classes. It can be called.
- `IteratorHandle`: generators and iterators. It yields values.
- `OpaqueHandle`: all other objects. The test can pass it back to the program.

The last three have no operators, and their attributes can be read only if no built-in type and no
array has an attribute of that name. So `f(1) - 41`, `41 in f(1)` and `f(1).startswith("x")` fail
with an object that only pretends to be a number, a list or a string.
"""

from collections.abc import Callable
from typing import Any

Ask = Callable[..., Any]  # ask(operation, *arguments, **keywords) -> the program's result

BUILT_IN_TYPES = (
    int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range,
)  # fmt: skip
ARRAY_ATTRIBUTES = (
    "all", "any", "astype", "equals", "item", "max", "mean", "min", "round", "std", "sum", "tolist",
)  # fmt: skip
PLAIN_ATTRIBUTES = frozenset(name for kind in BUILT_IN_TYPES for name in dir(kind)).union(
    ARRAY_ATTRIBUTES
)
FUNCTION_ATTRIBUTES = ("__name__", "__qualname__", "__module__", "__annotations__", "__wrapped__")


class Violation(BaseException):
    """The program did what no honest program does; the test fails, even if it catches this."""


class Handle:
    """An object of the program, known by its number."""

    __slots__ = ("_ask", "_number", "_violate")

    def __init__(self, number: int, ask: Ask, violate: Callable[[str], Any]) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_violate", violate)

    def __copy__(self) -> Any:
        return self._ask("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._ask("deepcopy", self)


class AttributeHandle(Handle):
    """A handle whose attributes can be read and set, as a with statement's context too."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("delattr", self, name)

    def __enter__(self) -> Any:
        return self._ask("enter", self)

    def __exit__(self, *_: object) -> bool:
        """End a with block. The program cannot suppress what the block raised (an assert)."""
        self._ask("exit", self)
        return False


class RestrictedHandle(AttributeHandle):
    """A handle with attributes that no built-in type has. It can be called."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        self._check_attribute(name)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._check_attribute(name)
        super().__setattr__(name, value)

    def _check_attribute(self, name: str) -> None:
        if name.startswith("__") and name not in FUNCTION_ATTRIBUTES:  # modules look for hooks
            raise AttributeError(name)
        if name in PLAIN_ATTRIBUTES:
            self._violate(f"the program's object is used for its attribute {name}")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", self, *arguments, **keywords)


class FunctionHandle(RestrictedHandle):
    """A function, a method, or a class that the test does not use as a class."""

    __slots__ = ()


class ClassHandle(AttributeHandle):
    """A class of the program that the test uses as a class."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", self, *arguments, **keywords)

    def __iter__(self) -> Any:  # of an Enum
        return self._ask("iter", self)

    def __getitem__(self, key: Any) -> Any:  # of an Enum, or a generic class
        return self._ask("getitem", self, key)

    def __instancecheck__(self, instance: Any) -> bool:
        if not isinstance(instance, Handle):
            return False
        return self._ask("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: Any) -> bool:
        if not isinstance(subclass, ClassHandle):
            return False
        return self._ask("issubclass", subclass, self) is True


class IteratorHandle(Handle):
    """A generator or another iterator."""

    __slots__ = ()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._ask("next", self)

    def send(self, value: Any) -> Any:
        return self._ask("send", self, value)

    def close(self) -> None:
        self._ask("close", self)


class OpaqueHandle(RestrictedHandle):
    """An object of a class that the test does not use as a class.

    It decides nothing. `is_structure` says that the test reads attributes of the program's objects,
    nodes of a list or a tree for instance: then it is true and equal to itself only, as any object
    without operators. Otherwise the test fails where it needs a truth value or an equality.
    """

    __slots__ = ("_is_structure",)

    def __init__(
        self, number: int, ask: Ask, violate: Callable[[str], Any], is_structure: bool
    ) -> None:
        super().__init__(number, ask, violate)
        object.__setattr__(self, "_is_structure", is_structure)

    def __bool__(self) -> bool:
        self._check_structure("a truth value")
        return True

    def __eq__(self, other: object) -> bool:
        self._check_structure("an equality")
        return self is other

    def __hash__(self) -> int:
        self._check_structure("a hash")
        return id(self)

    def _check_structure(self, use: str) -> None:
        if not self._is_structure:
            self._violate(f"the program's object is used for {use}")

    def __repr__(self) -> str:
        self._violate("the program's object is used as text")
        return ""

    def __format__(self, specification: str) -> str:
        return repr(self)


class ObjectHandle(AttributeHandle):
    """An instance of a class that the test uses as a class. Operators are added below."""

    __slots__ = ()

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        kind = self._ask("class_of", self)
        if not isinstance(kind, (ClassHandle, FunctionHandle)):  # isinstance(x, int) reads it
            self._violate("the program's object has no class of the program")
        return kind

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", self, *arguments, **keywords)

    def __contains__(self, item: Any) -> bool:
        return self._bool("contains", item)

    def __bool__(self) -> bool:
        return self._bool("bool")

    def __hash__(self) -> int:
        return self._ask("hash", self)

    def _bool(self, operation: str, *arguments: Any) -> bool:
        result = self._ask(operation, self, *arguments)
        if result is not True and result is not False:
            self._violate(f"{operation} gave no truth value")
        return result

    def _compare(self, operation: str, other: Any) -> Any:
        """Compare two of the program's objects there, and a plain value with plain content here."""
        if isinstance(other, Handle):
            return self._bool(operation, other)
        content = self._ask("content", self)
        if content is None or isinstance(content, Handle):
            return NotImplemented
        return getattr(content, f"__{operation}__")(other)

    def __eq__(self, other: object) -> Any:
        return self._compare("eq", other)

    def __ne__(self, other: object) -> Any:
        return self._compare("ne", other)

    def __lt__(self, other: Any) -> Any:
        return self._compare("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("le", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare("gt", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare("ge", other)


FORWARDED = (
    "len", "iter", "next", "str", "repr", "int", "float", "complex", "round", "format", "index",
    "reversed", "getitem", "setitem", "delitem", "neg", "pos", "abs", "invert",
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
    "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip


def _add_operator(method: str, operation: str) -> None:
    def forward(self: ObjectHandle, *arguments: Any) -> Any:
        return self._ask(operation, self, *arguments)

    setattr(ObjectHandle, method, forward)


def _add_reflected_operator(method: str, operation: str) -> None:
    def forward(self: ObjectHandle, other: Any) -> Any:
        return self._ask(operation, other, self)

    setattr(ObjectHandle, method, forward)


for _name in FORWARDED:
    _add_operator(f"__{_name}__", _name)
for _name in BINARY:
    _operation = f"{_name}_" if _name in ("and", "or") else _name  # as the module operator has it
    _add_operator(f"__{_name}__", _operation)
    _add_reflected_operator(f"__r{_name}__", _operation)

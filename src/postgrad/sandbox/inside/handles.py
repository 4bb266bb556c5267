"""What a test holds instead of an object of the program.

A handle is a number. The program replies to requests about it as it likes, so no reply decides an
assert unless it is a plain value: a handle has attributes, calls and an identity, and no operators.
"""

from typing import Any

from .plain import ATTRIBUTES, CODECS

FUNCTION_ATTRIBUTES = ("__name__", "__qualname__", "__module__", "__doc__", "__wrapped__")
# Everything that Python asks an object for by an operator, a conversion or a statement.
OPERATORS = (
    "len", "iter", "next", "reversed", "contains", "getitem", "setitem", "delitem", "index",
    "str", "repr", "format", "bytes", "int", "float", "complex", "round", "trunc", "floor", "ceil",
    "neg", "pos", "abs", "invert", "lt", "le", "gt", "ge",
    "copy", "deepcopy", "reduce_ex", "mro_entries", "subclasscheck", "aiter", "anext", "aenter",
    *[prefix + name for prefix in ("", "r") for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul",
        "and", "or", "xor", "lshift", "rshift")],
)  # fmt: skip


class Handle:
    """An object of the program, known by its number.

    Args:
        channel: performs requests, and refuses a use that is not allowed.
    """

    __slots__ = ("_handle_channel", "_handle_number")
    _handle_channel: Any

    def __init__(self, channel: Any, number: int) -> None:
        object.__setattr__(self, "_handle_channel", channel)
        object.__setattr__(self, "_handle_number", number)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._handle_channel.refuse("copied")


class Iterator(Handle):
    """A generator or another iterator: yields values."""

    __slots__ = ()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._handle_channel.ask_item("next", self)

    def send(self, value: Any) -> Any:
        return self._handle_channel.ask_item("send", self, value)

    def close(self) -> None:
        self._handle_channel.ask("close", self)


class Opaque(Handle):
    """Any other object: a function, a class, an instance.

    Attributes:
        _handle_is_class: a class that the test names; what a call of it returns is an instance.
        _handle_is_instance: such an instance, whose methods may be named like those of plain
            values.
    """

    __slots__ = ("_handle_has_operators", "_handle_is_class", "_handle_is_instance")

    def __init__(self, channel: Any, number: int, has_operators: bool) -> None:
        super().__init__(channel, number)
        object.__setattr__(self, "_handle_has_operators", has_operators)
        object.__setattr__(self, "_handle_is_class", False)
        object.__setattr__(self, "_handle_is_instance", False)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        result = self._handle_channel.ask("call", self, *arguments, **keywords)
        if self._handle_is_class and type(result) is Opaque:
            object.__setattr__(result, "_handle_is_instance", True)
        return result

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        kind = self._handle_channel.ask("class_of", self)
        if type(kind) is not Opaque:  # isinstance(x, int) reads it
            self._handle_channel.violate("an object of the program pretends to be a plain value")
        return kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in FUNCTION_ATTRIBUTES:  # modules look for hooks
            raise AttributeError(name)
        value = self._handle_channel.ask_attribute(self, name)
        may_have_methods = self._handle_is_instance or self._handle_is_class
        if not may_have_methods and name in ATTRIBUTES and callable(value):
            self._handle_channel.refuse(f"used for its method {name}")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._handle_channel.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._handle_channel.ask("delattr", self, name)

    def __instancecheck__(self, instance: Any) -> bool:
        if type(instance) is not Opaque:
            return False
        return self._handle_channel.ask("isinstance", instance, self) is True

    def __enter__(self) -> Any:
        return self._handle_channel.ask("enter", self)

    def __exit__(self, *_: object) -> bool:
        """End a with block. The program cannot suppress what the block raised (an assert)."""
        self._handle_channel.ask("exit", self)
        return False

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same object; a plain value never is."""
        if self is other or other is None:
            return self is other
        if type(other) not in (*CODECS, bool, Opaque, Iterator):
            self._handle_channel.unsupport("an object of the program is compared with the test's")
        if type(other) is Opaque and other._handle_has_operators:
            other._handle_refuse("compared")
        if self._handle_is_instance or type(other) is Opaque:
            self._handle_refuse("compared")
        return False

    def __hash__(self) -> int:
        self._handle_refuse("hashed")
        return self._handle_number

    def __bool__(self) -> bool:
        self._handle_refuse("used as a truth value")
        return True

    def _handle_refuse(self, use: str) -> None:
        if self._handle_has_operators:
            self._handle_channel.refuse(use)


def _refuse_operator(name: str) -> None:
    def refuse(self: Opaque, *_: Any) -> Any:
        return self._handle_channel.refuse(f"used by an operator, {name}")

    setattr(Opaque, f"__{name}__", refuse)


for _name in OPERATORS:
    _refuse_operator(_name)

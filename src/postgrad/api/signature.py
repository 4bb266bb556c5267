"""One argument list for a class and for the function that makes and runs an object of it."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def with_arguments_of(
    constructor: Callable[Arguments, Any],
) -> Callable[[Callable[..., Returned]], Callable[Arguments, Returned]]:
    """Return a decorator: type checkers, help() and editors see the constructor's arguments."""
    parameters = list(inspect.signature(constructor).parameters.values())

    def decorate(function: Callable[..., Returned]) -> Callable[Arguments, Returned]:
        returns = inspect.signature(function).return_annotation
        signature = inspect.Signature(parameters, return_annotation=returns)
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return decorate

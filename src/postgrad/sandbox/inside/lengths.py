"""Functions of Python that a test gets instead of the built-in ones, for results that end early.

A check that runs once per item says nothing where there is no item. What each form does is in
docs/rewards.md: it fails where expected values are left over, and is unsupported where nothing
is compared.
"""

import builtins
import itertools
from collections.abc import Callable, Iterable
from collections.abc import Iterator as Iterating
from typing import Any

from .handles import Iterator
from .plain import CODECS

END = object()
MAX_RESULTS = 10_000  # that are remembered
ENDLESS = (itertools.count, itertools.cycle, itertools.repeat)


class Lengths:
    """The functions for one test.

    Args:
        violate: fails the test with a reason.
        no_items: makes the test unsupported.
        may_end: the test speaks of StopIteration, so next() may raise it.
    """

    def __init__(
        self, violate: Callable[[str], Any], no_items: Callable[[], Any], may_end: bool
    ) -> None:
        self.violate = violate
        self.no_items = no_items
        self.may_end = may_end
        self.results: dict[int, Any] = {}  # id -> container that the program returned

    def functions(self) -> dict[str, Any]:
        names = ("zip", "map", "all", "any", "next")
        return {name: getattr(self, name) for name in names}

    def add(self, value: Any) -> None:
        """Remember a result of the program."""
        if type(value) in CODECS and hasattr(value, "__len__"):
            if len(self.results) >= MAX_RESULTS:
                self.results.clear()
            self.results[id(value)] = value

    def is_result(self, value: Any) -> bool:
        return type(value) is Iterator or self.results.get(id(value), END) is value

    def loop(self, iterable: Iterable[Any]) -> Iterating[Any]:
        """Yield the items, at least one."""
        has_items = False
        for item in iterable:
            has_items = True
            yield item
        if not has_items:
            self.no_items()

    def all(self, iterable: Iterable[Any]) -> bool:
        return builtins.all(self.loop(iterable))

    def any(self, iterable: Iterable[Any]) -> bool:
        return builtins.any(self.loop(iterable))

    def next(self, iterator: Any, *default: Any) -> Any:
        item = builtins.next(iterator, *default or (END,))
        if item is not END:
            return item
        if type(iterator) is Iterator and not self.may_end:
            self.violate("the program's iterator has ended")
        raise StopIteration

    def map(self, function: Any, *iterables: Any) -> Iterating[Any]:
        return itertools.starmap(function, self.zip(*iterables))

    def zip(self, *iterables: Any, strict: bool = False) -> Iterating[Any]:
        if strict or len(iterables) < 2:
            return builtins.zip(*iterables, strict=strict)
        return self._rows(iterables)

    def _rows(self, iterables: tuple[Any, ...]) -> Iterating[Any]:
        """Yield the rows; the test fails if a result ends while other iterables have items."""
        iterators = [iter(iterable) for iterable in iterables]
        while True:
            row = []
            for iterator in iterators:
                item = builtins.next(iterator, END)
                if item is END:
                    break
                row.append(item)
            if len(row) < len(iterators):
                break
            yield tuple(row)
        ended = len(row)
        if not self.is_result(iterables[ended]):
            return
        for position, iterable in enumerate(iterables):
            if self.is_result(iterable) or isinstance(iterable, ENDLESS):
                continue
            if position < ended or builtins.next(iterators[position], END) is not END:
                self.violate("the program's result ends before the expected values")

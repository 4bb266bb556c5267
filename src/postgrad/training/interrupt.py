"""Ctrl-C: the first one lets the step end and saves, the second one stops at once."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupt:
    """Whether somebody asked the run to stop."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.asked, self.note = False, note

    def handle(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.note("finishing this step, then saving; press Ctrl-C again to stop at once")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Listen to SIGINT and SIGTERM while the context lasts."""
        before = {
            number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

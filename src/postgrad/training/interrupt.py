"""Ctrl-C: the first one ends the run after the current step, the second one at once."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupt:
    """Whether somebody asked the run to stop, by SIGINT or SIGTERM."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.requested = False
        self.note = note

    def handle(self, number: int, frame: object) -> None:
        """Handle a signal. Raises KeyboardInterrupt on the second one."""
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self.note("finishing this step, then saving; press Ctrl-C again to stop at once")

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside the block; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, self.handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

"""Results that clients poll for.

A training or sampling request is answered at once with a request id. The client then asks for the
result by that id, again and again, until it is there. All methods run in the event loop.
"""

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from postgrad.web import HttpError

POLL_S = 20.0  # a poll is answered after this time at the latest; the client gives up after 45 s
STOP_CHECK_S = 0.5  # a poll sees within this time that the server stops
KEEP_S = 1800.0  # a result is kept this long
MAX_BYTES = 1 << 30  # of all results together

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


class Encoded(NamedTuple):
    """A result that is already in its wire format."""

    body: bytes
    media_type: str


@dataclass
class Result:
    """The result of one request; `body` is None until it is there."""

    request_id: str
    body: bytes | None = None
    media_type: str = JSON
    finished_at: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Results:
    """All results by request id, oldest first.

    `is_stopping` says whether the server stops; polls then end at once.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.is_stopping: Callable[[], bool] = lambda: False
        self.num_bytes = 0
        self.num_pending = 0
        self._results: OrderedDict[str, Result] = OrderedDict()

    def find(self, request_id: str) -> Result | None:
        """Return the result of a request that was made before: the client sends it again."""
        return self._results.get(request_id)

    def add(self, request_id: str) -> Result:
        """Return a new result that is not there yet."""
        result = Result(request_id)
        self.num_pending += 1
        self._results[request_id] = result
        return result

    def finish(self, result: Result, body: bytes, media_type: str) -> None:
        """Set a result, wake up the polls for it, and drop old results."""
        if result.body is not None:
            return
        result.body = body
        result.media_type = media_type
        result.finished_at = time.monotonic()
        result.done.set()
        self.num_pending -= 1
        self.num_bytes += len(body)
        self._drop_old()

    def _drop_old(self) -> None:
        expired = time.monotonic() - KEEP_S
        for request_id, result in list(self._results.items()):
            if result.body is None:
                continue
            if result.finished_at > expired and self.num_bytes <= self.max_bytes:
                break
            del self._results[request_id]
            self.num_bytes -= len(result.body)

    async def wait(self, request_id: str) -> Result | None:
        """Return the result, or None if it is not there within POLL_S.

        Raises HttpError: 410 unknown, or dropped; 503 the server stops.
        """
        result = self._results.get(request_id)
        if result is None:
            raise HttpError(410, f"no result {request_id[:200]!r}; it is unknown or was dropped")
        deadline = time.monotonic() + POLL_S
        while not result.done.is_set():
            if self.is_stopping():
                raise HttpError(503, "the server stops")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(STOP_CHECK_S, left_s)):
                    await result.done.wait()
        return result


def failure(error: BaseException, is_user_error: bool) -> bytes:
    """Return the body of a request that failed; the client raises RequestFailedError."""
    text = str(error) if is_user_error else f"the server failed: {type(error).__name__}: {error}"
    return to_json({"error": text, "category": "user" if is_user_error else "server"})


def to_json(value: Any) -> bytes:
    return json.dumps(value).encode()

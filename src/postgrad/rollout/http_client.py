"""JSON calls to a model server, with retries and time limits.

Every call has a total time limit and is retried within it, with growing pauses. Errors name the
address and the last failure. The environment variable POSTGRAD_API_KEY has the key for servers that
require one.
"""

import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from postgrad.errors import ConfigError, RunError, did_you_mean

START_S = 10.0  # time limit for the first answer of a server
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between tries; the last one repeats
RETRY_STATUSES = (408, 409, 425, 429)  # and all from 500 on
MAX_RESPONSE_BYTES = 64 << 20
Item = TypeVar("Item")
Result = TypeVar("Result")


class RequestRefused(Exception):
    """The server answered with an error that a retry cannot change; `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class _NotStarted(RunError):
    """A call that was not made because another call of the same batch had failed."""


@dataclass(frozen=True)
class Address:
    """A server and one of its models, written http://host:port/v1#model."""

    url: str  # scheme, host, port and path, without a slash at the end
    model: str

    @staticmethod
    def parse(text: str) -> "Address":
        """Parse http://host:port/v1#model. Raises ConfigError."""
        parts = urlsplit(text)
        try:
            _ = parts.port
            has_valid_port = True
        except ValueError:
            has_valid_port = False
        is_http = parts.scheme in ("http", "https")
        if not (is_http and parts.hostname and has_valid_port and parts.fragment):
            raise ConfigError(
                f"{text} is not a model behind a server; write it as http://host:8000/v1#model"
            )
        return Address(f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"), parts.fragment)


class HttpClient:
    """JSON calls to one server, with retries, time limits and reused connections. Thread-safe.

    Args:
        address: the server and its model.
        wait_s: time limit per call of `map` in seconds.
        concurrency: largest number of calls at the same time.
    """

    def __init__(self, address: Address, wait_s: float, concurrency: int) -> None:
        self.address = address
        self.wait_s = wait_s
        self.concurrency = concurrency
        is_https = address.url.startswith("https:")
        self._http = httpx.Client(
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            verify=ssl.create_default_context() if is_https else False,
            trust_env=False,  # a proxy would time out before a generation ends
        )

    def check(self) -> int | None:
        """Check that the server answers and has the model; returns its context length if known.

        Raises ConfigError.
        """
        deadline = time.monotonic() + min(START_S, self.wait_s)
        try:
            answer = self.call("GET", "/models", None, deadline)
        except (RunError, RequestRefused) as error:
            reason = str(error)
            if isinstance(error, RequestRefused):
                reason = f"answers {error.status}: {error}"
            raise ConfigError(
                f"{self.address.url} {reason}; start the server there, or give another address"
            ) from error
        models = {str(entry.get("id")): entry for entry in json_objects(answer, "data")}
        if models and self.address.model not in models:
            raise ConfigError(
                f"{self.address.url} has no model {self.address.model}; "
                f"{did_you_mean(self.address.model, models)}"
            )
        length = models.get(self.address.model, {}).get("max_model_len")
        return length if isinstance(length, int) else None

    def map(
        self, function: Callable[[Item, float], Result], items: Sequence[Item], what: str
    ) -> list[Result]:
        """Return function(item, deadline) of every item, in order, in `concurrency` threads.

        After the first error no further call starts, and that error is raised. `what` names one
        call in error messages.
        """
        deadline = time.monotonic() + self.wait_s
        failed = threading.Event()

        def run(item: Item) -> Result:
            if failed.is_set():
                raise _NotStarted(f"{self.address.url}: {what} was not started")
            try:
                return function(item, deadline)
            except BaseException:
                failed.set()
                raise

        num_threads = max(1, min(self.concurrency, len(items)))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="http") as pool:
            futures = [pool.submit(run, item) for item in items]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, _NotStarted):
                raise error
        return [future.result() for future in futures]

    def call(self, method: str, path: str, body: dict[str, Any] | None, deadline: float) -> Any:
        """Return the JSON answer of one call; retry while the server is down or busy.

        Raises:
            RequestRefused: the server answered with an error status.
            RunError: no answer by the deadline; names the address, the call and the last failure.
        """
        start = time.monotonic()
        num_tries = 0
        failure = "no try was made"
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                status, answer = self._send(method, path, body, left_s)
                if status < 400:
                    return answer
                reason = _error_message(answer)
                if status < 500 and status not in RETRY_STATUSES:
                    raise RequestRefused(status, reason)
                failure = f"status {status}: {reason}"
            except (httpx.HTTPError, OSError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}".removesuffix(": ")
            pause_s = PAUSES_S[min(num_tries, len(PAUSES_S) - 1)]
            num_tries += 1
            time.sleep(max(0.0, min(pause_s, deadline - time.monotonic())))
        waited_s = time.monotonic() - start
        raise RunError(
            f"did not answer {method} {self.address.url}{path} within {waited_s:.0f} s "
            f"and {num_tries} tries (the last: {failure})"
        )

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, left_s: float
    ) -> tuple[int, Any]:
        """Send one request and return its status and JSON body (a text for errors without JSON).

        Raises httpx.HTTPError, OSError or ValueError when there is no usable answer in `left_s`.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get("POSTGRAD_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + left_s
        raw = bytearray()
        with self._http.stream(
            method, self.address.url + path, content=content, headers=headers, timeout=left_s
        ) as response:
            for part in response.iter_bytes():
                raw += part
                if len(raw) > MAX_RESPONSE_BYTES:
                    raise ValueError(f"an answer of more than {MAX_RESPONSE_BYTES} bytes")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("timed out")
        try:
            return response.status_code, json.loads(raw)
        except (ValueError, RecursionError):
            if response.status_code >= 400:
                return response.status_code, raw.decode(errors="replace")
            raise ValueError(f"an answer that is not JSON: {bytes(raw[:80])!r}") from None


def json_objects(answer: Any, name: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the list `name` of an answer; [] if there is no such list."""
    entries = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def _error_message(answer: Any) -> str:
    """Return the message of an error's body in any of the usual shapes, in one line."""
    while isinstance(answer, dict):
        for key in ("error", "message", "detail"):
            if answer.get(key):
                answer = answer[key]
                break
        else:
            answer = json.dumps(answer)
    return " ".join(str(answer).split())[:300]

"""JSON calls to a model server, with retries and time limits.

Every call has a total time limit and is retried within it, with growing pauses. Errors name the
address and the last failure. The environment variable POSTGRAD_API_KEY has the key for servers that
require one.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from postgrad.errors import RunError, UnknownName, Unreachable, WrongValue, did_you_mean
from postgrad.net.client import HttpClient, NoAnswer, Reader, error_message, read_json

START_S = 10.0  # time limit for the first answer of a server
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

    @property
    def root(self) -> "Address":
        """The same model at the server's root, where calls are that OpenAI does not have."""
        parts = urlsplit(self.url)
        return Address(f"{parts.scheme}://{parts.netloc}", self.model)

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
            raise WrongValue(
                f"{text} is not a model behind a server; write it as http://host:8000/v1#model",
                at=text,
            )
        return Address(f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/"), parts.fragment)


class ModelClient:
    """Calls to one model of a server, many at the same time. Thread-safe.

    Args:
        address: the server and its model.
        wait_s: time limit per call of `map` in seconds.
        concurrency: largest number of calls at the same time.
    """

    def __init__(self, address: Address, wait_s: float, concurrency: int) -> None:
        self.address = address
        self.wait_s = wait_s
        self.concurrency = concurrency
        self._http = HttpClient(address.url, os.environ.get("POSTGRAD_API_KEY", ""), concurrency)

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
            raise Unreachable(
                f"{self.address.url} {reason}; start the server there, or give another address",
                at=self.address.url,
            ) from error
        models = {str(entry.get("id")): entry for entry in json_objects(answer, "data")}
        if models and self.address.model not in models:
            raise UnknownName(
                f"{self.address.url} has no model {self.address.model}; "
                f"{did_you_mean(self.address.model, models)}",
                at=self.address.url,
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

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        deadline: float,
        read: Reader = read_json,
    ) -> Any:
        """Return the JSON answer of one call, or what `read` makes of it.

        Retries while the server is down or busy.

        Raises:
            RequestRefused: the server answered with an error status.
            RunError: no answer by the deadline; names the address, the call and the last failure.
        """
        try:
            status, answer = self._http.send(method, path, body, deadline, read=read)
        except NoAnswer as error:
            failure = f"status {error.status}: {error}" if error.status else str(error)
            raise RunError(
                f"did not answer {method} {self.address.url}{path} within {error.waited_s:.0f} s "
                f"and {error.num_tries} tries (the last: {failure})"
            ) from error
        if status >= 400:
            raise RequestRefused(status, error_message(answer))
        return answer


def json_objects(answer: Any, name: str) -> list[dict[str, Any]]:
    """Return the JSON objects in the list `name` of an answer; [] if there is no such list."""
    entries = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]

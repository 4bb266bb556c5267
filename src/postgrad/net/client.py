"""The one HTTP client: JSON to a server that may be busy or down, asked again until a deadline."""

import json
import ssl
import time
from collections.abc import Callable
from typing import Any

import httpx

PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between tries; the last one repeats
RETRY_STATUSES = (408, 409, 425, 429)  # and all from 500 on
MAX_ANSWER_BYTES = 64 << 20

Reader = Callable[[int, bytes], Any]  # makes an answer of status and body; ValueError: try again


class NoAnswer(Exception):
    """A server gave no usable answer in time.

    Attributes:
        status: of the last answer; 0 if there was none.
        reason: the message of the last answer, or what failed.
        num_tries: how often the server was asked.
        waited_s: seconds that all tries took.
    """

    def __init__(self, status: int, reason: str, num_tries: int, waited_s: float) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.num_tries = num_tries
        self.waited_s = waited_s


class HttpClient:
    """JSON calls to one server, with reused connections. Threads may share it.

    Args:
        url: the address that all paths are below, without a slash at the end.
        token: sent as a Bearer token, if it is not empty.
        connections: largest number of connections at the same time.
        uses_proxy: whether the proxies of the environment count. A proxy may have time limits.
    """

    def __init__(
        self, url: str, token: str = "", connections: int = 100, uses_proxy: bool = False
    ) -> None:
        self.url = url
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.Client(
            headers=headers,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            verify=ssl.create_default_context() if url.startswith("https:") else False,
            trust_env=uses_proxy,
        )

    def send(
        self,
        method: str,
        path: str,
        body: Any,
        deadline: float,
        retry_until: float | None = None,
        read: Reader | None = None,
    ) -> tuple[int, Any]:
        """Return the status and the answer of one call, also of an error that a retry leaves.

        Args:
            method: of HTTP.
            path: below the address.
            body: sent as JSON; None sends none.
            deadline: the last answer must be complete at this time (time.monotonic()).
            retry_until: no further try begins after this time; default: the deadline.
            read: makes the answer; default: read_json.

        Raises NoAnswer.
        """
        start = time.monotonic()
        retry_until = deadline if retry_until is None else min(retry_until, deadline)
        content = None if body is None else json.dumps(body).encode()
        num_tries = 0
        while True:
            status = 0
            try:
                status, answer = self._send_once(method, path, content, deadline, read or read_json)
                if status < 500 and status not in RETRY_STATUSES:
                    return status, answer
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                answer = f"{type(error).__name__}: {error}".removesuffix(": ")
            pause_s = PAUSES_S[min(num_tries, len(PAUSES_S) - 1)]
            num_tries += 1
            if time.monotonic() + pause_s >= retry_until:
                waited_s = time.monotonic() - start
                raise NoAnswer(status, error_message(answer), num_tries, waited_s)
            time.sleep(pause_s)

    def _send_once(
        self, method: str, path: str, content: bytes | None, deadline: float, read: Reader
    ) -> tuple[int, Any]:
        """Return status and answer. Raises an error of httpx, OSError or ValueError."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise httpx.ReadTimeout("no time is left")
        raw = bytearray()
        with self._http.stream(
            method, self.url + path, content=content, timeout=left_s
        ) as response:
            for part in response.iter_bytes():
                raw += part
                if len(raw) > MAX_ANSWER_BYTES:
                    raise ValueError("the answer is too large")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout("timed out")
        return response.status_code, read(response.status_code, bytes(raw))


def read_json(status: int, raw: bytes) -> Any:
    """Return the JSON of an answer; the text of an error without JSON. Raises ValueError."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        if status >= 400:
            return raw.decode(errors="replace")
        raise ValueError(f"an answer that is not JSON: {raw[:80]!r}") from None


def error_message(answer: Any) -> str:
    """Return the message of an error's body in any of the usual shapes, in one line."""
    while isinstance(answer, dict | list) and answer:
        if isinstance(answer, list):
            answer = answer[0]
            continue
        keys = [key for key in ("error", "message", "detail", "msg") if answer.get(key)]
        answer = answer[keys[0]] if keys else json.dumps(answer)
    return " ".join(str(answer).split())[:300]

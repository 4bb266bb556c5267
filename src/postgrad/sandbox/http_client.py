"""JSON over HTTP to a sandbox server, with retries.

A server that is busy (429), fails (5xx) or cannot be reached is asked again, with growing pauses.
"""

import json
import time
from typing import Any

import httpx

from postgrad.errors import ConfigError
from postgrad.sandbox.outcome import SandboxError

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0
MAX_REPLY_BYTES = 64 << 20
NO_CONNECTION = 0  # instead of an HTTP status


class HttpClient:
    """A client for the server at `url`. Threads may share it.

    Args:
        token: sent as a Bearer token, if it is not empty.
        retry_s: how long a request is repeated.

    Raises:
        ConfigError: `url` is not an http address, or contains a password.
    """

    def __init__(self, url: str, token: str, retry_s: float) -> None:
        if not _is_address(url):
            raise ConfigError(
                f"POSTGRAD_SANDBOX={url} is not an address such as http://host:1234; "
                "a token is given in POSTGRAD_SANDBOX_TOKEN"
            )
        self.url = url.rstrip("/")
        self.retry_s = retry_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx.Client(headers=headers)

    def post(
        self, path: str, body: dict[str, Any], server_s: float, retry_s: float | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Send JSON and return the status and the JSON object of the reply.

        Args:
            server_s: how long the server needs, about.
            retry_s: how long the request is repeated; default: that of the client.

        Raises:
            SandboxError: there was no reply within that time.
        """
        retry_s = self.retry_s if retry_s is None else retry_s
        end = time.monotonic() + retry_s
        pause_s = FIRST_PAUSE_S
        while True:
            status, reply = self._post_once(path, body, server_s + retry_s)
            must_retry = status in (NO_CONNECTION, 429) or status >= 500
            if not must_retry:
                return status, reply
            if time.monotonic() + pause_s > end:
                raise self.error(f"{status or ''} {error_reason(reply)}".strip())
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def error(self, reason: str) -> SandboxError:
        """Return a SandboxError, because the program was not tested."""
        return SandboxError(f"the sandbox at {self.url} gave no result: {reason}")

    def _post_once(
        self, path: str, body: dict[str, Any], timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        deadline = time.monotonic() + timeout_s
        content = bytearray()
        try:
            with self.client.stream(
                "POST", self.url + path, json=body, timeout=timeout_s
            ) as response:
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > MAX_REPLY_BYTES:
                        return NO_CONNECTION, {"error": "the reply is too large"}
                    if time.monotonic() > deadline:
                        return NO_CONNECTION, {"error": "the reply takes too long"}
                return response.status_code, _parse_object(bytes(content))
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return NO_CONNECTION, {"error": f"{type(error).__name__} {error}"}


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):  # a port that is not a number, for instance
        return False
    has_password = bool(parsed.userinfo) or "@" in url.partition("://")[2].partition("/")[0]
    return parsed.scheme in ("http", "https") and bool(parsed.host) and not has_password


def _parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a reply; anything else becomes an `error`."""
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict):
        return reply
    start = content[:60].decode(errors="replace")
    return {"error": f"the reply is no JSON object but {start!r}"}


def error_reason(reply: dict[str, Any]) -> str:
    """Return the error message of a server's reply: our `error`, or Sandbox Fusion's `detail`."""
    reason = reply.get("error") or reply.get("detail")
    if isinstance(reason, list) and reason and isinstance(reason[0], dict):
        reason = reason[0].get("msg")
    return str(reason)

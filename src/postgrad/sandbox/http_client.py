"""Calls to a sandbox server. What gives no result is a SandboxError."""

import json
import time
from typing import Any

import httpx

from postgrad.errors import ConfigError
from postgrad.net.client import HttpClient, NoAnswer
from postgrad.sandbox.outcome import SandboxError


class SandboxClient:
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
        self._http = HttpClient(self.url, token, uses_proxy=True)

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
        retry_until = time.monotonic() + (self.retry_s if retry_s is None else retry_s)
        deadline = retry_until + server_s
        try:
            return self._http.send("POST", path, body, deadline, retry_until, _read_object)
        except NoAnswer as error:
            raise self.error(f"{error.status or ''} {error}".strip()) from error

    def error(self, reason: str) -> SandboxError:
        """Return a SandboxError, because the program was not tested."""
        return SandboxError(f"the sandbox at {self.url} gave no result: {reason}")


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):  # a port that is not a number, for instance
        return False
    has_password = bool(parsed.userinfo) or "@" in url.partition("://")[2].partition("/")[0]
    return parsed.scheme in ("http", "https") and bool(parsed.host) and not has_password


def _read_object(status: int, raw: bytes) -> dict[str, Any]:
    """Return the JSON object in a reply; anything else becomes an `error`."""
    try:
        reply = json.loads(raw)
    except (ValueError, RecursionError):
        reply = None
    if isinstance(reply, dict):
        return reply
    start = raw[:60].decode(errors="replace")
    return {"error": f"the reply is no JSON object but {start!r}"}

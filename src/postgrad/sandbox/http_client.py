"""JSON over HTTP to a sandbox elsewhere, with patience: a server that is busy, broken or not there is asked again, with growing pauses."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from postgrad.errors import ConfigError
from postgrad.sandbox.outcome import SandboxError

LONGEST_PAUSE_S = 4.0


class HttpClient:
    """The way to the server at `url`.

    Raises:
        ConfigError: `url` is no address.
    """

    def __init__(self, url: str, token: str, patience_s: float) -> None:
        try:
            parts = urlsplit(url)
            right = (
                parts.scheme in ("http", "https")
                and bool(parts.hostname)
                and parts.port != 0
                and "@" not in parts.netloc
            )
        except ValueError:  # a port that is no number
            right = False
        if not right:
            raise ConfigError(
                f"POSTGRAD_SANDBOX={url} is not an address such as http://host:1234; a token is given in POSTGRAD_SANDBOX_TOKEN"
            )
        self.url, self.token, self.patience_s = url.rstrip("/"), token, patience_s

    def ask(
        self, path: str, body: dict[str, Any], seconds: float, patience_s: float | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer of a server that needs about `seconds` for it. Status 429, 5xx and no connection are tried again.

        Raises:
            SandboxError: there was none while the patience lasted.
        """
        patience_s = self.patience_s if patience_s is None else patience_s
        content = json.dumps(body).encode()
        end, pause = time.monotonic() + patience_s, 0.25
        while True:
            status, answer = self._post(path, content, seconds + patience_s)
            if 0 < status < 500 and status != 429:
                return status, answer
            if time.monotonic() + pause > end:
                raise self.silent(f"{status or ''} {reason_in(answer)}".strip())
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def silent(self, reason: str) -> SandboxError:
        """The error that says that nothing was judged."""
        return SandboxError(f"the sandbox at {self.url} gave no verdict: {reason}")

    def _post(self, path: str, content: bytes, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Status and answer; status 0: no connection."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.token}"} if self.token else {}
        )
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return reply.status, _object(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _object(error.read(10_000))
        except (OSError, http.client.HTTPException) as error:
            return 0, {"error": f"{type(error).__name__} {error}"}


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object of an answer; what is none is kept as the error that it is."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return (
        found
        if isinstance(found, dict)
        else {"error": f"no JSON object but {text[:60].decode(errors='replace')!r}"}
    )


def reason_in(answer: dict[str, Any]) -> str:
    """What a server says went wrong: our `error`, or the `detail` of FastAPI, which Sandbox Fusion is made with."""
    detail = answer.get("error") or answer.get("detail")
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        detail = detail[0].get("msg")
    return str(detail)

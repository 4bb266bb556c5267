"""The sandbox of another machine: the same calls as sandbox.Sandbox, over HTTP to `postgrad sandbox`."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from postgrad.rewards.outcome import Limits, Result, SandboxError

BUSY = (429, 503)
LONGEST_PAUSE_S = 4.0


class RemoteSandbox:
    """Asks the server at `url`. A server that is busy or not there is asked again, with growing pauses, while `patience_s` lasts.

    Raises (from every call):
        SandboxError: the server gave no verdict; its reason.
    """

    def __init__(self, url: str, token: str = "", limits: Limits | None = None, patience_s: float = 30.0) -> None:
        self.url, self.token, self.limits, self.patience_s = url.rstrip("/"), token, limits or Limits(), patience_s

    def test_asserts(
        self, program: str, tests: Sequence[str], setup: str = "", entry_point: str = "", total_s: float = 60.0
    ) -> list[Result]:
        body = {"program": program, "tests": list(tests), "setup": setup, "entry_point": entry_point}
        return self._ask("/test_program", body, total_s)

    def test_stdio(self, program: str, tests: Sequence[dict[str, str]], total_s: float = 60.0) -> list[Result]:
        return self._ask("/test_program_stdio", {"program": program, "tests": list(tests)}, total_s)

    def _ask(self, path: str, body: dict[str, Any], total_s: float) -> list[Result]:
        content = json.dumps(body | {"max_execution_time": self.limits.time_s}).encode()
        end, pause = time.monotonic() + self.patience_s, 0.25
        while True:
            status, answer = self._post(path, content, total_s)
            if status == 422:
                return [Result(False, reason=str(answer.get("error")), unsupported=True)]
            if status == 200:
                return _results(answer, len(body["tests"]))
            if (status and status not in BUSY) or time.monotonic() + pause > end:
                raise SandboxError(f"the sandbox at {self.url} gave no verdict: {answer.get('error')}")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _post(self, path: str, content: bytes, total_s: float) -> tuple[int, dict[str, Any]]:
        """Status and answer; status 0: no connection."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.token}"} if self.token else {})
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=total_s + self.patience_s) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(10_000)
            return error.code, {"error": f"{error.code} {text.decode(errors='replace')}"}
        except (OSError, ValueError) as error:
            return 0, {"error": str(error)}


def _results(answer: dict[str, Any], num_tests: int) -> list[Result]:
    results, runtimes, reasons = (answer.get(name) for name in ("results", "runtimes", "reasons"))
    if not isinstance(results, list) or len(results) != num_tests or not isinstance(runtimes, list):
        raise SandboxError("the sandbox's answer has not one result for each test")
    reasons = reasons if isinstance(reasons, list) else [""] * num_tests
    return [Result(bool(r), float(s), str(why)) for r, s, why in zip(results, runtimes, reasons, strict=True)]

"""The sandbox of another machine, over HTTP: `postgrad sandbox` or a Sandbox Fusion server.

It has the same methods as local.Sandbox.
"""

from collections.abc import Sequence
from typing import Any

from postgrad.net.client import error_message
from postgrad.sandbox.fusion import RUN_CODE, FusionSandbox
from postgrad.sandbox.outcome import Limits, Result, SandboxError


def remote_sandbox(
    url: str, token: str = "", limits: Limits | None = None, retry_s: float = 30.0
) -> FusionSandbox:
    """Return the client for an address.

    An address that ends in /run_code is a Sandbox Fusion server's, any other one that of
    `postgrad sandbox`.

    Raises:
        ConfigError: it is not an address.
    """
    is_fusion = url.rstrip("/").endswith(RUN_CODE)
    client = FusionSandbox if is_fusion else RemoteSandbox
    return client(url, token, limits, retry_s)


class RemoteSandbox(FusionSandbox):
    """Runs and tests programs on a `postgrad sandbox` server.

    The server has /run_code as Sandbox Fusion has it, and routes of its own for tests.
    """

    kind = "postgrad sandbox"
    route = RUN_CODE

    def test_asserts(
        self,
        program: str,
        tests: Sequence[str],
        setup: str = "",
        entry_point: str = "",
        total_s: float = 60.0,
    ) -> list[Result]:
        body = {
            "program": program,
            "tests": list(tests),
            "setup": setup,
            "entry_point": entry_point,
        }
        return self._post("/test_program", body, total_s)

    def test_stdio(
        self, program: str, tests: Sequence[dict[str, str]], total_s: float = 60.0
    ) -> list[Result]:
        body = {"program": program, "tests": list(tests)}
        return self._post("/test_program_stdio", body, total_s)

    def _post(self, path: str, body: dict[str, Any], total_s: float) -> list[Result]:
        body["max_execution_time"] = self.limits.time_s
        status, reply = self.http.post(path, body, total_s)
        if status in (404, 405):
            raise self.http.error(
                f"{status}, it has no POST {path}; "
                f"the address of a Sandbox Fusion server ends in {RUN_CODE}"
            )
        if status != 200:
            raise self.http.error(f"{status} {error_message(reply)}")
        return _parse_results(reply, len(body["tests"]))


def _parse_results(reply: dict[str, Any], num_tests: int) -> list[Result]:
    names = ("results", "runtimes", "reasons", "unsupported")
    columns: list[Any] = [reply.get(name) for name in names]
    if not all(isinstance(column, list) and len(column) == num_tests for column in columns):
        raise SandboxError("the sandbox's reply does not have one result per test")
    return [
        Result(bool(passed), float(seconds), str(reason), bool(unsupported))
        for passed, seconds, reason, unsupported in zip(*columns, strict=True)
    ]

"""The sandbox of another machine: the same calls as sandbox.Sandbox, over HTTP to `postgrad sandbox` or to a Sandbox Fusion server."""

from collections.abc import Sequence
from typing import Any

from postgrad.sandbox.fusion import RUN_CODE, FusionSandbox
from postgrad.sandbox.http_client import reason_in
from postgrad.sandbox.outcome import Limits, Result, SandboxError


def remote_sandbox(
    url: str, token: str = "", limits: Limits | None = None, patience_s: float = 30.0
) -> FusionSandbox:
    """The client for an address: one that ends in /run_code is a Sandbox Fusion server's, any other that of `postgrad sandbox`.

    Raises:
        ConfigError: it is no address.
    """
    return (FusionSandbox if url.rstrip("/").endswith(RUN_CODE) else RemoteSandbox)(
        url, token, limits, patience_s
    )


class RemoteSandbox(FusionSandbox):
    """Asks the `postgrad sandbox` at `url`, which answers /run_code as Fusion does and has routes of its own for tests."""

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
        return self._ask("/test_program", body, total_s)

    def test_stdio(
        self, program: str, tests: Sequence[dict[str, str]], total_s: float = 60.0
    ) -> list[Result]:
        return self._ask("/test_program_stdio", {"program": program, "tests": list(tests)}, total_s)

    def _ask(self, path: str, body: dict[str, Any], total_s: float) -> list[Result]:
        status, answer = self.line.ask(
            path, body | {"max_execution_time": self.limits.time_s}, total_s
        )
        if status == 422:
            return [Result(False, reason=reason_in(answer), unsupported=True)]
        if status in (404, 405):
            raise self.line.silent(
                f"{status}, no POST {path} there; a Sandbox Fusion server's address ends in {RUN_CODE}"
            )
        if status != 200:
            raise self.line.silent(f"{status} {reason_in(answer)}")
        return _results(answer, len(body["tests"]))


def _results(answer: dict[str, Any], num_tests: int) -> list[Result]:
    results, runtimes, reasons = (answer.get(name) for name in ("results", "runtimes", "reasons"))
    if not isinstance(results, list) or len(results) != num_tests or not isinstance(runtimes, list):
        raise SandboxError("the sandbox's answer has not one result for each test")
    reasons = reasons if isinstance(reasons, list) else [""] * num_tests
    return [
        Result(bool(r), float(s), str(why))
        for r, s, why in zip(results, runtimes, reasons, strict=True)
    ]

"""The sandbox over HTTP: run programs against tests for clients elsewhere. JSON in, JSON out; nothing is ever unpickled.

    GET  /health               {"status": "healthy"}
    POST /test_program         {"program", "tests": [asserts], "max_execution_time": 1.0}
    POST /test_program_stdio   {"program", "tests": [{"input", "output"}], "max_execution_time": 1.0}
    POST /run_code             {"code", "language": "python", "stdin", "run_timeout", "memory_limit_MB"}: Sandbox Fusion's

/run_code answers as Sandbox Fusion does, the other two {"results": [0|1], "runtimes": [seconds, or -1.0], "reasons": [text]}. `tests` may
also be a JSON text of the list. 400: the request cannot be read · 401: the token is wrong · 408: it came too slowly · 413: too large ·
422: a test cannot be put to a program, or /run_code is asked for what there is not · 429: all places are taken · 500: the sandbox
failed · 503: shutting down.
"""

import asyncio
import base64
import contextlib
import hmac
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from postgrad.sandbox.local import Sandbox
from postgrad.sandbox.outcome import Limits, Result, SandboxError
from postgrad.web import Bad, has_token, read_json, settle

MAX_BODY = 16 << 20  # bytes
BODY_S = 60.0  # for a request's body to arrive
MAX_PROGRAM = 1 << 20  # characters
MAX_TESTS = 1000
MAX_TIME_S = 60.0  # of one test
MAX_TOTAL_S = 300.0  # of one request


class Workers:
    """Threads that run jobs, and a queue of limited length before them. They end with the process, whatever they are at."""

    def __init__(self, num: int, waiting: int) -> None:
        self.jobs: queue.Queue[
            tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]]
        ] = queue.Queue()
        self.places = num + waiting
        self.taken = 0  # running and waiting; touched by the event loop only
        self.closed = False
        for _ in range(num):
            threading.Thread(target=self._work, daemon=True).start()

    async def run(self, job: Callable[[], Any]) -> Any:
        """The job's result, once a thread has got to it.

        Raises:
            Bad: there is no place left, or the server is going down.
        """
        if self.closed:
            raise Bad(503, "the sandbox is shutting down")
        if self.taken >= self.places:
            raise Bad(429, f"all {self.places} places are taken; try again later")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self.taken += 1
        try:
            self.jobs.put((loop, future, job))
            # The job goes on when its client leaves: the place is free when the thread is.
            return await asyncio.shield(future)
        finally:
            if future.done():
                self.taken -= 1
            else:
                future.add_done_callback(lambda _: self._leave())

    def _leave(self) -> None:
        self.taken -= 1

    def _work(self) -> None:
        while True:
            loop, future, job = self.jobs.get()
            try:
                result, error = job(), None
            except BaseException as raised:
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(settle, future, result, error)
            except RuntimeError:  # the loop has ended
                return


def make_app(sandbox: Sandbox, token: str = "", workers: int = 2, waiting: int = 64) -> Starlette:
    """The application. With a token, every request but /health must carry it: `_has_token` says how."""
    pool = Workers(workers, waiting)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    def endpoint(
        read: Callable[[Any], dict[str, Any]], work: Callable[[Sandbox, dict[str, Any]], Any]
    ) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                if not _has_token(request, token):
                    raise Bad(401, "this sandbox wants a token: Authorization: Bearer TOKEN")
                given = read(await read_json(request, MAX_BODY, BODY_S))
                return JSONResponse(await pool.run(lambda: work(sandbox, given)))
            except Refused as error:
                return JSONResponse({"detail": [error.detail]}, error.status)
            except Bad as error:
                headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
                return JSONResponse({"error": error.reason}, error.status, headers)
            except SandboxError as error:
                return JSONResponse({"error": str(error)}, 500)

        return answer

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        pool.closed = True

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/health", health),
            Route("/test_program", endpoint(_checked, _asserts), methods=["POST"]),
            Route("/test_program_stdio", endpoint(_checked, _stdio), methods=["POST"]),
            Route("/run_code", endpoint(_run_request, _run_code), methods=["POST"]),
        ],
    )


def _has_token(request: Request, token: str) -> bool:
    """Whether the request carries the token, as a Bearer or, since verl has no setting for one, as the password in its address
    (http://any:TOKEN@host/run_code), which its HTTP library sends as Basic."""
    if has_token(request, token):
        return True
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    try:
        password = base64.b64decode(text, validate=True).partition(b":")[2]
    except ValueError:
        return False
    return kind.lower() == "basic" and hmac.compare_digest(password, token.encode())


def _checked(given: Any) -> dict[str, Any]:
    """The request with a list of tests and a time limit, or Bad with what is wrong."""
    if not isinstance(given, dict) or not isinstance(given.get("program"), str):
        raise Bad(400, "the request must be an object with `program`, a text")
    if len(given["program"]) > MAX_PROGRAM:
        raise Bad(413, f"the program is longer than {MAX_PROGRAM} characters")
    tests = given.get("tests")
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise Bad(
                400, "`tests` is a text, but not JSON; pickled tests are not accepted"
            ) from error
    if not isinstance(tests, list) or not tests:
        raise Bad(400, "`tests` must be a list that is not empty")
    if len(tests) > MAX_TESTS:
        raise Bad(413, f"there are more than {MAX_TESTS} tests")
    seconds = given.get("max_execution_time", 1.0)
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 < seconds <= MAX_TIME_S
    ):
        raise Bad(400, f"max_execution_time must be above 0 and at most {MAX_TIME_S:g} seconds")
    texts = {name: given.get(name, "") for name in ("setup", "entry_point")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise Bad(400, "`setup` and `entry_point` must be texts")
    return texts | {"program": given["program"], "tests": tests, "seconds": float(seconds)}


def _within(sandbox: Sandbox, given: dict[str, Any]) -> tuple[Limits, float]:
    return replace(sandbox.limits, time_s=given["seconds"]), min(
        MAX_TOTAL_S, (given["seconds"] + 1.0) * len(given["tests"]) + 5.0
    )


def _asserts(sandbox: Sandbox, given: dict[str, Any]) -> dict[str, list[Any]]:
    if not all(isinstance(test, str) for test in given["tests"]):
        raise Bad(400, "`tests` must be a list of texts, each an assert or other code")
    limits, total_s = _within(sandbox, given)
    return _answer(
        sandbox.test_asserts(
            given["program"], given["tests"], given["setup"], given["entry_point"], limits, total_s
        )
    )


def _stdio(sandbox: Sandbox, given: dict[str, Any]) -> dict[str, list[Any]]:
    for test in given["tests"]:
        if not isinstance(test, dict) or not all(
            isinstance(test.get(key), str) for key in ("input", "output")
        ):
            raise Bad(
                400, "`tests` must be a list of objects with `input` and `output`, both texts"
            )
    limits, total_s = _within(sandbox, given)
    return _answer(sandbox.test_stdio(given["program"], given["tests"], limits, total_s))


def _answer(results: list[Result]) -> dict[str, list[Any]]:
    if odd := next((result for result in results if result.unsupported), None):
        raise Bad(422, odd.reason)
    return {
        "results": [int(result.passed) for result in results],
        "runtimes": [result.seconds for result in results],
        "reasons": [result.reason for result in results],
    }


# ---- Sandbox Fusion's way of asking


class Refused(Bad):
    """A field of /run_code that is refused, in the words that Fusion's own server has for it."""

    def __init__(self, field: str, kind: str, reason: str) -> None:
        super().__init__(422, reason)
        self.detail = {"type": kind, "loc": ["body", field], "msg": reason}


def _run_request(given: Any) -> dict[str, Any]:
    """The request with all that is wanted of it, or Refused with the first field that is wrong."""
    if not isinstance(given, dict):
        raise Bad(400, "the request must be an object with `code` and `language`")
    for field in ("code", "language"):
        if field not in given:
            raise Refused(field, "missing", "Field required")
        if not isinstance(given[field], str):
            raise Refused(field, "string_type", "Input should be a valid string")
    if given["language"] != "python":
        raise Refused("language", "literal_error", "Input should be 'python'")
    if len(given["code"]) > MAX_PROGRAM:
        raise Bad(413, f"the program is longer than {MAX_PROGRAM} characters")
    stdin, seconds, memory_mb = (
        given.get("stdin"),
        given.get("run_timeout", 10.0),
        given.get("memory_limit_MB", -1),
    )
    if stdin is not None and not isinstance(stdin, str):
        raise Refused("stdin", "string_type", "Input should be a valid string")
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, int | float)
        or not 0 < seconds <= MAX_TIME_S
    ):
        raise Refused(
            "run_timeout",
            "value_error",
            f"Input should be above 0 and at most {MAX_TIME_S:g} seconds",
        )
    if isinstance(memory_mb, bool) or not isinstance(memory_mb, int):
        raise Refused("memory_limit_MB", "int_type", "Input should be a valid integer")
    for field in ("files", "fetch_files"):
        if given.get(field):
            raise Refused(
                field,
                "value_error",
                "this sandbox takes no files; for asserts leave /run_code off its address",
            )
    return {
        "code": given["code"],
        "stdin": stdin or "",
        "seconds": float(seconds),
        "memory_mb": memory_mb,
    }


def _run_code(sandbox: Sandbox, given: dict[str, Any]) -> dict[str, Any]:
    """Run the program; the memory asked for counts up to the server's own limit, and none is asked for by -1."""
    memory_mb = (
        min(given["memory_mb"], sandbox.limits.memory_mb)
        if given["memory_mb"] > 0
        else sandbox.limits.memory_mb
    )
    limits = replace(sandbox.limits, time_s=given["seconds"], memory_mb=memory_mb)
    answer: dict[str, Any] = {
        "compile_result": None,
        "run_result": None,
        "executor_pod_name": None,
        "files": {},
    }
    try:
        outcome = sandbox.run(given["code"], given["stdin"], limits)
    except SandboxError as error:
        return {"status": "SandboxError", "message": str(error)} | answer
    code = outcome.code or int(bool(outcome.stopped))
    late = outcome.stopped == "time"
    result = {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": outcome.seconds,
    }
    result |= {
        "return_code": None if late else code,
        "stdout": outcome.output,
        "stderr": outcome.errors,
    }
    return (
        {"status": "Failed" if code else "Success", "message": ""} | answer | {"run_result": result}
    )

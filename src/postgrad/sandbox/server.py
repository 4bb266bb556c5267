"""The sandbox over HTTP, for clients on other machines. JSON in, JSON out; nothing is unpickled.

    GET  /health              {"status": "healthy"}
    POST /test_program        {"program", "tests": [asserts], "setup", "entry_point",
                               "max_execution_time": 1.0}
    POST /test_program_stdio  {"program", "tests": [{"input", "output"}], "max_execution_time": 1.0}
    POST /run_code            {"code", "language": "python", "stdin", "run_timeout",
                               "memory_limit_MB"}, as Sandbox Fusion has it

/run_code replies as Sandbox Fusion does, the other two with
{"results": [0 or 1], "runtimes": [seconds, or -1.0], "reasons": [text], "unsupported": [bool]}; a
test that is unsupported cannot be run this way. `tests` may also be a JSON text of the list.

Statuses: 400 the request is malformed; 401 the token is wrong; 403 it comes from another site, or
the host name is unknown; 408 it arrives too slowly; 413 it is too large; 422 /run_code lacks what
is asked for; 429 the queue is full; 500 the sandbox failed; 503 the server is shutting down.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from postgrad.net.bodies import HttpError, read_json
from postgrad.net.guard import Guard, basic_password, bearer_token
from postgrad.net.server import settle, unless_disconnected
from postgrad.sandbox.cancellation import Cancellation, current
from postgrad.sandbox.local import Sandbox
from postgrad.sandbox.outcome import Limits, Result, SandboxError
from postgrad.sandbox.request_models import (
    AssertsRequest,
    InvalidField,
    Model,
    RunCodeRequest,
    StdioRequest,
    TestsRequest,
    parse_request,
)

MAX_BODY = 16 << 20  # bytes
BODY_S = 60.0  # for a request's body to arrive
MAX_TOTAL_S = 300.0  # for the tests of one request


@dataclass(frozen=True)
class Job:
    """A function to run in a thread, and the future that gets its result."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    cancellation: Cancellation


class WorkerThreads:
    """Threads that run jobs, with a bounded queue. They are daemons: they end with the process."""

    def __init__(self, num_threads: int, queue_size: int) -> None:
        self.jobs: queue.Queue[Job] = queue.Queue()
        self.capacity = num_threads + queue_size
        self.num_jobs = 0  # running and queued; only the event loop changes it
        self.closed = False
        for _ in range(num_threads):
            threading.Thread(target=self._work, daemon=True).start()

    async def run(self, function: Callable[[], Any]) -> Any:
        """Run the function in a thread and return its result.

        When the caller is cancelled, a job in the queue is dropped, and the sandboxes of one that
        runs are killed; it counts until its thread is free.

        Raises:
            HttpError: the queue is full, or the server is shutting down.
        """
        if self.closed:
            raise HttpError(503, "the sandbox is shutting down")
        if self.num_jobs >= self.capacity:
            raise HttpError(429, f"{self.capacity} requests are running or queued; try again later")
        loop = asyncio.get_running_loop()
        job = Job(function, loop, loop.create_future(), Cancellation())
        self.num_jobs += 1
        job.future.add_done_callback(lambda _: self._finish_job())
        self.jobs.put(job)
        try:
            return await asyncio.shield(job.future)
        except asyncio.CancelledError:
            if not job.cancellation.cancel():
                job.future.cancel()
            raise

    def _finish_job(self) -> None:
        self.num_jobs -= 1

    def _work(self) -> None:
        while True:
            job = self.jobs.get()
            if not job.cancellation.begin():
                continue
            current.set(job.cancellation)
            result = None
            error: BaseException | None = None
            try:
                result = job.function()
            except BaseException as raised:
                error = raised
            try:
                job.loop.call_soon_threadsafe(settle, job.future, result, error)
            except RuntimeError:  # the event loop has ended
                return


def make_app(
    sandbox: Sandbox,
    token: str = "",
    workers: int = 2,
    waiting: int = 64,
    host: str = "127.0.0.1",
) -> Starlette:
    """Return the application for a server that listens on `host`.

    With a token, every request except /health must have it. Pages of other sites are rejected.
    """
    threads = WorkerThreads(workers, waiting)

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"status": "healthy"})

    def endpoint(
        model: type[Model], invalid_status: int, work: Callable[[Sandbox, Model], Any]
    ) -> Callable[[HttpRequest], Any]:
        async def respond(http_request: HttpRequest) -> Response:
            try:
                body = await read_json(http_request, MAX_BODY, BODY_S)
                request = parse_request(model, body, invalid_status)
                running = threads.run(lambda: work(sandbox, request))
                return JSONResponse(await unless_disconnected(http_request, running))
            except HttpError as error:
                return _error_response(error)
            except SandboxError as error:
                return JSONResponse({"error": str(error)}, 500)

        return respond

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        threads.closed = True

    # verl has no setting for a token, but can send a password in the address.
    guard = Middleware(Guard, host, token, credentials=(bearer_token, basic_password))
    endpoints = {
        "/test_program": endpoint(AssertsRequest, 400, _test_asserts),
        "/test_program_stdio": endpoint(StdioRequest, 400, _test_stdio),
        "/run_code": endpoint(RunCodeRequest, 422, _run_code),
    }
    routes = [
        Route(path, function, methods=["POST"], middleware=[guard])
        for path, function in endpoints.items()
    ]
    return Starlette(lifespan=lifespan, routes=[Route("/health", health), *routes])


def _error_response(error: HttpError) -> Response:
    body: dict[str, Any] = {"error": error.reason}
    if isinstance(error, InvalidField):
        body["detail"] = [error.detail]
    headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
    return JSONResponse(body, error.status, headers)


def _test_limits(sandbox: Sandbox, request: TestsRequest, num_tests: int) -> tuple[Limits, float]:
    """Return the limits of one test and the time for all tests in seconds."""
    time_s = request.max_execution_time
    total_s = min(MAX_TOTAL_S, (time_s + 1.0) * num_tests + 5.0)
    return replace(sandbox.limits, time_s=time_s), total_s


def _test_asserts(sandbox: Sandbox, request: AssertsRequest) -> dict[str, list[Any]]:
    limits, total_s = _test_limits(sandbox, request, len(request.tests))
    results = sandbox.test_asserts(
        request.program, request.tests, request.setup, request.entry_point, limits, total_s
    )
    return _results_reply(results)


def _test_stdio(sandbox: Sandbox, request: StdioRequest) -> dict[str, list[Any]]:
    limits, total_s = _test_limits(sandbox, request, len(request.tests))
    tests = [{"input": test.input, "output": test.output} for test in request.tests]
    return _results_reply(sandbox.test_stdio(request.program, tests, limits, total_s))


def _results_reply(results: list[Result]) -> dict[str, list[Any]]:
    return {
        "results": [int(result.passed) for result in results],
        "runtimes": [result.seconds for result in results],
        "reasons": [result.reason for result in results],
        "unsupported": [result.unsupported for result in results],
    }


def _run_code(sandbox: Sandbox, request: RunCodeRequest) -> dict[str, Any]:
    """Run the program; its memory limit is the requested one, at most the server's own."""
    memory_mb = sandbox.limits.memory_mb
    if request.memory_limit_MB > 0:
        memory_mb = min(request.memory_limit_MB, memory_mb)
    limits = replace(sandbox.limits, time_s=request.run_timeout, memory_mb=memory_mb)
    reply: dict[str, Any] = {
        "status": "SandboxError",
        "message": "",
        "compile_result": None,
        "run_result": None,
        "executor_pod_name": None,
        "files": {},
    }
    try:
        outcome = sandbox.run(request.code, request.stdin or "", limits)
    except SandboxError as error:
        return reply | {"message": str(error)}
    is_late = outcome.stopped == "time"
    code = outcome.code or int(bool(outcome.stopped))
    reply["status"] = "Failed" if code else "Success"
    reply["run_result"] = {
        "status": "TimeLimitExceeded" if is_late else "Finished",
        "execution_time": outcome.seconds,
        "return_code": None if is_late else code,
        "stdout": outcome.output,
        "stderr": outcome.errors,
    }
    return reply

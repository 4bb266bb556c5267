"""The sandbox over HTTP: run programs against tests for clients elsewhere. JSON in, JSON out; nothing is ever unpickled.

    GET  /health               {"status": "healthy"}
    POST /test_program         {"program", "tests": [asserts], "max_execution_time": 1.0}
    POST /test_program_stdio   {"program", "tests": [{"input", "output"}], "max_execution_time": 1.0}

Both answer {"results": [0|1], "runtimes": [seconds, or -1.0], "reasons": [text]}. `tests` may also be a JSON text of the list. 400: the
request cannot be read · 401: the token is wrong · 408: it came too slowly · 413: too large · 422: a test cannot be put to a program ·
429: all places are taken · 500: the sandbox failed · 503: shutting down.
"""

import asyncio
import contextlib
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

from postgrad.rewards.outcome import Limits, Result, SandboxError
from postgrad.rewards.sandbox import Sandbox
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
        self.jobs: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]]] = queue.Queue()
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
    """The application. With a token, every request but /health must carry it as `Authorization: Bearer TOKEN`."""
    pool = Workers(workers, waiting)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    def endpoint(test: Callable[[Sandbox, dict[str, Any]], list[Result]]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                if not has_token(request, token):
                    raise Bad(401, "this sandbox wants a token: Authorization: Bearer TOKEN")
                given = _checked(await read_json(request, MAX_BODY, BODY_S))
                results = await pool.run(lambda: test(sandbox, given))
                if odd := next((result for result in results if result.unsupported), None):
                    raise Bad(422, odd.reason)
            except Bad as error:
                headers = {"Retry-After": "1"} if error.status in (429, 503) else {}
                return JSONResponse({"error": error.reason}, error.status, headers)
            except SandboxError as error:
                return JSONResponse({"error": str(error)}, 500)
            return JSONResponse(_answer(results))

        return answer

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        pool.closed = True

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/health", health),
            Route("/test_program", endpoint(_asserts), methods=["POST"]),
            Route("/test_program_stdio", endpoint(_stdio), methods=["POST"]),
        ],
    )


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
            raise Bad(400, "`tests` is a text, but not JSON; pickled tests are not accepted") from error
    if not isinstance(tests, list) or not tests:
        raise Bad(400, "`tests` must be a list that is not empty")
    if len(tests) > MAX_TESTS:
        raise Bad(413, f"there are more than {MAX_TESTS} tests")
    seconds = given.get("max_execution_time", 1.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_TIME_S:
        raise Bad(400, f"max_execution_time must be above 0 and at most {MAX_TIME_S:g} seconds")
    texts = {name: given.get(name, "") for name in ("setup", "entry_point")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise Bad(400, "`setup` and `entry_point` must be texts")
    return texts | {"program": given["program"], "tests": tests, "seconds": float(seconds)}


def _within(sandbox: Sandbox, given: dict[str, Any]) -> tuple[Limits, float]:
    return replace(sandbox.limits, time_s=given["seconds"]), min(MAX_TOTAL_S, (given["seconds"] + 1.0) * len(given["tests"]) + 5.0)


def _asserts(sandbox: Sandbox, given: dict[str, Any]) -> list[Result]:
    if not all(isinstance(test, str) for test in given["tests"]):
        raise Bad(400, "`tests` must be a list of texts, each an assert or other code")
    limits, total_s = _within(sandbox, given)
    return sandbox.test_asserts(given["program"], given["tests"], given["setup"], given["entry_point"], limits, total_s)


def _stdio(sandbox: Sandbox, given: dict[str, Any]) -> list[Result]:
    for test in given["tests"]:
        if not isinstance(test, dict) or not all(isinstance(test.get(key), str) for key in ("input", "output")):
            raise Bad(400, "`tests` must be a list of objects with `input` and `output`, both texts")
    limits, total_s = _within(sandbox, given)
    return sandbox.test_stdio(given["program"], given["tests"], limits, total_s)


def _answer(results: list[Result]) -> dict[str, list[Any]]:
    return {
        "results": [int(result.passed) for result in results],
        "runtimes": [result.seconds for result in results],
        "reasons": [result.reason for result in results],
    }

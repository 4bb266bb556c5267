"""The page's server: read-only JSON requests, two live streams, and the page's files."""

import asyncio
import json
import math
import mimetypes
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import uvicorn
from pyarrow.lib import ArrowException
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from postgrad.evaluation.pivot import METRICS
from postgrad.net import server as net_server
from postgrad.net.guard import is_loopback
from postgrad.view.auth import NO_PAGE, PageGuard
from postgrad.view.evaluations import Evaluations
from postgrad.view.folder import Folder, NotFound
from postgrad.view.reader import Unreadable
from postgrad.view.rollouts import FILTERS, SORTS, Rollouts
from postgrad.view.runs import Run, Runs

ASSETS = Path(__file__).parent / "assets"
POLL_S = 0.5  # time between two looks of a stream at the files
MAX_COMPARED = 12  # runs
MAX_CONNECTIONS = 200
GRACE_S = 3  # for running requests when the server stops
MAX_QUERY = 200  # characters
JSON = "application/json"

Argument = Callable[[QueryParams], Any]  # reads one argument of a request
Endpoint = Callable[[Request], Response]


class BadRequest(Exception):
    """A request with a wrong parameter; the server answers 400 with this message."""


class Page:
    """The responses to all requests of the page.

    Args:
        folder: the folder that the page may read.
        is_stopping: whether the server is shutting down; streams then end.
    """

    def __init__(self, folder: Folder, is_stopping: Callable[[], bool] = lambda: False) -> None:
        self.folder = folder
        self.is_stopping = is_stopping
        self.runs = Runs(folder)
        self.rollouts = Rollouts()
        self.evaluations = Evaluations(folder)

    def routes(self) -> list[Route]:
        """Return the page, its files, the stream, and the requests for JSON."""
        return [
            Route("/", self.index),
            Route("/assets/{name}", self.asset),
            Route("/api/live", self.live),
            *(Route(f"/api/{name}", endpoint) for name, endpoint in self.requests().items()),
        ]

    def requests(self) -> dict[str, Endpoint]:
        """Return the requests for JSON: what answers each, and how its arguments are read."""
        rollouts = self.rollouts
        evaluations = self.evaluations
        name = _text("run")
        step = _integer("step")
        start = _integer("start", 0)
        search = _text("search", "", MAX_QUERY)
        of_evaluation = (_text("eval"), _text("set"))
        shown = (_text("filter", "all"), search, start)
        rows = (_one_of("filter", FILTERS), _one_of("sort", SORTS), search, start)

        def run(query: QueryParams) -> Run:
            return self.runs.get(name(query))

        return {
            "about": _endpoint(lambda: {"folder": str(self.folder.root)}),
            "runs": _endpoint(self.all_runs),
            "run": _endpoint(self.one_run, run),
            "metrics": _endpoint(self.metrics, name),
            "compare": _endpoint(self.compare, lambda query: query.getlist("run")),
            "groups": _endpoint(rollouts.groups, run, step, *rows),
            "group": _endpoint(rollouts.group, run, step, _integer("group"), _flag("full")),
            "picture": _endpoint(self.picture, _text("folder"), _text("key")),
            "problem": _endpoint(rollouts.problem, run, _text("uid")),
            "search": _endpoint(rollouts.search, run, _text("search", None, MAX_QUERY), start),
            "evaluations": _endpoint(evaluations.all),
            "pivot": _endpoint(evaluations.pivot, _one_of("metric", METRICS)),
            "responses": _endpoint(evaluations.responses, *of_evaluation, *shown),
            "pairs": _endpoint(evaluations.pairs, _text("a"), _text("b"), _text("set"), *shown),
            "response": _endpoint(evaluations.response, *of_evaluation, _text("uid")),
            "entropies": _endpoint(evaluations.entropies),
        }

    async def index(self, _: Request) -> Response:
        """Return the HTML page."""
        return Response((ASSETS / "index.html").read_bytes(), media_type="text/html; charset=utf-8")

    async def asset(self, request: Request) -> Response:
        """Return a file of the assets folder."""
        name = request.path_params["name"]
        if name not in {path.name for path in ASSETS.iterdir()}:
            return PlainTextResponse("not found", 404)
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        if name.endswith(".js"):
            media_type = "text/javascript"
        return Response((ASSETS / name).read_bytes(), media_type=media_type)

    def all_runs(self) -> dict[str, Any]:
        """Return the overviews of all runs."""
        return {"runs": self.runs.all()}

    def one_run(self, run: Run) -> dict[str, Any]:
        """One run: overview, events, settings, steps with rollouts, evaluations."""
        evaluations = self.evaluations.all()["evaluations"]
        return {
            **self._status(run.name),
            "config": self.runs.compare_settings([run.name])["values"][run.name],
            "evaluations": [one for one in evaluations if one["run"] == run.name],
        }

    def picture(self, name: str, key: str) -> Response:
        """Return a picture of a folder; the header against sniffing is that of every response."""
        picture = self.folder.picture(name, key)
        return Response(picture.data, media_type=f"image/{picture.kind}")

    def metrics(self, name: str) -> Response:
        """All metrics of one run."""
        return Response(self.runs.metrics(name).json(), media_type=JSON)

    def compare(self, names: list[str]) -> dict[str, Any]:
        """Return the settings and overviews of several runs."""
        if len(names) > MAX_COMPARED:
            raise BadRequest(f"Select at most {MAX_COMPARED} runs; {len(names)} are selected.")
        overviews = [self.runs.overview(name) for name in names]
        return self.runs.compare_settings(names) | {"overviews": overviews}

    # Live streams

    async def live(self, request: Request) -> Response:
        """Server-sent events: new metrics and state of one run, or without a run the list."""
        query = request.query_params
        name = query.get("run")
        start = _integer("from", 0)(query)
        generation = _integer("generation", 0)(query)
        if name is None:
            stream = self._stream_list(request)
        else:
            await run_in_threadpool(self.runs.get, name)
            stream = self._stream_run(request, name, start, generation)
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def _stream_list(self, request: Request) -> AsyncIterator[str]:
        last = ""
        while not (self.is_stopping() or await request.is_disconnected()):
            runs = dump_json(await run_in_threadpool(self.all_runs))
            yield format_event("runs", runs) if runs != last else KEEP_ALIVE
            last = runs
            await asyncio.sleep(POLL_S)

    async def _stream_run(
        self, request: Request, name: str, start: int, generation: int
    ) -> AsyncIterator[str]:
        last = ""
        while not (self.is_stopping() or await request.is_disconnected()):
            try:
                metrics = await run_in_threadpool(self.runs.metrics, name)
                status = dump_json(await run_in_threadpool(self._status, name))
            except Unreadable as error:
                yield format_event("ended", dump_json({"reason": str(error)}))
                return
            except (NotFound, OSError):
                yield format_event("ended", dump_json({"reason": "The run folder was deleted."}))
                return
            if metrics.generation != generation:
                start = 0
                generation = metrics.generation
            if metrics.num_lines > start:
                end = metrics.num_lines
                yield format_event("metrics", metrics.json(start))
                start = end
            yield format_event("status", status) if status != last else KEEP_ALIVE
            last = status
            await asyncio.sleep(POLL_S)

    def _status(self, name: str) -> dict[str, Any]:
        run = self.runs.get(name)
        return {
            "overview": self.runs.overview(name),
            "events": run.events(),
            "steps": self.rollouts.steps(run),
        }


def make_server(
    folder: Folder, host: str = "127.0.0.1", token: str = "", framed_by: str = NO_PAGE
) -> uvicorn.Server:
    """Return the server, to be run on a listening socket. Open streams end when it stops.

    Args:
        folder: the folder that the page may read.
        host: the host name that requests may use.
        token: may be empty on loopback only.
        framed_by: pages that may show this one in a frame.
    """
    if not token and not is_loopback(host):
        raise ValueError(f"{host} is not loopback: a token is needed")
    page = Page(folder, lambda: server.should_exit)
    middleware = [
        Middleware(PageGuard, host=host, token=token, framed_by=framed_by),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3),
    ]
    app = Starlette(
        routes=page.routes(), middleware=middleware, exception_handlers=_error_handlers()
    )
    server = net_server.make_server(app, grace_s=GRACE_S, connections=MAX_CONNECTIONS)
    return server


def _endpoint(answer: Callable[..., Any], *arguments: Argument) -> Endpoint:
    """Return the endpoint of a function that returns a Response or a value for JSON."""

    def endpoint(request: Request) -> Response:
        result = answer(*(read(request.query_params) for read in arguments))
        if isinstance(result, Response):
            return result
        return Response(dump_json(result), media_type=JSON)

    return endpoint


def _error_handlers() -> dict[Any, Any]:
    """Return what is answered to each kind of error, as {"error": reason}."""

    def answer(status: int, reason_of: Callable[[Any], str]) -> Callable[..., Response]:
        return lambda request, error: JSONResponse({"error": reason_of(error)}, status)

    unread = "a file could not be read"
    no_parquet = "it is not a parquet file, or not a complete one"
    return {
        NotFound: answer(404, lambda error: "not found"),
        BadRequest: answer(400, str),
        Unreadable: answer(503, lambda error: f"{error.file} cannot be read: {error.why}"),
        OSError: answer(503, lambda e: f"{unread}: {e.strerror or type(e).__name__}"),
        ArrowException: answer(503, lambda error: f"{unread}: {no_parquet}"),
    }


def dump_json(value: Any) -> str:
    """JSON that every browser reads: NaN and infinity become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_replace_nonfinite(value), allow_nan=False, separators=(",", ":"))


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


KEEP_ALIVE = ": keep-alive\n\n"


def format_event(name: str, data: str) -> str:
    """One server-sent event."""
    return f"event: {name}\ndata: {data}\n\n"


# ---- how arguments are read


def _text(name: str, default: str | None = None, limit: int | None = None) -> Argument:
    """Return what reads a text of at most `limit` characters; it is required without a default."""

    def read(query: QueryParams) -> str:
        value = query.get(name) or default
        if value is None:
            raise BadRequest(f"the parameter {name} is missing")
        return value[:limit]

    return read


def _integer(name: str, default: int | None = None) -> Argument:
    def read(query: QueryParams) -> int:
        value = query.get(name)
        if value is None and default is not None:
            return default
        try:
            return int(value or "")
        except ValueError as error:
            raise BadRequest(f"{name}={value or ''} is not an integer") from error

    return read


def _flag(name: str) -> Argument:
    return lambda query: query.get(name) == "1"


def _one_of(name: str, known: Collection[str]) -> Argument:
    """Return what reads one of the known names; the first is the default."""

    def read(query: QueryParams) -> str:
        value = query.get(name) or next(iter(known))
        if value not in known:
            raise BadRequest(f"{name}={value} is unknown; use one of {', '.join(known)}")
        return value

    return read

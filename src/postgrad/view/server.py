"""The page's server: a few read-only JSON answers, two live streams, the assets. Guarded at the door."""

import asyncio
import hmac
import json
import math
import mimetypes
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvicorn
from pyarrow.lib import ArrowException
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from postgrad.view import rollouts as rollout_files
from postgrad.view.evaluations import Evaluations
from postgrad.view.folder import Folder, NotFound
from postgrad.view.rollouts import Rollouts
from postgrad.view.runs import Runs
from postgrad.view.tokens import Tokens
from postgrad.web import is_loopback, reject_reason

ASSETS = Path(__file__).parent / "assets"
COOKIE = "postgrad_token"
POLL_S = 0.5  # how often a stream looks at the files
MOST_COMPARED = 12
# Model output is hostile: nothing but our own files runs, no markup is made from strings, nobody frames the page.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Bad(Exception):
    """A question that makes no sense; the page answers 400 with the sentence."""


class Guard:
    """Lets in requests for this host, from this page, with the token if there is one; reading only."""

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self.app, self.host, self.token = app, host, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        answer = self.refusal(request) or self.welcome(request)
        await (answer or self.app)(scope, receive, send_with_headers)

    def refusal(self, request: Request) -> Response | None:
        """None, or why not: an unknown host name (a site that points its name here), another origin, a writing method."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads", 405)
        opened = request.headers.get("sec-fetch-mode") == "navigate" and request.url.path == "/"
        reason = reject_reason(request, self.host, opened)
        return PlainTextResponse(reason, 403) if reason else None

    def welcome(self, request: Request) -> Response | None:
        """None with the right token; the first visit brings it in the address and leaves with a cookie."""
        if not self.token:
            return None
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/" and self.is_right(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(self.cookie(request), self.token, httponly=True, samesite="strict")
            return answer
        header = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.is_right(request.cookies.get(self.cookie(request), "")) or self.is_right(header):
            return None
        return PlainTextResponse(
            "a token is needed: open the address that postgrad view printed\n", 401
        )

    def cookie(self, request: Request) -> str:
        """Cookies do not know ports; two pages on one machine must not take each other's."""
        return f"{COOKIE}_{request.url.port or 80}"

    def is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


class Page:
    """The answers."""

    def __init__(self, folder: Folder, stopping: Callable[[], bool] = lambda: False) -> None:
        self.stopping = stopping
        self.folder, self.runs, self.rollouts, self.tokens = (
            folder,
            Runs(folder),
            Rollouts(),
            Tokens(),
        )
        self.evaluations = Evaluations(folder)

    def routes(self) -> list[Route]:
        answers: dict[str, Callable[[Request], Any]] = {
            "about": lambda _: {"folder": str(self.folder.root)},
            "runs": self.all_runs,
            "run": self.one_run,
            "metrics": self.metrics,
            "compare": self.compare,
            "groups": self.groups,
            "group": self.group,
            "follow": self.follow,
            "search": self.search,
            "evaluations": lambda _: self.evaluations.all(),
            "responses": self.responses,
            "pairs": self.pairs,
            "response": self.response,
            "entropies": lambda _: self.evaluations.entropies(),
        }
        return [
            Route("/", self.index),
            Route("/assets/{name}", self.asset),
            Route("/api/live", self.live),
            *(Route(f"/api/{name}", _answer(ask)) for name, ask in answers.items()),
        ]

    async def index(self, _: Request) -> Response:
        return Response((ASSETS / "index.html").read_bytes(), media_type="text/html; charset=utf-8")

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in {path.name for path in ASSETS.iterdir()}:
            return PlainTextResponse("not found", 404)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(
            (ASSETS / name).read_bytes(),
            media_type="text/javascript" if name.endswith(".js") else kind,
        )

    # ---- runs

    def all_runs(self, _: Request) -> Any:
        return {"runs": self.runs.all()}

    def one_run(self, request: Request) -> Any:
        name = _text(request, "run")
        run = self.runs.get(name)
        steps = self.rollouts.steps(run)
        return {
            "overview": self.runs.overview(name),
            "events": run.events(),
            "config": self.runs.differences([name])["values"][name],
            "steps": steps,
            "evaluations": [e for e in self.evaluations.all()["evaluations"] if e["run"] == name],
        }

    def metrics(self, request: Request) -> Any:
        return Response(
            self.runs.metrics(_text(request, "run")).json(), media_type="application/json"
        )

    def compare(self, request: Request) -> Any:
        names = request.query_params.getlist("run")[:MOST_COMPARED]
        return self.runs.differences(names) | {
            "overviews": [self.runs.overview(name) for name in names]
        }

    # ---- rollouts

    def groups(self, request: Request) -> Any:
        run = self.runs.get(_text(request, "run"))
        keep = _one_of(request, "keep", rollout_files.FILTERS)
        sort = _one_of(request, "sort", rollout_files.SORTS)
        start, search = _whole(request, "start", 0), request.query_params.get("search", "")[:200]
        return self.rollouts.groups(
            run, _whole(request, "step"), keep, sort, search, start, 40, self.tokens.of(run)
        )

    def group(self, request: Request) -> Any:
        run = self.runs.get(_text(request, "run"))
        full = request.query_params.get("full") == "1"
        return self.rollouts.group(
            run, _whole(request, "step"), _whole(request, "group"), self.tokens.of(run), full
        )

    def follow(self, request: Request) -> Any:
        return self.rollouts.follow(self.runs.get(_text(request, "run")), _text(request, "uid"))

    def search(self, request: Request) -> Any:
        run = self.runs.get(_text(request, "run"))
        return self.rollouts.search(run, _text(request, "words")[:200], _whole(request, "start", 0))

    # ---- evaluations

    def responses(self, request: Request) -> Any:
        keep, search = (
            request.query_params.get("keep", "all"),
            request.query_params.get("search", "")[:200],
        )
        return self.evaluations.responses(
            _text(request, "eval"), _text(request, "set"), keep, search, _whole(request, "start", 0)
        )

    def pairs(self, request: Request) -> Any:
        a, b, name = _text(request, "a"), _text(request, "b"), _text(request, "set")
        keep, search = (
            request.query_params.get("keep", "all"),
            request.query_params.get("search", "")[:200],
        )
        return self.evaluations.pairs(a, b, name, keep, search, _whole(request, "start", 0))

    def response(self, request: Request) -> Any:
        return self.evaluations.response(
            _text(request, "eval"), _text(request, "set"), _text(request, "uid")
        )

    # ---- live

    async def live(self, request: Request) -> Response:
        """Server-sent events: of one run its new metric lines and its state, without a run the list."""
        name = request.query_params.get("run")
        if name is not None:
            try:
                await run_in_threadpool(self.runs.get, name)
            except NotFound:
                return PlainTextResponse("not found", 404)
        start, generation = _whole(request, "from", 0), _whole(request, "generation", 0)
        stream = (
            self.live_list(request)
            if name is None
            else self.live_run(request, name, start, generation)
        )
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    async def live_list(self, request: Request) -> AsyncIterator[str]:
        before = ""
        while not (self.stopping() or await request.is_disconnected()):
            now = dump(await run_in_threadpool(self.all_runs, request))
            yield event("runs", now) if now != before else ": still here\n\n"
            before = now
            await asyncio.sleep(POLL_S)

    async def live_run(
        self, request: Request, name: str, start: int, generation: int
    ) -> AsyncIterator[str]:
        before = ""
        while not (self.stopping() or await request.is_disconnected()):
            try:
                metrics = await run_in_threadpool(self.runs.metrics, name)
                now = dump(await run_in_threadpool(self._status, name))
            except (NotFound, OSError):
                yield event("gone", "{}")
                return
            if metrics.generation != generation:
                start, generation = 0, metrics.generation
            if metrics.num_lines > start:
                count = metrics.num_lines
                yield event("metrics", metrics.json(start))
                start = count
            yield event("status", now) if now != before else ": still here\n\n"
            before = now
            await asyncio.sleep(POLL_S)

    def _status(self, name: str) -> Any:
        run = self.runs.get(name)
        return {
            "overview": self.runs.overview(name),
            "events": run.events(),
            "steps": self.rollouts.steps(run),
        }


def make_server(folder: Folder, host: str = "127.0.0.1", token: str = "") -> uvicorn.Server:
    """The server, to be run on a listening socket; `token` may be empty only on loopback. Open streams end when it stops."""
    if not token and not is_loopback(host):
        raise ValueError(f"{host} is not loopback: a token is needed")
    page = Page(folder, lambda: server.should_exit)
    layers = [
        Middleware(Guard, host=host, token=token),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3),
    ]
    app = Starlette(routes=page.routes(), middleware=layers)
    config = uvicorn.Config(
        app, log_level="warning", timeout_graceful_shutdown=3, access_log=False, server_header=False
    )
    server = uvicorn.Server(config)
    return server


def _answer(ask: Callable[[Request], Any]) -> Callable[[Request], Any]:
    def endpoint(request: Request) -> Response:
        try:
            found = ask(request)
        except NotFound:
            return JSONResponse({"error": "not found"}, 404)
        except Bad as error:
            return JSONResponse({"error": str(error)}, 400)
        except OSError as error:
            return JSONResponse(
                {"error": f"a file could not be read: {error.strerror or type(error).__name__}"},
                503,
            )
        except ArrowException:
            return JSONResponse(
                {"error": "a file could not be read: it is no parquet file, or not a whole one"},
                503,
            )
        return (
            found
            if isinstance(found, Response)
            else Response(dump(found), media_type="application/json")
        )

    return endpoint


def dump(value: Any) -> str:
    """JSON that every browser reads: no NaN, no infinity."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


def _text(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if not value:
        raise Bad(f"{name} is missing")
    return value


def _whole(request: Request, name: str, default: int | None = None) -> int:
    value = request.query_params.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value or "")
    except ValueError as error:
        raise Bad(f"{name} is not a whole number") from error


def _one_of(request: Request, name: str, known: Any) -> str:
    value = request.query_params.get(name) or next(iter(known))
    if value not in known:
        raise Bad(f"{name}={value} is unknown; known: {', '.join(known)}")
    return value

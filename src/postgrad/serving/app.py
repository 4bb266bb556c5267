"""The door: OpenAI's paths, one JSON shape for every error, and rows that are freed when their client leaves.

    GET  /health                 no token needed: models, rows in use
    GET  /v1/models              names and context lengths
    POST /v1/completions         prompt: text, token ids, or a list of either
    POST /v1/chat/completions    messages, through the model's chat template
    POST /v1/reload              {"folder": ..., "model": ...}: new weights, where the server was started with --reload-below

400 what cannot be read or served · 401 no token · 403 another host, origin or folder · 404 no such model or path · 408 a slow body ·
413 a huge one · 429 all places taken · 500 the engine failed · 503 shutting down · 504 the time limit of a request is over.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from postgrad.errors import did_you_mean
from postgrad.serving.requests import Ask, Refusal, read_ask
from postgrad.serving.responses import Choice, Reply, error_body
from postgrad.serving.served_model import Served, take_weights, weight_files
from postgrad.serving.worker import Ticket
from postgrad.web import HttpError, has_token, read_json, reject_reason

MAX_BODY = 8 << 20  # bytes
BODY_S = 30.0  # for a request's body to arrive
PIECE_S = 600.0  # for one piece of a stream to be taken


def make_app(
    models: Sequence[Served],
    host: str = "127.0.0.1",
    token: str = "",
    reload_below: Path | None = None,
    time_limit_s: float = 600.0,
) -> Starlette:
    """The application over some models. With a token every request but /health must carry it as `Authorization: Bearer TOKEN`."""
    api = Api(models, reload_below.resolve() if reload_below else None, time_limit_s)
    routes = [
        Route("/health", api.health),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{name:path}", api.one_model),
        Route(
            "/v1/completions",
            _guarded(lambda request: api.complete(request, False)),
            methods=["POST"],
        ),
        Route(
            "/v1/chat/completions",
            _guarded(lambda request: api.complete(request, True)),
            methods=["POST"],
        ),
        Route("/v1/reload", _guarded(api.reload), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _broken}
    return Starlette(
        routes=routes,
        middleware=[Middleware(AuthMiddleware, host=host, token=token)],
        exception_handlers=handlers,
    )


class AuthMiddleware:
    """Lets in requests for this host, from no other site's page, with the token if there is one."""

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self.app, self.host, self.token = app, host, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)
        answer: ASGIApp = self.app
        if reason := reject_reason(request, self.host):
            answer = _refused(Refusal(403, reason))
        elif request.url.path != "/health" and not has_token(request, self.token):
            answer = _refused(
                Refusal(
                    401,
                    "this server wants its token: Authorization: Bearer TOKEN",
                    code="invalid_api_key",
                )
            )
        await answer(scope, receive, send)


class Api:
    """The answers."""

    def __init__(
        self, models: Sequence[Served], reload_below: Path | None, time_limit_s: float
    ) -> None:
        self.models, self.reload_below, self.time_limit_s = (
            {m.name: m for m in models},
            reload_below,
            time_limit_s,
        )

    async def health(self, _: Request) -> Response:
        well = all(served.worker.alive for served in self.models.values())
        models = {
            name: {
                "rows": served.worker.rows,
                "capacity": served.worker.capacity,
                "version": served.version,
            }
            for name, served in self.models.items()
        }
        return JSONResponse(
            {"status": "healthy" if well else "broken", "models": models}, 200 if well else 503
        )

    async def list_models(self, _: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [_card(served) for served in self.models.values()]}
        )

    async def one_model(self, request: Request) -> Response:
        try:
            return JSONResponse(_card(self.find(request.path_params["name"])))
        except Refusal as error:
            return _refused(error)

    def find(self, name: str) -> Served:
        if not name and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Refusal(
                404,
                f"no model {name[:200]!r}; {did_you_mean(name[:200], self.models)}",
                "model",
                "model_not_found",
            )
        return self.models[name]

    async def complete(self, request: Request, chat: bool) -> Response:
        ask = read_ask(await read_json(request, MAX_BODY, BODY_S), chat)
        served = self.find(ask.model)
        jobs = await run_in_threadpool(served.jobs, ask)
        ticket = Ticket(jobs, ask.stream)
        reply = Reply(ask, served, [job.request.prompt for job in jobs])
        served.worker.submit(ticket)
        if ask.stream:
            return Stream(
                self.pieces(ask, served, ticket, reply), lambda: served.worker.cancel(ticket)
            )
        try:
            async with asyncio.timeout(self.time_limit_s):
                await _while_here(request, _collect(ticket, reply))
            return JSONResponse(reply.whole())
        except TimeoutError as error:
            raise Refusal(
                504, f"the answer took longer than {self.time_limit_s:g} s", code="timeout"
            ) from error
        finally:
            served.worker.cancel(ticket)

    async def pieces(
        self, ask: Ask, served: Served, ticket: Ticket, reply: Reply
    ) -> AsyncIterator[str]:
        """Server-sent events. What came while the last piece was on its way goes together into the next."""
        for piece in reply.opening():
            yield _event(piece)
        deadline = asyncio.get_running_loop().time() + self.time_limit_s
        try:
            while not reply.done:
                async with asyncio.timeout_at(deadline):
                    choices = await _fresh(ticket, reply)
                for choice in choices:
                    if piece := reply.piece(choice):
                        yield _event(piece)
        except HttpError as error:
            yield _event(error_body(error))
            return
        except TimeoutError:
            yield _event(
                error_body(
                    Refusal(
                        504, f"the answer took longer than {self.time_limit_s:g} s", code="timeout"
                    )
                )
            )
            return
        if ask.stream_usage:
            yield _event(reply.usage_piece())
        yield "data: [DONE]\n\n"

    async def reload(self, request: Request) -> Response:
        if self.reload_below is None:
            raise Refusal(403, "this server takes no new weights; start it with --reload-below DIR")
        body = await read_json(request, MAX_BODY, BODY_S)
        if (
            not isinstance(body, dict)
            or not isinstance(body.get("folder"), str)
            or not isinstance(body.get("model", ""), str)
        ):
            raise Refusal(
                400,
                "say which folder: {'folder': ...}, and 'model' where there are several",
                "folder",
            )
        served = self.find(body.get("model", ""))
        files = await run_in_threadpool(weight_files, body["folder"], self.reload_below)

        def work() -> int:
            count = take_weights(served.worker.engine.model, files)
            served.version += 1
            return count

        count = await served.worker.order(work)
        return JSONResponse(
            {
                "model": served.name,
                "folder": body["folder"],
                "num_tensors": count,
                "version": served.version,
            }
        )


class Stream(StreamingResponse):
    """Server-sent events; `freed` is called however they end."""

    def __init__(self, pieces: AsyncIterator[str], freed: Callable[[], None]) -> None:
        super().__init__(
            pieces,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self.freed = freed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Any) -> None:
            async with asyncio.timeout(PIECE_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            self.freed()


async def _collect(ticket: Ticket, reply: Reply) -> None:
    while not reply.done:
        await _fresh(ticket, reply)


async def _fresh(ticket: Ticket, reply: Reply) -> list[Choice]:
    """Wait for events; the choices that got some. Raises the HttpError that ended the request."""
    events = [await ticket.events.get()]
    while not ticket.events.empty():
        events.append(ticket.events.get_nowait())
    choices: dict[int, Choice] = {}
    for event in events:
        if isinstance(event, HttpError):
            raise event
        choice = reply.take(event)
        choices[choice.number] = choice
    return list(choices.values())


async def _while_here(request: Request, work: Any) -> None:
    """Do the work unless the client leaves first. Raises HttpError then, for nobody to read."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise HttpError(499, "the client has left")
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _guarded(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except HttpError as error:
            return _refused(error)

    return endpoint


def _refused(error: HttpError) -> JSONResponse:
    headers = (
        {"Retry-After": "1"}
        if error.status in (429, 503)
        else {"WWW-Authenticate": "Bearer"}
        if error.status == 401
        else {}
    )
    if error.status in (408, 413):
        headers["Connection"] = "close"
    return JSONResponse(error_body(error), error.status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"no {request.url.path[:200]} here" if error.status_code == 404 else str(error.detail)
    return JSONResponse(
        error_body(Refusal(error.status_code, reason)), error.status_code, error.headers
    )


async def _broken(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(Refusal(500, f"the server failed: {type(error).__name__}")), 500)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _card(served: Served) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "postgrad",
        "max_model_len": served.context,
    }

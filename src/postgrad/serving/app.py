"""The HTTP application: OpenAI's paths, one JSON shape for all errors.

    GET  /health                 needs no token: models, rows in use
    GET  /v1/models              names and context lengths
    POST /v1/completions         prompt: text, token ids, or a list of either
    POST /v1/chat/completions    messages, through the model's chat template
    POST /v1/responses           input: text or items, as a chat
    POST /inference/v1/generate  token ids in, token ids out
    POST /v1/reload              {"folder": ..., "model": ...}: new weights (--reload-below)

Statuses of errors: 400 invalid request, 401 no token, 403 another host, origin or folder, 404 no
such model or path, 408 slow body, 413 large body, 429 all places taken, 500 the engine failed, 503
shutting down, 504 time limit of a request. The rows of a client that disconnects are dropped.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from postgrad.errors import did_you_mean
from postgrad.net.bodies import HttpError
from postgrad.net.server import unless_disconnected
from postgrad.serving.generate import generate_response, parse_generate
from postgrad.serving.http import DONE, ERROR_HANDLERS, catch_errors, event, guard, read_request
from postgrad.serving.requests import ApiError, GenerationRequest, check_schema, parse_request
from postgrad.serving.responses import Choice, ResponseBuilder
from postgrad.serving.responses_api import make_builder
from postgrad.serving.responses_request import parse_responses
from postgrad.serving.served_model import ServedModel, find_weight_files, load_weights
from postgrad.serving.worker import PendingRequest

CHUNK_S = 600.0  # time limit for a client to take one chunk of a stream

T = TypeVar("T")


def make_app(
    models: Sequence[ServedModel],
    host: str = "127.0.0.1",
    token: str = "",
    reload_below: Path | None = None,
    time_limit_s: float = 600.0,
) -> Starlette:
    """Return the application.

    Args:
        models: the models it serves.
        host: the address it listens on.
        token: if not empty, every request but /health needs `Authorization: Bearer TOKEN`.
        reload_below: the folder that new weights may come from; None: no reloads.
        time_limit_s: per request.
    """
    api = Api(models, reload_below.resolve() if reload_below else None, time_limit_s)
    routes = [
        Route("/health", api.health),
        Route("/v1/models", api.list_models),
        Route("/v1/models/{name:path}", catch_errors(api.show_model)),
        Route("/v1/completions", catch_errors(api.complete_text), methods=["POST"]),
        Route("/v1/chat/completions", catch_errors(api.complete_chat), methods=["POST"]),
        Route("/v1/responses", catch_errors(api.respond), methods=["POST"]),
        Route("/inference/v1/generate", catch_errors(api.generate), methods=["POST"]),
        Route("/v1/reload", catch_errors(api.reload), methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[guard(host, token)],
        exception_handlers=ERROR_HANDLERS,
    )


class ReloadRequest(BaseModel):
    """The body of POST /v1/reload; `model` may be left out when there is only one."""

    model_config = ConfigDict(strict=True)

    folder: str
    model: str = ""


class Api:
    """The endpoints."""

    def __init__(
        self, models: Sequence[ServedModel], reload_below: Path | None, time_limit_s: float
    ) -> None:
        self.models = {served.name: served for served in models}
        self.reload_below = reload_below
        self.time_limit_s = time_limit_s

    async def health(self, _: Request) -> Response:
        healthy = all(served.worker.alive for served in self.models.values())
        models = {
            name: {
                "rows": served.worker.rows,
                "capacity": served.worker.capacity,
                "version": served.version,
            }
            for name, served in self.models.items()
        }
        body = {"status": "healthy" if healthy else "broken", "models": models}
        return JSONResponse(body, 200 if healthy else 503)

    async def list_models(self, _: Request) -> Response:
        cards = [_model_card(served) for served in self.models.values()]
        return JSONResponse({"object": "list", "data": cards})

    async def show_model(self, request: Request) -> Response:
        return JSONResponse(_model_card(self.named_model(request.path_params["name"])))

    def find_model(self, name: str) -> ServedModel:
        """Return the model of this name; the only one has any name. Raises ApiError."""
        if len(self.models) == 1:
            return next(iter(self.models.values()))
        return self.named_model(name)

    def named_model(self, name: str) -> ServedModel:
        """Return the model of exactly this name. Raises ApiError."""
        if name not in self.models:
            shown = name[:200]
            raise ApiError(
                404,
                f"no model {shown!r}; {did_you_mean(shown, self.models)}",
                "model",
                "model_not_found",
            )
        return self.models[name]

    async def complete_text(self, request: Request) -> Response:
        body = await read_request(request)
        return await self._complete(request, parse_request(body, is_chat=False))

    async def complete_chat(self, request: Request) -> Response:
        body = await read_request(request)
        return await self._complete(request, parse_request(body, is_chat=True))

    async def respond(self, request: Request) -> Response:
        body = await read_request(request)
        return await self._complete(request, parse_responses(body))

    async def generate(self, request: Request) -> Response:
        body = await read_request(request)
        return await self._complete(request, parse_generate(body), generate_response)

    async def _complete(
        self,
        http_request: Request,
        request: GenerationRequest,
        make_body: Callable[[ResponseBuilder], dict[str, Any]] = lambda builder: builder.complete(),
    ) -> Response:
        served = self.find_model(request.model)
        deadline = asyncio.get_running_loop().time() + self.time_limit_s
        try:
            async with asyncio.timeout_at(deadline):
                jobs = await unless_disconnected(http_request, served.make_jobs(request))
        except TimeoutError as error:
            raise self._timeout_error() from error
        is_long = request.echoes_prompt or request.num_top is not None or bool(request.tool_schemas)
        builder = await run_aside(is_long, make_builder, request, served, jobs)
        pending = PendingRequest(jobs, per_token=request.stream)
        served.worker.submit(pending)
        # A stream begins with the first tokens: until then, an error has a status of its own.
        wait = _wait_for_updates if request.stream else _collect
        try:
            async with asyncio.timeout_at(deadline):
                choices = await unless_disconnected(http_request, wait(pending, builder))
        except BaseException as error:
            served.worker.cancel(pending)
            if isinstance(error, TimeoutError):
                raise self._timeout_error() from error
            raise
        if request.stream:
            events = self._stream_events(pending, builder, choices, deadline)
            return EventStream(events, lambda: served.worker.cancel(pending))
        return JSONResponse(await run_aside(is_long, make_body, builder))

    async def _stream_events(
        self,
        pending: PendingRequest,
        builder: ResponseBuilder,
        choices: list[Choice],
        deadline: float,
    ) -> AsyncIterator[str]:
        """Yield server-sent events, those that are ready together, from the first `choices` on.

        Tokens that arrive while others are sent share the next event.
        """
        ready = "".join(map(event, builder.first_chunks()))
        try:
            while True:
                for choice in choices:
                    has_calls = bool(choice.finish and builder.request.tool_schemas)
                    chunks = await run_aside(has_calls, builder.next_chunks, choice)
                    ready += "".join(map(event, chunks))
                if builder.done:
                    break
                if ready:
                    yield ready
                    ready = ""
                async with asyncio.timeout_at(deadline):
                    choices = await _wait_for_updates(pending, builder)
        except HttpError as error:
            yield ready + event(builder.error_chunk(error))
            return
        except TimeoutError:
            yield ready + event(builder.error_chunk(self._timeout_error()))
            return
        ready += "".join(map(event, builder.last_chunks()))
        yield ready + (DONE if builder.ends_with_done else "")

    def _timeout_error(self) -> ApiError:
        return ApiError(
            504, f"the response took longer than {self.time_limit_s:g} s", code="timeout"
        )

    async def reload(self, request: Request) -> Response:
        if self.reload_below is None:
            raise ApiError(
                403, "this server takes no new weights; start it with --reload-below DIR"
            )
        body = await read_request(request)
        reload = check_schema(body, ReloadRequest)
        named = self.named_model if reload.model else self.find_model
        served = named(reload.model)
        files = await run_in_threadpool(find_weight_files, reload.folder, self.reload_below)

        def load() -> int:
            num_tensors = load_weights(served.worker.engine.model, files)
            served.version += 1
            return num_tensors

        num_tensors = await served.worker.run_when_idle(load)
        return JSONResponse(
            {
                "model": served.name,
                "folder": reload.folder,
                "num_tensors": num_tensors,
                "version": served.version,
            }
        )


class EventStream(StreamingResponse):
    """Server-sent events; calls `on_end` however they end."""

    def __init__(self, events: AsyncIterator[str], on_end: Callable[[], None]) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self.on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Any) -> None:
            async with asyncio.timeout(CHUNK_S):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_time)
        finally:
            self.on_end()


async def _collect(pending: PendingRequest, builder: ResponseBuilder) -> list[Choice]:
    """Wait until all rows of a request have ended; returns its choices."""
    while not builder.done:
        await _wait_for_updates(pending, builder)
    return builder.choices


async def _wait_for_updates(pending: PendingRequest, builder: ResponseBuilder) -> list[Choice]:
    """Wait for row updates; returns the choices that changed.

    Raises the HttpError that ended the request.
    """
    updates = [await pending.updates.get()]
    while not pending.updates.empty():
        updates.append(pending.updates.get_nowait())
    changed: dict[int, Choice] = {}
    for update in updates:
        if isinstance(update, HttpError):
            raise update
        choice = builder.add(update)
        changed[choice.number] = choice
    return list(changed.values())


async def run_aside(is_long: bool, function: Callable[..., T], *arguments: Any) -> T:
    """Return the function's result; a long one runs in a thread, so that no request waits for it.

    An echo and log-probs decode their tokens one by one; finding tool calls waits for a lock that
    the encoding of a long prompt may hold.
    """
    if is_long:
        return await run_in_threadpool(function, *arguments)
    return function(*arguments)


def _model_card(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": 0,
        "owned_by": "postgrad",
        "max_model_len": served.context,
    }

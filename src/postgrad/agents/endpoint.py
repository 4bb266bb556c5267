"""The HTTP endpoint of a run: agents call the policy as they would call OpenAI.

    GET  /agent/TOKEN/v1/models
    GET  /agent/TOKEN/v1/models/policy
    POST /agent/TOKEN/v1/chat/completions
    POST /agent/TOKEN/v1/responses
    POST /agent/TOKEN/v1/completions

TOKEN is the secret of a session. The policy is sampled as the run's settings say: `temperature`,
`top_p`, `seed` and the model's name in a request have no effect.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from postgrad.agents.recording import Call, Recording
from postgrad.net.server import (
    ServerThread,
    address_of,
    listen,
    make_server,
    unless_disconnected,
)
from postgrad.rollout.engine import Completion
from postgrad.serving.http import DONE, ERROR_HANDLERS, catch_errors, event, guard, read_request
from postgrad.serving.requests import ApiError, GenerationRequest, parse_request
from postgrad.serving.responses import ResponseBuilder
from postgrad.serving.responses_request import parse_responses

MODEL = "policy"  # the name of the policy in responses
MODEL_CARD = {"id": MODEL, "object": "model", "created": 0, "owned_by": "postgrad"}


@dataclass(eq=False)
class WaitingCall:
    """A call that waits for the engine; `future` gets its Completion."""

    call: Call
    future: "Future[Completion]" = field(default_factory=Future)

    def answer(self, completion: Completion) -> None:
        """Give the completion to the handler of the call, unless its client has gone."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(completion)

    def refuse(self) -> None:
        """End the call because its program or the run has ended."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(ApiError(503, "the agent's session has ended"))


@dataclass(eq=False)
class Session:
    """One program's access to the policy; its calls are given to `on_call`."""

    token: str
    base_url: str
    recording: Recording
    on_call: Callable[[WaitingCall], None]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that OpenAI's clients read."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.token,
            "OPENAI_MODEL": MODEL,
        }


class Endpoint:
    """Serves all sessions of a run on the loopback address, in a thread of its own."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        listener = listen("127.0.0.1", 0)
        self.address = address_of(listener)
        server = make_server(self._make_app(), grace_s=1, connections=100_000)
        self.thread = ServerThread(server, listener)

    def close(self) -> None:
        """Stop serving."""
        self.thread.stop()

    def open_session(self, recording: Recording, on_call: Callable[[WaitingCall], None]) -> Session:
        """Return a new session."""
        token = secrets.token_urlsafe(24)
        session = Session(token, f"{self.address}/agent/{token}/v1", recording, on_call)
        self.sessions[token] = session
        return session

    def close_session(self, session: Session) -> None:
        """Refuse all further calls of a session."""
        self.sessions.pop(session.token, None)

    def _make_app(self) -> Starlette:
        base = "/agent/{token}/v1"
        routes = [
            Route(f"{base}/models", catch_errors(self.list_models)),
            Route(f"{base}/models/{{name:path}}", catch_errors(self.show_model)),
            Route(f"{base}/chat/completions", catch_errors(self.chat), methods=["POST"]),
            Route(f"{base}/responses", catch_errors(self.respond), methods=["POST"]),
            Route(f"{base}/completions", catch_errors(self.complete_text), methods=["POST"]),
        ]
        middleware = [guard("127.0.0.1", "")]
        return Starlette(routes=routes, middleware=middleware, exception_handlers=ERROR_HANDLERS)

    async def list_models(self, request: Request) -> Response:
        self._find_session(request)
        return JSONResponse({"object": "list", "data": [MODEL_CARD]})

    async def show_model(self, request: Request) -> Response:
        self._find_session(request)
        name = request.path_params["name"]
        if name != MODEL:
            reason = f"no model {name[:200]!r}; the policy is {MODEL}"
            raise ApiError(404, reason, "model", "model_not_found")
        return JSONResponse(MODEL_CARD)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, lambda body: parse_request(body, is_chat=True))

    async def respond(self, request: Request) -> Response:
        return await self._answer(request, parse_responses)

    async def complete_text(self, request: Request) -> Response:
        return await self._answer(request, lambda body: parse_request(body, is_chat=False))

    def _find_session(self, request: Request) -> Session:
        session = self.sessions.get(request.path_params["token"])
        if session is None:
            raise ApiError(401, "no such session: use the base_url of OPENAI_BASE_URL")
        return session

    async def _answer(
        self, http_request: Request, parse: Callable[[Any], GenerationRequest]
    ) -> Response:
        session = self._find_session(http_request)
        request = parse(await read_request(http_request))
        _check(request)
        recording = session.recording
        call = await run_in_threadpool(recording.start, request)
        completion = await unless_disconnected(http_request, self._sample(session, call))
        builder = await run_in_threadpool(recording.finish, call, completion)
        if request.stream:
            return StreamingResponse(_events(builder), media_type="text/event-stream")
        return JSONResponse(builder.complete())

    async def _sample(self, session: Session, call: Call) -> Completion:
        """Return what the engine samples for a call."""
        waiting = WaitingCall(call)
        session.on_call(waiting)
        return await asyncio.wrap_future(waiting.future)


def _check(request: GenerationRequest) -> None:
    """Raise ApiError if the request has a field that agents cannot use."""
    if len(request.prompts) > 1 or request.n > 1:
        field = "n" if request.n > 1 else "prompt"
        raise ApiError(400, "an agent gets one completion per call; make several calls", field)
    if request.num_top or request.echoes_prompt or request.stop_token_ids:
        raise ApiError(
            400, "an agent's call has no top_logprobs, echo or stop_token_ids; leave them out"
        )


def _events(builder: ResponseBuilder) -> Iterator[str]:
    """Yield a stream that has the whole response in one chunk."""
    for chunk in builder.first_chunks():
        yield event(chunk)
    for chunk in [*builder.next_chunks(builder.choices[0]), *builder.last_chunks()]:
        yield event(chunk)
    if builder.ends_with_done:
        yield DONE

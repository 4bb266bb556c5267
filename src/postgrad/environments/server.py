"""Serves an environment class over OpenEnv's wire, for runs on other machines; see remote.py.

    GET  /health   {"status": "healthy"}
    GET  /schema   fields of actions and observations: one text each
    /ws            one WebSocket per trajectory: reset, step, state, score, close

A session has the time limits of SessionSpec. What fails is an error message; the connection stays.
"""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from postgrad.environments.port import EnvironmentFailure, tool_methods
from postgrad.environments.remote import SCORE
from postgrad.environments.session import Session, SessionSpec, load_environment
from postgrad.errors import ConfigError
from postgrad.problem import Problem
from postgrad.verifiers.child import decode_problem, encode
from postgrad.verifiers.port import one_line
from postgrad.web import has_token, reject_reason

POLICY_VIOLATION = 1008  # close code of a WebSocket that is refused
TEXT = "text"  # the field of actions and observations


class WireError(Exception):
    """A message that cannot be answered; `code` is one of OpenEnv's."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def make_app(spec: SessionSpec, host: str, token: str = "", max_sessions: int = 256) -> Starlette:
    """Return the application. With a token, every request except /health must have it.

    Raises ConfigError if the environment is not found or has no step.
    """
    environment_class = load_environment(spec.environment)
    _check(environment_class, spec.environment)
    server = EnvironmentServer(spec, max_sessions)

    def why_rejected(connection: HTTPConnection) -> str:
        if not has_token(connection, token):
            return "this server needs a token: Authorization: Bearer TOKEN"
        return reject_reason(connection, host, sends_token=bool(token))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    async def schema(request: Request) -> Response:
        if reason := why_rejected(request):
            return JSONResponse({"error": reason}, status_code=401)
        return JSONResponse(describe(environment_class))

    async def session(websocket: WebSocket) -> None:
        if reason := why_rejected(websocket):
            await websocket.close(POLICY_VIOLATION, reason)
            return
        await server.serve(websocket)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/schema", schema),
            WebSocketRoute("/ws", session),
        ]
    )


def describe(environment_class: type) -> dict[str, Any]:
    """Return JSON schemas of actions and observations, and whether there is a score."""
    field = {"type": "object", "properties": {TEXT: {"type": "string"}}, "required": [TEXT]}
    has_score = callable(getattr(environment_class, "score", None))
    return {"action": field, "observation": field, "state": {"type": "object"}, SCORE: has_score}


def _check(environment_class: type, path: str) -> None:
    if not callable(getattr(environment_class, "step", None)):
        raise ConfigError(f"{path} has no step; an environment of tools only cannot be served")
    if tools := list(tool_methods(environment_class)):
        raise ConfigError(
            f"{path} has tools ({', '.join(tools)}), which the wire does not carry; rename them "
            "with a leading _ and let step call them, or run the class in the run's own processes"
        )


class EnvironmentServer:
    """The sessions of all connections; operations run in threads."""

    def __init__(self, spec: SessionSpec, max_sessions: int) -> None:
        self.spec = spec
        self.max_sessions = max_sessions
        self.num_sessions = 0
        self.executor = ThreadPoolExecutor(max_sessions, thread_name_prefix="environment")

    async def serve(self, websocket: WebSocket) -> None:
        """Answer the messages of one connection until it closes."""
        await websocket.accept()
        if self.num_sessions >= self.max_sessions:
            reason = f"{self.num_sessions} of {self.max_sessions} sessions are running"
            await _send(websocket, _error("CAPACITY_REACHED", reason))
            await websocket.close()
            return
        self.num_sessions += 1
        connection = Connection(self.spec)
        try:
            with contextlib.suppress(WebSocketDisconnect):
                while True:
                    message = await websocket.receive_text()
                    loop = asyncio.get_running_loop()
                    answer = await loop.run_in_executor(self.executor, connection.answer, message)
                    if answer is None:
                        await websocket.close()
                        return
                    await _send(websocket, answer)
        finally:
            self.num_sessions -= 1
            self.executor.submit(connection.close)


class Connection:
    """One trajectory: its session, made by the message reset."""

    def __init__(self, spec: SessionSpec) -> None:
        self.spec = spec
        self.session: Session | None = None

    def answer(self, text: str) -> dict[str, Any] | None:
        """Return the answer to a message; None for close."""
        try:
            message = json.loads(text)
            kind = message.get("type")
            if kind == "close":
                return None
            return self._answer(kind, message.get("data") or {})
        except WireError as error:
            return _error(error.code, str(error))
        except EnvironmentFailure as error:
            return _error("EXECUTION_ERROR", error.failure.reason)
        except Exception as error:  # the message has no such fields, or they have other types
            return _error("INVALID_JSON", one_line(error))

    def close(self) -> None:
        if self.session is not None:
            self.session.close()

    def _answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            self.close()
            self.session = Session(self.spec, read_problem(data), int(data.get(SEED) or 0))
            return _observation(self.session.open(), None, False, {})
        if kind not in ("step", "state", SCORE):
            raise WireError("UNKNOWN_TYPE", f"Unknown message type: {kind}")
        if self.session is None:
            raise WireError("SESSION_ERROR", "send reset first")
        if kind == "state":
            state = self.session.get_state()
            return {"type": kind, "data": state if isinstance(state, dict) else {"value": state}}
        if kind == SCORE:
            outcome = self.session.finish()
            return {"type": kind, "data": {"score": {"score": outcome.reward, **outcome.parts}}}
        if not isinstance(data.get(TEXT), str):
            raise WireError("VALIDATION_ERROR", f"an action has one field, {TEXT}, with a text")
        result = self.session.act(data[TEXT], [])
        (message,) = result.messages
        return _observation(str(message["content"]), result.reward, result.done, result.parts)


SEED = "trajectory_seed"


def read_problem(data: dict[str, Any]) -> Problem:
    """Return the problem of a reset: `problem` as a run sends it, or one named by seed or id."""
    if isinstance(data.get("problem"), dict):
        return decode_problem(data["problem"])
    uid = str(data.get("episode_id") or f"seed-{data.get('seed') or 0}")
    return Problem(uid, ({"role": "user", "content": ""},), "", "seeds")


def _observation(
    text: str, reward: float | None, done: bool, parts: dict[str, float]
) -> dict[str, Any]:
    data: dict[str, Any] = {"observation": {TEXT: text}, "reward": reward, "done": done}
    if parts:
        data["metadata"] = {"parts": parts}
    return {"type": "observation", "data": data}


def _error(code: str, reason: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": reason, "code": code}}


async def _send(websocket: WebSocket, answer: dict[str, Any]) -> None:
    await websocket.send_text(encode(answer).decode())

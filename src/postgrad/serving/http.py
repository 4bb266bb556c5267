"""HTTP as OpenAI's clients know it: the guard, errors in one JSON shape, server-sent events."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from postgrad.net.bodies import HttpError, read_json
from postgrad.net.guard import Guard
from postgrad.serving.requests import ApiError
from postgrad.serving.responses import error_body

MAX_BODY = 8 << 20  # bytes
BODY_S = 30.0  # time limit for a request's body to arrive
DONE = "data: [DONE]\n\n"  # ends a stream

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


async def read_request(request: Request) -> Any:
    """Return the JSON of a request. Raises HttpError."""
    return await read_json(request, MAX_BODY, BODY_S)


def guard(host: str, token: str) -> Middleware:
    """Return the guard of a server; /health needs no token."""
    return Middleware(Guard, host, token, open_paths=("/health",), answer=_answer_refusal)


def _answer_refusal(error: HttpError) -> Response:
    code = "invalid_api_key" if error.status == 401 else None
    return _error_response(ApiError(error.status, error.reason, code=code))


def catch_errors(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with an HttpError turned into a JSON response."""

    async def safe_endpoint(request: Request) -> Response:
        try:
            return await endpoint(request)
        except HttpError as error:
            return _error_response(error)

    return safe_endpoint


def _error_response(error: HttpError) -> JSONResponse:
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        headers["Retry-After"] = "1"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["Connection"] = "close"
    return JSONResponse(error_body(error), error.status, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = str(error.detail)
    if error.status_code == 404:
        reason = f"no {request.url.path[:200]} here"
    body = error_body(ApiError(error.status_code, reason))
    return JSONResponse(body, error.status_code, error.headers)


async def _answer_exception(request: Request, error: Exception) -> Response:
    body = error_body(ApiError(500, f"the server failed: {type(error).__name__}"))
    return JSONResponse(body, 500)


ERROR_HANDLERS: dict[Any, Any] = {  # of an application: errors in OpenAI's shape
    HTTPException: _answer_http_error,
    Exception: _answer_exception,
}


def event(body: dict[str, Any]) -> str:
    """Return a server-sent event; a body with a type, of the Responses API, names it.

    It is ASCII: many clients split lines at Unicode's other line separators, too.
    """
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body, separators=(',', ':'))}\n\n"

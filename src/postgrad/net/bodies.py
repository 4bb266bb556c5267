"""JSON bodies of requests, with limits of size and time; errors as values."""

import asyncio
import json
import re
from typing import Any

from starlette.requests import ClientDisconnect, Request

SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class HttpError(Exception):
    """An error that is sent to the client: HTTP status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> Any:
    """Return the JSON of a request.

    Raises:
        HttpError: 400 not JSON or not text, 408 not complete within `timeout_s`, 413 more than
            `max_bytes`.
    """
    content = await read_body(request, max_bytes, timeout_s)
    try:
        value = json.loads(content.decode("utf-8-sig"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, "the request is not JSON") from error
    if SURROGATE_ESCAPE.search(content):
        _check_surrogates(value)
    return value


def _check_surrogates(value: Any) -> None:
    """Raise HttpError for half of a surrogate pair, which is no character and has no encoding."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise HttpError(400, f"the request has {half}, half of a character; send both") from error


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body of a JSON request.

    Raises:
        HttpError: 400 of another type, 408 not complete within `timeout_s`, 413 too large.
    """
    content_type = request.headers.get("content-type") or ""
    if content_type.split(";")[0].strip().lower() != "application/json":
        raise HttpError(400, "send JSON, with Content-Type: application/json")
    too_large = HttpError(413, f"the request is larger than {max_bytes >> 20} MiB")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                content += chunk
                if len(content) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise HttpError(408, f"the request body did not arrive within {timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise HttpError(400, "the client disconnected before the request was complete") from error
    return bytes(content)


def _reject_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which Python's parser would accept."""
    raise ValueError(f"{name} is not JSON")

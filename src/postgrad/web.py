"""What the HTTP servers share: access checks, reading requests, timeouts, sockets and shutdown.

Used by the model server, the sandbox server and the web page. Imports no torch.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from postgrad.errors import ConfigError

HEADER_TIMEOUT_S = 20.0  # for the request line and the headers to arrive
KEEP_ALIVE_S = 15  # an idle connection is closed after this
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
FIRST_REQUEST_S = 2.0  # a stopping server waits this long for the first request of a connection
LAST_RESPONSES_S = 2  # time to send the errors of requests that did not end in the grace period

T = TypeVar("T")


class HttpError(Exception):
    """An error that is sent to the client: HTTP status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def announce_token(host: str, token: str) -> str:
    """Returns the token of a server; makes and prints one if other machines can reach it."""
    if token or is_loopback(host):
        return token
    token = secrets.token_urlsafe(24)
    print(f"token: {token}", flush=True)
    return token


def is_own_host(header: str, host: str) -> bool:
    """Returns whether a request's Host header names this server.

    Another name means DNS rebinding: a website's domain that resolves to this machine.
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return False
    if is_loopback(host):
        return is_loopback(name)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in (host.lower(), "localhost", socket.gethostname().lower())
    return True


def reject_reason(
    request: HTTPConnection, host: str, allow_links: bool = False, sends_token: bool = False
) -> str:
    """Returns why a request is rejected, "" if it is allowed.

    Rejected are unknown host names, other origins and pages of other sites.

    Args:
        request: the request.
        host: the address that the server listens on.
        allow_links: whether a person may follow a link from another site.
        sends_token: whether the request has a token in a header, which a page of another site
            cannot know: a server that other machines reach then may have any name.
    """
    may_have_any_name = sends_token and not is_loopback(host)
    if not may_have_any_name and not is_own_host(request.headers.get("host", ""), host):
        return "unknown host name"
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        return "another origin"
    is_foreign = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if is_foreign and not allow_links:
        return "another site"
    return ""


def has_token(request: HTTPConnection, token: str) -> bool:
    """Returns whether the request sends `Authorization: Bearer TOKEN`; True without a token."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    is_token = hmac.compare_digest(given.strip().encode(), token.encode())
    return not token or (is_token and scheme.lower() == "bearer")


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> Any:
    """Returns the JSON of a request.

    Raises:
        HttpError: 400 not JSON or not text, 408 not complete within `timeout_s`, 413 more than
            `max_bytes`.
    """
    content = await read_body(request, "application/json", max_bytes, timeout_s)
    try:
        value = json.loads(content.decode("utf-8-sig"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, "the request is not JSON") from error
    if SURROGATE_ESCAPE.search(content):
        _check_surrogates(value)
    return value


def _check_surrogates(value: Any) -> None:
    """Raises HttpError for half of a surrogate pair, which is no character and has no encoding."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise HttpError(400, f"the request has {half}, half of a character; send both") from error


async def read_body(request: Request, media_type: str, max_bytes: int, timeout_s: float) -> bytes:
    """Returns the body of a request.

    Raises:
        HttpError: 400 of another type, 408 not complete within `timeout_s`, 413 too large.
    """
    content_type = request.headers.get("content-type") or ""
    if content_type.split(";")[0].strip().lower() != media_type:
        kind = "JSON" if media_type == "application/json" else "protobuf"
        raise HttpError(400, f"send {kind}, with Content-Type: {media_type}")
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
    """Python's parser would accept NaN and Infinity, which are not JSON."""
    raise ValueError(f"{name} is not JSON")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; when the client disconnects first, cancel it: HttpError."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HttpError(499, "the client has disconnected")
        return working.result()
    finally:
        working.cancel()
        waiting.cancel()


class HeaderTimeout(H11Protocol):
    """HTTP protocol that closes a connection whose headers do not arrive in time.

    uvicorn alone would wait forever.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def _update_deadline(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._close)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if self.transport.get_protocol() is not self:
            return  # it has become a WebSocket
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    """Sets the result or the error of a future, unless it was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
        return
    future.set_exception(error)
    future.exception()  # retrieved, so that asyncio does not warn if the client has disconnected


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        # Python adds the address to the reason, which the line has already.
        reason = str(error.strerror).partition(" (while attempting")[0]
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose with --host and --port"
        ) from error


def address_of(listener: socket.socket) -> str:
    """Returns http://host:port of a listening socket."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


class Server(uvicorn.Server):
    """Answers every client that had connected when it was told to stop.

    uvicorn closes its socket at once: clients that wait to be accepted, and those whose request
    is on its way, see a reset connection instead of an answer. It cancels the requests that are
    running at the end of the grace period; `end_requests` is called first and answers them.
    """

    def __init__(
        self, config: uvicorn.Config, grace_s: float, end_requests: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.grace_s = grace_s
        self.end_requests = end_requests

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.sleep(0.1)  # the event loop accepts the connections that wait
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(FIRST_REQUEST_S, self.grace_s)):
                while any(map(_is_silent, self.server_state.connections)):
                    await asyncio.sleep(0.02)
        ending = asyncio.get_running_loop().call_later(self.grace_s, self.end_requests)
        await super().shutdown(sockets)
        ending.cancel()
        if self.force_exit:  # a second Ctrl-C
            self.end_requests()
            await asyncio.sleep(0.1)


def _is_silent(connection: Any) -> bool:
    """Returns whether no request has arrived on an HTTP connection."""
    return isinstance(connection, H11Protocol) and connection.cycle is None


def make_server(
    app: Any,
    grace_s: int,
    connections: int = 1000,
    end_requests: Callable[[], None] | None = None,
) -> uvicorn.Server:
    """Returns a server for run(). When it stops, running requests get `grace_s` seconds.

    `end_requests` is called then, and makes the handlers of running requests send an error.
    Without it they are cancelled.
    """
    config = uvicorn.Config(
        app,
        http=HeaderTimeout,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=connections,
        timeout_graceful_shutdown=grace_s + (LAST_RESPONSES_S if end_requests else 0),
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    return Server(config, grace_s, end_requests or (lambda: None))


def run(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    with signals_stop(server):
        server.run(sockets=[listener])


@contextlib.contextmanager
def signals_stop(server: uvicorn.Server) -> Iterator[None]:
    """Make SIGTERM and SIGINT stop a server, also one that has not started yet.

    A KeyboardInterrupt could be lost: Python ignores one that is raised in a finalizer.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, server.handle_exit) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)

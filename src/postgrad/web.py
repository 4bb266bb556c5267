"""What our servers share: who may come in, how a request is read, how long anyone is waited for, and how a server ends."""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from postgrad.errors import ConfigError

HEADERS_S = 20.0  # for a request's first line and headers to arrive


class Bad(Exception):
    """A request that is answered with an error: status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def known_host(header: str, host: str) -> bool:
    """Whether a request's Host header names this server; no means a site that points its own name here."""
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


def reject_reason(request: Request, host: str, opened: bool = False) -> str:
    """Why a request may not come in, empty when it may: an unknown host name, another origin, another site's page.

    `opened` says that a person following a link from elsewhere is welcome.
    """
    if not known_host(request.headers.get("host", ""), host):
        return "unknown host name"
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        return "another origin"
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site") and not opened:
        return "another site"
    return ""


def has_token(request: Request, token: str) -> bool:
    """Whether the request says `Authorization: Bearer TOKEN`; always, where there is no token."""
    given = request.headers.get("authorization", "")
    return not token or hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


async def read_json(request: Request, most_bytes: int, within_s: float) -> Any:
    """The JSON of a request, read no further than its limit and waited for no longer than its time.

    Raises:
        Bad: 400, 408 or 413.
    """
    if (request.headers.get("content-type") or "").split(";")[0].strip() != "application/json":
        raise Bad(400, "send JSON, with Content-Type: application/json")
    too_large = Bad(413, f"the request is larger than {most_bytes >> 20} MiB")
    said = request.headers.get("content-length", "")
    if said.isdigit() and int(said) > most_bytes:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.stream():
                content += piece
                if len(content) > most_bytes:
                    raise too_large
    except TimeoutError as error:
        raise Bad(408, f"the request's body did not arrive within {within_s:g} s") from error
    except ClientDisconnect as error:
        raise Bad(400, "the client left before its request was whole") from error
    try:
        return json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Bad(400, "the request is not JSON") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class HeaderTimeout(H11Protocol):
    """HTTP for one connection, closed when headers that have begun do not end; uvicorn itself would wait for ever."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._mind()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._mind()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _mind(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self._close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    """Give a future its result or error, unless nobody waits for it any more."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        future.exception()  # looked at, so that a client who left causes no complaint
    else:
        future.set_result(result)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError where there can be none."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose with --host and --port"
        ) from error


def address_of(listener: socket.socket) -> str:
    """http://host:port of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def make_server(app: Any, grace_s: int, connections: int = 1000) -> uvicorn.Server:
    """A server for `run`; at its end running requests have `grace_s` seconds."""
    settings: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "ws": "none",
    }
    limits: dict[str, Any] = {
        "limit_concurrency": connections,
        "timeout_graceful_shutdown": grace_s,
        "timeout_keep_alive": 15,
    }
    return uvicorn.Server(uvicorn.Config(app, http=HeaderTimeout, **settings, **limits))


def run(server: uvicorn.Server, listener: socket.socket) -> None:
    """Answer until Ctrl-C or SIGTERM."""
    with contextlib.suppress(KeyboardInterrupt), signals_as_interrupt():
        server.run(sockets=[listener])


@contextlib.contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt here, as Ctrl-C does; Ctrl-C does so in jobs, too, that a script put into the background."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Starts and stops the HTTP servers: sockets, time limits of connections, shutdown."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from postgrad.errors import RunError, Unwritable, WrongValue
from postgrad.net.bodies import HttpError

HEADER_TIMEOUT_S = 20.0  # for the request line and the headers to arrive
KEEP_ALIVE_S = 15  # an idle connection is closed after this
FIRST_REQUEST_S = 2.0  # a stopping server waits this long for the first request of a connection
LAST_RESPONSES_S = 2  # time to send the errors of requests that did not end in the grace period
START_S = 30.0
STOP_S = 10.0

T = TypeVar("T")


def listen(host: str, *ports: int) -> socket.socket:
    """Return a socket that listens on the first free one of the ports. Raises ConfigError."""
    reason = ""
    for port in ports:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM
            )[0]
            return socket.create_server(address, family=family, backlog=1024)
        except socket.gaierror as error:
            raise WrongValue(
                f"cannot listen on {host}: {error.strerror}; correct --host {host}", at="--host"
            ) from error
        except OSError as error:
            # Python adds the address to the reason, which the line has already.
            reason = str(error.strerror).partition(" (while attempting")[0]
    raise Unwritable(
        f"cannot listen on {host} port {ports[-1]}: {reason}; choose with --host and --port",
        at="--port",
    )


def address_of(listener: socket.socket) -> str:
    """Return http://host:port of a listening socket."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def make_server(
    app: Any,
    grace_s: int,
    connections: int = 1000,
    end_requests: Callable[[], None] | None = None,
) -> uvicorn.Server:
    """Return a server for run(). When it stops, running requests get `grace_s` seconds.

    `end_requests` is called then, and makes the handlers of running requests send an error.
    Without it they are cancelled. Connections beyond `connections` are answered with 503.
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
    """Serve until Ctrl-C or SIGTERM."""
    with signals_stop(server):
        server.run(sockets=[listener])


class ServerThread:
    """A server in a thread of this process, from now until stop(). Raises RunError."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self.server = server
        self.thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self.thread.start()
        deadline = time.monotonic() + START_S
        while not server.started:
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise RunError(f"the server at {address_of(listener)} did not start")
            time.sleep(0.01)

    def stop(self) -> None:
        """End the server and wait for its thread."""
        self.server.should_exit = True
        self.thread.join(STOP_S)


@contextlib.contextmanager
def signals_stop(server: uvicorn.Server) -> Iterator[None]:
    """Make SIGTERM and SIGINT stop a server, also one that has not started yet.

    A KeyboardInterrupt could be lost: Python ignores one that is raised in a finalizer.
    """
    handler: Callable[[int, FrameType | None], None] = server.handle_exit
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


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
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


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
    """Return whether no request has arrived on an HTTP connection."""
    return isinstance(connection, H11Protocol) and connection.cycle is None


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


def settle(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    """Set the result or the error of a future, unless it was cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
        return
    future.set_exception(error)
    future.exception()  # retrieved, so that asyncio does not warn if the client has disconnected

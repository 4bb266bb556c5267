"""The one guard of all servers: which requests they accept, by host, origin and token."""

import base64
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable, Collection, Sequence
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from postgrad.net.bodies import HttpError

Credential = Callable[[HTTPConnection], str]  # returns what a request sends as its token


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def announce_token(host: str, token: str) -> str:
    """Return the token of a server; make and print one if other machines can reach it."""
    if token or is_loopback(host):
        return token
    token = secrets.token_urlsafe(24)
    print(f"token: {token}", flush=True)
    return token


def bearer_token(request: HTTPConnection) -> str:
    """Return the token of `Authorization: Bearer TOKEN`, "" without one."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def basic_password(request: HTTPConnection) -> str:
    """Return the password of `Authorization: Basic ...`, "" without one.

    HTTP libraries send that of an address such as http://any:TOKEN@host.
    """
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    try:
        credentials = base64.b64decode(given, validate=True) if scheme.lower() == "basic" else b""
    except ValueError:
        return ""
    return credentials.partition(b":")[2].decode(errors="replace")


class Guard:
    """ASGI middleware that refuses other hosts, pages of other sites, and a wrong token.

    Args:
        app: the guarded application or endpoint.
        host: the address that the server listens on.
        token: what requests must send; "" lets all in.
        open_paths: paths that need no token.
        credentials: where a request may have the token.
        answer: makes the response of a refusal.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        token: str = "",
        open_paths: Collection[str] = (),
        credentials: Sequence[Credential] = (bearer_token,),
        answer: Callable[[HttpError], Response] = lambda error: error_response(error),
    ) -> None:
        self.app = app
        self.host = host
        self.token = token
        self.open_paths = open_paths
        self.credentials = credentials
        self.answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            error = self.refusal(HTTPConnection(scope))
            app = self.app if error is None else self.answer(error)
        await app(scope, receive, send)

    def refusal(self, request: HTTPConnection) -> HttpError | None:
        """Return the error that answers a request, None if it is accepted."""
        if reason := self.foreign_reason(request):
            return HttpError(403, reason)
        if request.url.path in self.open_paths or self.has_token(request):
            return None
        return HttpError(401, "this server needs its token: Authorization: Bearer TOKEN")

    def has_token(self, request: HTTPConnection) -> bool:
        """Return whether a request sends the token; True if none is needed."""
        token = self.token.encode()
        given = [credential(request).encode() for credential in self.credentials]
        return not token or any(hmac.compare_digest(one, token) for one in given)

    def foreign_reason(self, request: HTTPConnection, allow_links: bool = False) -> str:
        """Return why a request comes from elsewhere, "" if it does not.

        Args:
            request: the request.
            allow_links: whether a person may follow a link from another site.
        """
        # Machines have names that they do not know: of a cluster, a container or a proxy. A page of
        # another site does not know the token.
        any_name = bool(self.token) and not is_loopback(self.host) and self.has_token(request)
        if not any_name and not _is_own_host(request.headers.get("host", ""), self.host):
            return "unknown host name"
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            return "another origin"
        is_foreign = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")
        return "another site" if is_foreign and not allow_links else ""


def error_response(error: HttpError) -> Response:
    """Return an error as {"error": reason}."""
    return JSONResponse({"error": error.reason}, error.status)


def _is_own_host(header: str, host: str) -> bool:
    """Return whether a request's Host header names this server.

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

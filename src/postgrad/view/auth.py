"""Which requests the page accepts, and the security headers of every response."""

from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from postgrad.net.guard import Guard, bearer_token

COOKIE = "postgrad_token"
# Pages of this machine: a notebook's, in a browser or in an editor. They may show this page in a
# frame if the notebook has asked for it.
NOTEBOOKS = "http://localhost:* http://127.0.0.1:* https://localhost:* vscode-webview:"
NO_PAGE = "'none'"
# Model output is untrusted. Only our own files may run as scripts, and no markup may be made from
# strings.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class PageGuard:
    """The guard of the page: it is read-only, and the first visit has the token in its address.

    `framed_by` are the pages that may show this one in a frame.
    """

    def __init__(self, app: ASGIApp, host: str, token: str, framed_by: str = NO_PAGE) -> None:
        self.app = app
        self.guard = Guard(
            app, host, token, credentials=(bearer_token, _cookie_token, _first_visit_token)
        )
        policy = f"{CONTENT_SECURITY_POLICY}; frame-ancestors {framed_by}"
        headers = {**HEADERS, "Content-Security-Policy": policy}
        self.headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self.headers]
            await send(message)

        app = self.answer(Request(scope)) or self.app
        await app(scope, receive, send_with_headers)

    def answer(self, request: Request) -> Response | None:
        """Return what is answered instead of the page: a refusal, or a cookie with the token."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this page is read-only", 405)
        if not self.guard.has_token(request):
            message = "a token is needed; open the address that postgrad view printed\n"
            return PlainTextResponse(message, 401)
        is_page = request.headers.get("sec-fetch-mode") == "navigate" and request.url.path == "/"
        if reason := self.guard.foreign_reason(request, allow_links=is_page):
            return PlainTextResponse(reason, 403)
        if not self.guard.token or _first_visit_token(request) != self.guard.token:
            return None
        response = RedirectResponse("/", 303)
        response.set_cookie(
            _cookie_name(request), self.guard.token, httponly=True, samesite="strict"
        )
        return response


def _cookie_name(request: HTTPConnection) -> str:
    """Return the name with the port: browsers share cookies between the ports of one host."""
    return f"{COOKIE}_{request.url.port or 80}"


def _cookie_token(request: HTTPConnection) -> str:
    return request.cookies.get(_cookie_name(request), "")


def _first_visit_token(request: HTTPConnection) -> str:
    return request.query_params.get("token", "") if request.url.path == "/" else ""

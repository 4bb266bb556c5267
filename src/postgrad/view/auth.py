"""Which requests the page accepts, and the security headers of every response."""

import hmac

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from postgrad.web import has_token, reject_reason

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


class AuthMiddleware:
    """Rejects requests for other hosts, from other sites, that write, or without the token.

    `framed_by` are the pages that may show this one in a frame.
    """

    def __init__(self, app: ASGIApp, host: str, token: str, framed_by: str = NO_PAGE) -> None:
        self.app = app
        self.host = host
        self.token = token
        policy = f"{CONTENT_SECURITY_POLICY}; frame-ancestors {framed_by}"
        headers = {**HEADERS, "Content-Security-Policy": policy}
        self.headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self.headers]
            await send(message)

        response = self.reject(request) or self.authenticate(request)
        await (response or self.app)(scope, receive, send_with_headers)

    def reject(self, request: Request) -> Response | None:
        """None, or an error response: unknown host name, other origin, or a method that writes."""
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this page is read-only", 405)
        is_page = request.headers.get("sec-fetch-mode") == "navigate" and request.url.path == "/"
        # With a token any host name may be used: `authenticate` refuses requests without it.
        reason = reject_reason(request, self.host, is_page, sends_token=bool(self.token))
        return PlainTextResponse(reason, 403) if reason else None

    def authenticate(self, request: Request) -> Response | None:
        """None with the right token. The first visit has it in the address and gets a cookie."""
        if not self.token:
            return None
        token = request.query_params.get("token")
        if token is not None and request.url.path == "/" and self._is_token(token):
            response = RedirectResponse("/", 303)
            response.set_cookie(
                self._cookie_name(request), self.token, httponly=True, samesite="strict"
            )
            return response
        cookie = request.cookies.get(self._cookie_name(request), "")
        if self._is_token(cookie) or has_token(request, self.token):
            return None
        message = "a token is needed; open the address that postgrad view printed\n"
        return PlainTextResponse(message, 401)

    def _cookie_name(self, request: Request) -> str:
        """The name with the port: browsers share cookies between the ports of one host."""
        return f"{COOKIE}_{request.url.port or 80}"

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.token.encode())

"""The HTTP application: the paths of Tinker's service that this server has.

Statuses of errors: 400 and 422 invalid request, 401 wrong token, 403 another host, origin or a
full server, 404 no such model, client, sampler, checkpoint or path, 408 slow body or a result that
is not there yet, 410 a session or result that is gone, 413 large body, 429 too many requests wait,
503 the server stops. The client sends requests with status 408, 429 and 5xx again. An error of work
on the model is the result of its request: `error` and `category`.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from postgrad.errors import ConfigError
from postgrad.serving.tinker import requests
from postgrad.serving.tinker.futures import PROTOBUF
from postgrad.serving.tinker.listings import Listings
from postgrad.serving.tinker.messages import parse_forward_backward
from postgrad.serving.tinker.service import Service
from postgrad.web import HttpError, read_body, read_json, reject_reason

MAX_BODY = 64 << 20  # bytes
BODY_S = 60.0  # time limit for a request's body to arrive
API = "/api/v1"
MAX_PAGE = 1000
OPEN_PATHS = ("/health", f"{API}/healthz")  # these and downloads need no token

# What the client asks for first. It then sends plain JSON and protobuf over HTTP/1.1.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "sample_max_concurrent_requests": 256,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}

Handler = Callable[[Request], Awaitable[Any]]


def make_app(service: Service, host: str = "127.0.0.1", token: str = "") -> Starlette:
    """Return the application.

    Args:
        service: what it serves.
        host: the address it listens on.
        token: if not empty, every request but /health needs `X-API-Key: TOKEN`.
    """
    middleware = [Middleware(KeyMiddleware, host=host, token=token)]
    handlers: dict[Any, Any] = {HTTPException: _answer_http_error}
    return Starlette(routes=_routes(service), middleware=middleware, exception_handlers=handlers)


def _routes(service: Service) -> list[Route]:
    api = Api(service)
    bodies: dict[str, tuple[type[BaseModel], Callable[[Any], Any]]] = {
        "client/config": (requests.AnyBody, lambda _: CLIENT_CONFIG),
        "client/dynamic_config": (requests.AnyBody, lambda _: DYNAMIC_CONFIG),
        "telemetry": (requests.AnyBody, lambda _: {"status": "accepted"}),
        "create_session": (requests.CreateSession, service.create_session),
        "session_heartbeat": (requests.Heartbeat, service.heartbeat),
        "create_model": (requests.CreateModel, service.create_model),
        "unload_model": (requests.ModelRequest, service.unload_model),
        "get_info": (requests.ModelRequest, service.get_info),
        "optim_step": (requests.OptimStep, service.optim_step),
        "save_weights": (requests.SaveWeights, service.save_weights),
        "save_weights_for_sampler": (requests.SaveWeights, service.save_weights_for_sampler),
        "save_weights_external": (requests.SaveWeights, service.save_weights_external),
        "load_weights": (requests.LoadWeights, service.load_weights),
        "create_sampling_session": (
            requests.CreateSamplingSession,
            service.create_sampling_session,
        ),
        "asample": (requests.SampleBody, service.sample),
        "cancel_future": (requests.RequestId, api.cancel),
        "weights_info": (
            requests.WeightsInfo,
            lambda body: api.listings.weights_info(body.tinker_path),
        ),
    }
    posts: dict[str, Handler] = {name: _json_handler(*entry) for name, entry in bodies.items()}
    posts["forward_backward"] = api.forward_backward
    posts["retrieve_future"] = api.retrieve
    posts["sessions/{session_id}/finish"] = api.finish_session
    gets: dict[str, Handler] = {
        "healthz": api.healthz,
        "get_server_capabilities": api.capabilities,
        "training_runs": api.training_runs,
        "training_runs/{run_id}": api.training_run,
        "training_runs/{run_id}/checkpoints": api.run_checkpoints,
        "training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls": api.urls,
        "checkpoints": api.checkpoints,
        "sessions": api.sessions,
        "sessions/{session_id}": api.session,
        "samplers/{sampler_id}": api.sampler,
    }
    checkpoint = f"{API}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}"
    routes = [Route("/health", _endpoint(api.health))]
    routes += [
        Route(f"{API}/{path}", _endpoint(one), methods=["POST"]) for path, one in posts.items()
    ]
    routes += [Route(f"{API}/{path}", _endpoint(one)) for path, one in gets.items()]
    routes.append(Route(checkpoint, _endpoint(api.delete), methods=["DELETE"]))
    routes.append(Route(f"{checkpoint}/ttl", _endpoint(api.set_ttl), methods=["PUT"]))
    routes.append(Route("/download/{signature}/{expires}/{place:path}", _endpoint(api.download)))
    return routes


def _json_handler(kind: type[BaseModel], function: Callable[[Any], Any]) -> Handler:
    """Return an endpoint that parses the JSON body and answers with the function's result."""

    async def handle(request: Request) -> Any:
        return function(requests.parse(kind, await read_json(request, MAX_BODY, BODY_S)))

    return handle


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler with errors as JSON; a result that is no Response is sent as JSON."""

    async def safe_endpoint(request: Request) -> Response:
        try:
            result = await handler(request)
        except HttpError as error:
            return error_response(error)
        except ConfigError as error:
            return error_response(HttpError(400, str(error)))
        return result if isinstance(result, Response) else JSONResponse(result)

    return safe_endpoint


def error_response(error: HttpError) -> JSONResponse:
    headers = {"Connection": "close"} if error.status == 413 else {}
    return JSONResponse({"detail": error.reason}, error.status, headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"this server has no {request.method} {request.url.path[:200]}; see docs/tinker.md"
    return JSONResponse({"detail": reason}, error.status_code)


class KeyMiddleware:
    """Refuses requests for another host, from another site's page, or without the token."""

    def __init__(self, app: ASGIApp, host: str, token: str) -> None:
        self.app = app
        self.host = host
        self.token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and (error := self._find_error(Request(scope))):
            app = error_response(error)
        await app(scope, receive, send)

    def _find_error(self, request: Request) -> HttpError | None:
        key = request.headers.get("x-api-key", "")
        sends_token = bool(self.token) and hmac.compare_digest(key.encode(), self.token.encode())
        if reason := reject_reason(request, self.host, sends_token=sends_token):
            return HttpError(403, reason)
        path = request.url.path
        if not self.token or path in OPEN_PATHS or path.startswith("/download/"):
            return None
        if sends_token:
            return None
        return HttpError(401, "wrong api_key: set TINKER_API_KEY to the server's token")


class Api:
    """The endpoints that are not just a JSON body for the service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.listings = Listings(service)

    async def health(self, _: Request) -> Response:
        is_healthy = self.service.worker.alive
        body = {
            "status": "healthy" if is_healthy else "broken",
            "clients": len(self.service.clients),
            "waiting": self.service.results.num_pending,
        }
        return JSONResponse(body, 200 if is_healthy else 503)

    async def healthz(self, _: Request) -> Any:
        return {"status": "ok"}

    async def capabilities(self, _: Request) -> Any:
        model = {
            "model_name": self.service.name,
            "max_context_length": self.service.model.context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    async def forward_backward(self, request: Request) -> Any:
        body = await read_body(request, PROTOBUF, MAX_BODY, BODY_S)
        parsed = await run_in_threadpool(parse_forward_backward, body)
        return self.service.forward_backward(parsed)

    async def retrieve(self, request: Request) -> Any:
        body = requests.parse(requests.RequestId, await read_json(request, MAX_BODY, BODY_S))
        result = await self.service.results.wait(body.request_id)
        if result is None:
            pending = {
                "type": "try_again",
                "request_id": body.request_id,
                "queue_state": "active",
            }
            return JSONResponse(pending, 408)
        return Response(result.body, media_type=result.media_type)

    def cancel(self, body: requests.RequestId) -> Any:
        self.service.worker.cancel(body.request_id)
        return Response(status_code=204)

    async def finish_session(self, request: Request) -> Any:
        self.service.finish_session(request.path_params["session_id"])
        return Response(status_code=204)

    # ---- listings

    async def training_runs(self, request: Request) -> Any:
        return await run_in_threadpool(self.listings.training_runs, *_page(request))

    async def training_run(self, request: Request) -> Any:
        return await run_in_threadpool(self.listings.training_run, request.path_params["run_id"])

    async def run_checkpoints(self, request: Request) -> Any:
        return await run_in_threadpool(self.listings.run_checkpoints, request.path_params["run_id"])

    async def checkpoints(self, request: Request) -> Any:
        return await run_in_threadpool(self.listings.all_checkpoints, *_page(request))

    async def sessions(self, request: Request) -> Any:
        return self.listings.sessions(*_page(request))

    async def session(self, request: Request) -> Any:
        return self.listings.session(request.path_params["session_id"])

    async def sampler(self, request: Request) -> Any:
        return self.service.get_sampler(request.path_params["sampler_id"])

    async def delete(self, request: Request) -> Any:
        checkpoint = self.service.checkpoints.get(**request.path_params)
        await run_in_threadpool(self.service.checkpoints.delete, checkpoint)
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Any:
        body = requests.parse(requests.Ttl, await read_json(request, MAX_BODY, BODY_S))
        checkpoint = self.service.checkpoints.get(**request.path_params)
        self.service.checkpoints.set_expiry(checkpoint, body.ttl_seconds)
        return Response(status_code=204)

    async def urls(self, request: Request) -> Any:
        checkpoint = self.service.checkpoints.get(**request.path_params)
        return self.listings.download_urls(checkpoint, f"http://{request.headers['host']}")

    async def download(self, request: Request) -> Any:
        return FileResponse(self.listings.find_download(**request.path_params))


def _page(request: Request) -> tuple[int, int]:
    """Return offset and limit of a listing. Raises HttpError: 422."""
    texts = (request.query_params.get("offset", "0"), request.query_params.get("limit", "100"))
    if not all(text.isdigit() and len(text) < 10 for text in texts):
        raise HttpError(422, "offset and limit must be whole numbers")
    return int(texts[0]), min(int(texts[1]), MAX_PAGE)

"""A small OpenAI-compatible server over any engine, for tests; it can fail on purpose."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from postgrad.rollout.engine import Request, Sampling

MODEL = "tiny"


@dataclass
class Served:
    """The server's state and its requests. `mood` may answer a call itself with (status, body)."""

    engine: Any = None
    prompts: Any = None
    takes_ids: bool = True
    gives_ids: bool = True
    chat: Callable[[str], str] = lambda text: text
    mood: Callable[[int, dict[str, Any]], tuple[int, Any] | None] = lambda number, body: None
    calls: dict[str, Callable[[dict[str, Any]], Any]] = field(
        default_factory=dict
    )  # further calls, by path
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    busiest: int = 0
    now: int = 0
    lock: Any = field(default_factory=threading.Lock)
    turn: Any = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        return f"{self.url}#{MODEL}"

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.prompts.encode_response(prompt, with_end=False)
        elif not self.takes_ids:
            return 422, {"detail": "prompt must be a string"}
        filters = max(0, body.get("top_k", 0)), body.get("min_p", 0.0), body.get("stop", ())
        sampling = Sampling(body["temperature"], body["max_tokens"], body["top_p"], *filters)
        with self.turn:
            done = self.engine.generate([Request(prompt, [body["seed"] % 2**64])], sampling)[0][0]
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.prompts.decode(done.tokens),
            "finish_reason": done.finish,
        }
        if self.gives_ids and "logprobs" in body:
            choice |= {"token_ids": done.tokens, "logprobs": {"token_logprobs": done.logprobs}}
        return 200, {"choices": [choice]}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/v1/chat/completions":
            return 200, {
                "choices": [
                    {"index": 0, "message": {"content": self.chat(body["messages"][-1]["content"])}}
                ]
            }
        if path in self.calls:
            try:
                return 200, self.calls[path](body)
            except KeyError as error:
                return 400, {"detail": f"say {error}"}
        return 404, {"error": {"message": f"no {path}"}}


@contextmanager
def serve(**options: Any) -> Iterator[Served]:
    """A running server on a free port of the loopback."""
    served = Served(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def reply(self, status: int, body: Any) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.reply(200, {"data": [{"id": MODEL, "max_model_len": 512}]})
            else:
                self.reply(404, {"detail": "no GET here"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with served.lock:
                number = len(served.asked)
                served.asked.append(
                    body | {"path": self.path, "key": self.headers.get("Authorization")}
                )
                served.now += 1
                served.busiest = max(served.busiest, served.now)
            time.sleep(0.005)
            own = served.mood(number, body)
            if own is not None and own[0] == 0:  # hangs up
                self.close_connection = True
            else:
                self.reply(*(own or served.answer(self.path, body)))
            with served.lock:
                served.now -= 1

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)

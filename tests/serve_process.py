"""`postgrad serve` for tests: the application in a thread, or the command as a process."""

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import preloaded
from waiting import wait_for

from postgrad.config.schema import ModelConfig
from postgrad.net import server as net_server
from postgrad.serving.app import make_app
from postgrad.serving.served_model import ServedModel, end_requests, load_served_model

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass
class Live:
    """A server that runs; `served` is None where it is another process."""

    port: int
    served: ServedModel | None = None
    token: str = ""
    process: preloaded.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and headers of one request; bytes go out as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        own = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.token}"} if self.token else {}
        )
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request("GET" if body is None else "POST", path, data, own | (headers or {}))
            answer = connection.getresponse()
            return (
                answer.status,
                json.loads(answer.read()),
                {k.lower(): v for k, v in answer.getheaders()},
            )
        finally:
            connection.close()

    def rows(self, name: str = "tiny") -> int:
        return self.ask("/health")[1]["models"][name]["rows"]


@contextmanager
def live(
    model: Path,
    token: str = "",
    reload_below: Path | None = None,
    time_limit_s: float = 60,
    grace_s: int = 5,
    other: Path | None = None,
    **options: Any,
) -> Iterator[Live]:
    """Serve a model named tiny, and `other` if given, on a free port of the loopback address."""
    server: Any = None
    wishes = {"rows": 64, "context": 0, "queue": 1024, "device": "cpu"} | options
    device = wishes.pop("device")
    served = [
        load_served_model(
            name,
            ModelConfig(path=str(path), device=device, dtype="float32"),
            stopping=lambda: server is not None and server.should_exit,
            **wishes,
        )
        for name, path in {"tiny": model, "other": other}.items()
        if path is not None
    ]
    app = make_app(served, "127.0.0.1", token, reload_below, time_limit_s)
    server = net_server.make_server(app, grace_s, end_requests=lambda: end_requests(served))
    with running(server, served, token) as made:
        yield made


@contextmanager
def running(server: Any, served: list[ServedModel], token: str = "") -> Iterator[Live]:
    """Run a server in a thread, on a free port of the loopback address."""
    listener = net_server.listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started, "the server to start")
    try:
        yield Live(listener.getsockname()[1], served[0], token)
    finally:
        server.should_exit = True
        thread.join(300)
        assert all(one.worker.end() for one in served) and not thread.is_alive()


@contextmanager
def openai_client(model: Path) -> Iterator[Any]:
    """Serve a model and yield the official client of its server."""
    import openai

    with (
        live(model) as running,
        openai.OpenAI(base_url=running.url, api_key="none", max_retries=0, timeout=600) as made,
    ):
        yield made


@contextmanager
def command(*arguments: str) -> Iterator[Live]:
    """Run `postgrad serve` as a process; Ctrl-C ends it, unless the test has ended it."""
    reading, writing = os.pipe()
    with open(reading) as output:  # noqa: PTH123
        process = preloaded.Process(
            preloaded.COMMAND, "serve", *arguments, "--port", 0, streams=(0, writing, 2)
        )
        os.close(writing)
        with _running_command(process, output) as made:
            yield made


@contextmanager
def _running_command(process: preloaded.Process, output: TextIO) -> Iterator[Live]:
    try:
        said = [""]
        while not said[-1].startswith("http://"):
            said.append(output.readline())
            assert said[-1], said
        token = next(
            (line.removeprefix("token: ").strip() for line in said if line.startswith("token: ")),
            "",
        )
        yield Live(int(said[-1].split(":")[2].split("/")[0]), token=token, process=process)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()

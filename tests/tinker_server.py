"""`postgrad serve --train` for tests: the application in a thread, and data for the client."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from serve_process import wait_for
from tinker import types

from postgrad import web
from postgrad.config.schema import ModelConfig
from postgrad.serving.tinker.app import make_app
from postgrad.serving.tinker.checkpoints import Checkpoints
from postgrad.serving.tinker.records import Limits
from postgrad.serving.tinker.service import Service
from postgrad.serving.tinker.trained_model import TrainedModel
from postgrad.serving.tinker.worker import Worker

KEY = "tml-none"


@dataclass
class TrainingServer:
    """A server that runs."""

    url: str
    service: Service

    @contextmanager
    def connect(self, key: str = KEY) -> Iterator[tinker.ServiceClient]:
        """Yield a client; its session ends with the block."""
        client = tinker.ServiceClient(base_url=self.url, api_key=key)
        try:
            yield client
        finally:
            client.close("success").result(30)

    def rest(self) -> Any:
        return tinker.RestClient(base_url=self.url, api_key=KEY)


@contextmanager
def training_server(
    model: Path, folder: Path, token: str = "", **limits: Any
) -> Iterator[TrainingServer]:
    """Serve a model named tiny on a free port of the loopback address."""
    trained = TrainedModel(ModelConfig(path=str(model), device="cpu", dtype="float32"))
    worker = Worker(trained, threads=1)
    checkpoints = Checkpoints(folder)
    service = Service("tiny", str(model), trained, worker, checkpoints, Limits(**limits))
    server = web.make_server(make_app(service, "127.0.0.1", token), grace_s=5)
    listener = web.listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started, "the server to start")
    running = TrainingServer(web.address_of(listener), service)
    try:
        yield running
    finally:
        server.should_exit = True
        thread.join(60)
        assert worker.end()
        assert not thread.is_alive()


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """Return a datum whose inputs are all tokens but the last, and its targets all but the first.

    Other inputs are given for the targets.
    """
    given: dict[str, Any] = {"target_tokens": list(tokens[1:]), **inputs}
    return types.Datum(types.ModelInput.from_ints(list(tokens[:-1])), given)


def supervised(prompt: Sequence[int], response: Sequence[int]) -> types.Datum:
    """Return a datum of which only the response counts."""
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(response)
    return datum([*prompt, *response], weights=weights)


def train_step(client: Any, data: list[types.Datum], lr: float = 0.02, **options: Any) -> float:
    """Take one step of cross entropy; return the loss before it."""
    loss = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=lr, **options))
    step.result(60)
    return loss.result(60).metrics["loss:sum"]

"""`postgrad serve MODEL --train` stops at once while a client polls for a result."""

import os
import signal
import socket
import threading
import time

import httpx
import pytest
from serve_process import wait_for

from postgrad.cli.main import main
from postgrad.serving.tinker import app as tinker_app


@pytest.mark.slow
def test_a_stop_ends_polls_without_a_traceback(tiny, tmp_path, monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    services = []
    make_app = tinker_app.make_app

    def keep_service(service, *arguments):
        services.append(service)
        service.results.add("never")
        return make_app(service, *arguments)

    monkeypatch.setattr(tinker_app, "make_app", keep_service)
    statuses: list[int] = []
    stopped_at: list[float] = []
    url = f"http://127.0.0.1:{port}"

    def poll():
        body = {"request_id": "never"}
        reply = httpx.post(f"{url}/api/v1/retrieve_future", json=body, timeout=60)
        statuses.append(reply.status_code)

    def stop_while_a_client_polls():
        wait_for(lambda: is_up(url), "the server")
        threading.Thread(target=poll, daemon=True).start()
        time.sleep(0.5)
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_while_a_client_polls, daemon=True).start()
    folder = str(tmp_path / "adapters")
    command = ["serve", str(tiny), "--train", "--port", str(port), "--checkpoints", folder]
    assert main(command) == 0
    assert time.monotonic() - stopped_at[0] < 9, "it did not wait for the grace of 10 s"
    assert statuses == [503] and "Traceback" not in capfd.readouterr().err


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False

"""`postgrad serve MODEL --train` stops at once while a client polls for a result."""

import os
import signal
import threading
import time

import httpx
import pytest

from postgrad import web
from postgrad.cli.main import main
from postgrad.serving.tinker import app as tinker_app

GRACE_S = 100


@pytest.mark.slow
def test_a_stop_ends_polls_without_a_traceback(tiny, tmp_path, monkeypatch, capfd):
    is_polled = threading.Event()
    statuses: list[int] = []
    stopped_at: list[float] = []
    threads: list[threading.Thread] = []
    make_app = tinker_app.make_app
    run = web.run

    def make_app_with_endless_request(service, *arguments):
        service.results.add("never")
        wait = service.results.wait

        async def wait_and_say_so(request_id):
            is_polled.set()
            return await wait(request_id)

        service.results.wait = wait_and_say_so
        return make_app(service, *arguments)

    def poll(url):
        body = {"request_id": "never"}
        reply = httpx.post(f"{url}/api/v1/retrieve_future", json=body, timeout=600)
        statuses.append(reply.status_code)

    def stop_while_a_client_polls():
        is_polled.wait(300)
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    def run_with_client(server, listener):
        threads.append(threading.Thread(target=poll, args=(web.address_of(listener),)))
        threads.append(threading.Thread(target=stop_while_a_client_polls))
        for thread in threads:
            thread.start()
        run(server, listener)

    monkeypatch.setattr(tinker_app, "make_app", make_app_with_endless_request)
    monkeypatch.setattr(web, "run", run_with_client)
    command = ["serve", str(tiny), "--train", "--port", "0", "--grace", str(GRACE_S)]
    assert main([*command, "--checkpoints", str(tmp_path / "adapters")]) == 0
    assert time.monotonic() - stopped_at[0] < GRACE_S, "it waited for the grace time"
    for thread in threads:
        thread.join(300)
    assert statuses == [503] and "Traceback" not in capfd.readouterr().err

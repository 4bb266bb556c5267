"""`postgrad serve` as a process: 200 clients at once, bounded memory and a clean shutdown."""

import http.client
import json
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from serve_process import command
from tiny_runs import config_of
from waiting import in_threads, join, wait_for

from postgrad.cluster.host import build_host
from postgrad.rollout.engine import Request, Sampling

pytestmark = pytest.mark.slow
CLIENTS = 200
PROMPT = [1, 10, 2, 15]


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def test_two_hundred_clients_at_once_all_answered_with_bounded_memory(tiny):
    """Each client sends three requests, one of them streamed; answers equal the native engine's."""
    native = build_host(config_of("grpo", tiny)).engine
    wanted = [
        c.tokens
        for c in native.generate([Request(PROMPT, list(range(CLIENTS)))], Sampling(1.0, 24))[0]
    ]
    with command(str(tiny), "--name", "tiny", "--threads", "1") as server:
        assert server.process is not None

        def round_trip(found: dict[int, list[int]]) -> None:
            join(in_threads(*(partial(client, seed, found) for seed in range(CLIENTS))))

        def client(seed: int, found: dict[int, list[int]]) -> None:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24}
            body |= {"seed": seed, "return_token_ids": True}
            if seed % 5 == 0:  # text prompts and stop strings: the tokenizer serves several threads
                body |= {"prompt": "1+2=", "stop": ["no such"]}
            if seed % 3:
                found[seed] = server.ask("/v1/completions", body)[1]["choices"][0]["token_ids"]
            else:
                found[seed] = streamed(server.port, body | {"stream": True})

        first: dict[int, list[int]] = {}
        round_trip(first)
        before = resident_mib(server.process.pid)
        for _ in range(2):
            again: dict[int, list[int]] = {}
            round_trip(again)
            assert again == first and len(first) == CLIENTS
        grown = resident_mib(server.process.pid) - before
        assert [first[seed] for seed in range(CLIENTS)] == wanted
        assert grown < 40, f"resident memory grew by {grown:.0f} MiB over 400 more requests"
        assert server.rows() == 0


def streamed(port: int, body: dict) -> list[int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    events = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert events[-2] == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    return [i for piece in pieces for i in piece["choices"][0]["token_ids"]]


def test_a_client_that_was_connected_is_answered_when_the_server_stops(tiny):
    with command(str(tiny), "--name", "tiny", "--rows", "4", "--threads", "1") as server:
        assert server.process is not None
        waiting = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=600) for _ in "ab"]
        for connection in waiting:
            connection.connect()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 5})
        waiting[0].request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert waiting[0].getresponse().status in (200, 503)
        assert server.process.wait(300) == 0, "the other connection never sends a request"


@pytest.mark.parametrize(
    ("number", "host"), [(signal.SIGINT, "127.0.0.1"), (signal.SIGTERM, "0.0.0.0")]
)
def test_stopping_ends_running_requests_and_answers_waiting_ones(tiny, number, host):
    """The second listens on all addresses, so it has made and printed a token that it requires."""
    words = f"{tiny} --name tiny --rows 4 --threads 1 --grace 20 --host {host}".split()
    with command(*words) as server:
        assert server.process is not None and bool(server.token) == (host == "0.0.0.0")
        assert server.ask("/v1/models", headers={"Authorization": "Bearer wrong"})[0] == (
            401 if server.token else 200
        )
        answers: list[tuple[int, int]] = []

        def client(seed: int) -> None:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 500, "seed": seed, "n": 8}
            body |= {"temperature": 5.0, "return_token_ids": True}
            status, answer, _ = server.ask("/v1/completions", body)
            answers.append((status, len(answer.get("choices", []))))

        threads = in_threads(*(partial(client, 100 * i) for i in range(20)))
        wait_for(lambda: server.rows() > 100, "requests to pile up")
        server.process.send_signal(number)
        join(threads)
        assert server.process.wait(300) == 0
        assert len(answers) == 20
        assert {status for status, _ in answers} <= {200, 503}
        assert (503, 0) in answers
        assert all(choices == 8 for status, choices in answers if status == 200)

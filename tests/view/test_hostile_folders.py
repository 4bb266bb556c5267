"""One damaged or hostile folder does not hide the others: it is shown as "cannot be read: why"."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from view_runs import WrittenRun, serving
from waiting import wait_for

LINE = b'{"step": 1, "reward/mean": 0.5}\n'
LAUGHS = "\n".join(
    ["a0: &a0 [ha, ha]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
)
MERGES = "a0: &a0 {b: 1}\n" + "\n".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 30)
)
NESTED = b"[" * (1 << 20) + b"]" * (1 << 20)
OBJECTS = b'{"step": 1, "a": ' + b'{"a":' * 500 + b"1" + b"}" * 501 + b"\n"
MANY_KEYS = json.dumps({"step": 1} | {f"k{i}": i for i in range(300_000)}).encode()
MANY_METRICS = b"".join(b'{"step": %d, "m%d": 1}\n' % (i, i) for i in range(3000))
SHAPES = {"HUGE": b"9" * 100_000, "LONG": b"9" * 4000}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


Content = bytes | str | Callable[[Path], None]
# name of the case: files of the folder, and what its reason says ("" for a run that can be read)
RUNS: dict[str, tuple[dict[str, Content], str]] = {
    "aliases": ({"config.yaml": LAUGHS}, "config.yaml: it has YAML aliases"),
    "merges": ({"config.yaml": MERGES}, "config.yaml: it has YAML aliases"),
    "recursive": ({"config.yaml": "a: &a [*a]"}, "config.yaml: it has YAML aliases"),
    "yaml brackets": ({"config.yaml": NESTED[: 1 << 19]}, "config.yaml: it has more than 40"),
    "yaml bytes": ({"config.yaml": NESTED}, "config.yaml: it is larger than 1 MiB"),
    "yaml values": ({"config.yaml": "- a\n" * 200_000}, "config.yaml: it has more than 50,000"),
    "yaml date": ({"config.yaml": "a: 2001-99-99"}, "config.yaml: it is not YAML"),
    "yaml key": ({"config.yaml": "? [1, 2]\n: 3"}, "config.yaml: "),
    "yaml object": ({"config.yaml": "a: !!python/object:os.system x"}, "config.yaml: it is not"),
    "yaml set": ({"config.yaml": "a: !!set {b}"}, "config.yaml: it has a value of the type set"),
    "yaml list": ({"config.yaml": "[1]"}, "config.yaml: it is not a YAML mapping"),
    "yaml bits": ({"config.yaml": b"\xff\xfe\x00\xd8"}, "config.yaml: it is not YAML"),
    "yaml integer": ({"config.yaml": b"training: {steps: %b}" % SHAPES["HUGE"]}, ""),
    "yaml sixties": ({"config.yaml": "a: 1" + ":59" * 300_000}, "config.yaml: it is not YAML"),
    "yaml fifo": ({"config.yaml": fifo}, "config.yaml: it is not a regular file"),
    "metrics fifo": (
        {"metrics.jsonl": fifo, "config.yaml": "a: 1", "checkpoints/latest": "step-1"},
        "metrics.jsonl: it is not a regular file",
    ),
    "events fifo": ({"events.jsonl": fifo}, "events.jsonl: it is not a regular file"),
    "lock fifo": ({".lock": fifo}, ".lock: it is not a regular file"),
    "device out of the folder": ({"config.yaml": device}, ""),
    "brackets": ({"metrics.jsonl": LINE + NESTED}, "metrics.jsonl: a line is longer than"),
    "objects": ({"metrics.jsonl": OBJECTS}, "metrics.jsonl: it has more than 40 levels"),
    "keys": ({"metrics.jsonl": LINE + MANY_KEYS + b"\n"}, "metrics.jsonl: a line is longer"),
    "metrics": ({"metrics.jsonl": MANY_METRICS}, "metrics.jsonl: it has more than 1000 metrics"),
    "some keys": (
        {"metrics.jsonl": json.dumps({"step": 1} | dict.fromkeys(map(str, range(30_000)))) + "\n"},
        "metrics.jsonl: it has more than 20,000 keys",
    ),
    "long key": ({"metrics.jsonl": b'{"step": 1, "%b": 2}\n' % (b"k" * 5000)}, "metrics.jsonl: a"),
    "integers": (
        {"metrics.jsonl": b'{"step": 1, "a": %b, "time": %b}\n' % (SHAPES["LONG"], SHAPES["HUGE"])},
        "",
    ),
    "step": ({"metrics.jsonl": b'{"step": %b}\n' % SHAPES["LONG"]}, ""),
    "odd values": ({"metrics.jsonl": b'{"step": 1, "time": [1], "loss": {"a": 1}}\n'}, ""),
    "half a character": ({"metrics.jsonl": b'{"step": 1, "\\ud800": 2}\n'}, ""),
    "names": ({"metrics.jsonl": b'{"step": 1, "constructor": 1, "__proto__": 2}\n'}, ""),
    "event": (
        {"events.jsonl": b'{"event": "note", "time": "never", "step": {}, "text": [[]]}\n'},
        "",
    ),
    "event levels": ({"events.jsonl": NESTED}, ""),  # only the end of a long file is read
    "many evaluations": ({"eval/a/summary.json": MANY_KEYS}, ""),
    "summary": ({"eval/a/summary.json": NESTED}, ""),
    "responses": ({"eval/a/settings.json": "{}", "eval/a/set.jsonl": NESTED}, ""),
    "entropy": ({"entropy.json": b'{"layers": [{"number": %b}]}' % SHAPES["HUGE"]}, ""),
    "entropy fifo": ({"eval/b/entropy.json": fifo}, ""),
    "tokenizer": ({"checkpoints/latest": fifo, "tokenizer.json": fifo}, ""),
    "parquet fifo": ({"rollouts/step-000001.parquet": fifo}, ""),
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    WrittenRun(root / "good").steps(3)
    for name, (files, _) in RUNS.items():
        for file, content in {"metrics.jsonl": LINE, **files}.items():
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif isinstance(content, str):
                path.write_text(content)
            else:
                content(path)
    return root


@pytest.fixture(scope="module")
def served(hostile):
    with serving(hostile) as server:
        yield server


@pytest.mark.parametrize("name", RUNS)
def test_a_hostile_run_says_why_it_cannot_be_read(served, name):
    runs = {run["name"]: run for run in served.json("/api/runs")["runs"]}
    assert runs["good"]["state"] == "stopped" and runs["good"]["step"] == 3
    why = RUNS[name][1]
    run = runs[name]
    assert (run["state"] == "unreadable") == bool(why), run
    assert run["reason"].startswith(why)


PATHS = (
    "run?run={}",
    "metrics?run={}",
    "compare?run={}&run=good",
    "groups?run={}&step=1",
    "group?run={}&step=1&group=0",
    "problem?run={}&uid=a",
    "search?run={}&search=a",
    "responses?eval={}/eval/a&set=set",
    "response?eval={}/eval/a&set=set&uid=0",
)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_every_request_about_a_hostile_run_gets_json(served, name):
    began = time.monotonic()
    for path in (*PATHS, "evaluations", "entropies", "pivot"):
        status, _, body = served.get(f"/api/{path.format(name.replace(' ', '%20'))}")
        answer = json.loads(body)
        assert status in (200, 404, 503) and (status == 200 or answer["error"]), (path, answer)
    assert time.monotonic() - began < 30


def test_an_unforeseen_error_of_one_run_hides_no_other(served, monkeypatch):
    from postgrad.view.runs import Run

    read = Run.overview
    broken = {"good": 0}

    def overview(run: Run) -> dict:
        return 1 // broken.get(run.name, 1) and read(run)  # type: ignore[return-value]

    monkeypatch.setattr(Run, "overview", overview)
    with serving(served.root) as server:
        runs = {run["name"]: run for run in server.json("/api/runs")["runs"]}
    assert len(runs) == len(RUNS) + 1 and "ZeroDivisionError" in runs["good"]["reason"]
    assert runs["good"].keys() == runs["names"].keys()


@pytest.mark.parametrize("query", ["from=abc", "run=good&from=abc", "run=good&generation=1.5"])
def test_a_live_stream_from_no_number_is_refused(served, query):
    status, _, body = served.get(f"/api/live?{query}")
    assert status == 400 and "not an integer" in json.loads(body)["error"]


def test_headers_that_do_not_arrive_close_the_connection(served, monkeypatch):
    import socket

    from postgrad.net import server as net_server

    monkeypatch.setattr(net_server, "HEADER_TIMEOUT_S", 0.3)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert client.recv(100) == b""


def test_connections_are_limited(hostile, monkeypatch):
    import socket

    from postgrad.view import server as server_module

    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
    with serving(hostile) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
        wait_for(lambda: server.get("/api/about")[0] == 503, "a refused connection")
        for client in idle:
            client.close()

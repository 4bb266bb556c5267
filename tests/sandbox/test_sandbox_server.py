"""`postgrad sandbox`: endpoints, limits, token, malformed and large requests, queue, shutdown."""

import base64
import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from tables import tabled
from waiting import in_threads, is_alive, join, wait_for

from postgrad.cli.main import main
from postgrad.problem import Failure, Problem, Score
from postgrad.sandbox.local import probe
from postgrad.sandbox.outcome import SandboxError
from postgrad.sandbox.remote import FusionSandbox, RemoteSandbox
from postgrad.verifiers.pool import VerifierPool

try:
    probe()
    MISSING = ""
except SandboxError as reason:
    MISSING = str(reason)
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox here: {MISSING}")

ADD = "def add(a, b):\n    return a + b\n"
LOOP = "def f():\n    while True: pass\n"


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    token: str

    def ask(
        self,
        path: str,
        body: object = None,
        token: str | None = None,
        content_type: str = "application/json",
    ) -> tuple[int, dict]:
        """Send a request (GET without a body) and return the status and the reply."""
        headers = {"Content-Type": content_type}
        token = self.token if token is None else token
        if token:
            headers["Authorization"] = f"Bearer {token}".encode()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        if body is None:
            response = httpx.get(url, headers=headers, timeout=600)
        else:
            response = httpx.post(url, content=content, headers=headers, timeout=600)
        if response.text.startswith("{"):
            return response.status_code, response.json()
        return response.status_code, {"error": response.text}


def start(*options: str, token: str = "") -> Server:
    """Start the server and wait for the line with its address. It may print a token before."""
    command = [sys.executable, "-m", "postgrad.cli.main", "sandbox", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = ""
    while "http://" not in line:
        line = process.stdout.readline()
        assert line, "the server ended"
        if line.startswith("token: "):
            token = line.removeprefix("token: ").strip()
    return Server(process, int(line.strip().rpartition(":")[2]), token)


def stop(server: Server, signal_number: int = signal.SIGTERM) -> int:
    """Send a signal, wait, and return the exit code."""
    server.process.send_signal(signal_number)
    try:
        return server.process.wait(300)
    finally:
        server.process.kill()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start("--workers", "1", "--queue", "1", "--token", "secret", token="secret")
    yield running
    assert stop(running) == 0


@needs_sandbox
def test_health_needs_no_token(server):
    assert server.ask("/health", token="") == (200, {"status": "healthy"})


@pytest.mark.slow
@needs_sandbox
def test_asserts(server):
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 1"]
    request = {"program": ADD, "tests": tests, "max_execution_time": 5.0}
    status, reply = server.ask("/test_program", request)
    assert status == 200
    assert reply["results"] == [1, 1, 0]
    assert 0 < reply["runtimes"][0] < 5
    assert reply["runtimes"][2] == -1.0
    _, reply = server.ask("/test_program", request | {"tests": json.dumps(tests)})
    assert reply["results"] == [1, 1, 0], "the list may come as JSON text"
    _, reply = server.ask("/test_program", {"program": LOOP, "tests": ["f()", "assert 1"]})
    assert reply["results"] == [0, 1]


@pytest.mark.slow
@needs_sandbox
def test_stdio(server):
    pairs = [("1", "2"), ("100", "101"), ("1", "2.0"), ("1", "3")]
    request = {
        "program": "print(int(input()) + 1)",
        "tests": [{"input": text, "output": expected} for text, expected in pairs],
        "max_execution_time": 5.0,
    }
    status, reply = server.ask("/test_program_stdio", request)
    assert status == 200
    assert reply["results"] == [1, 1, 1, 0]


@needs_sandbox
def test_programs_may_import_os_but_see_nothing(server):
    program = "import os\ndef f(): return sorted(os.environ), os.path.exists('/etc/passwd')"
    tests = ["assert not f()[1] and 'USER' not in f()[0]"]
    request = {"program": program, "tests": tests, "max_execution_time": 5}
    status, reply = server.ask("/test_program", request)
    assert (status, reply["results"]) == (200, [1])


def asserts_request(**fields: object) -> dict[str, object]:
    return {"program": ADD, "tests": ["assert 1"]} | fields


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("path", ["/test_program", "/test_program_stdio", "/run_code"])
@pytest.mark.parametrize(
    ("body", "culprit"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"", "not JSON"),
        ([], "must be a JSON object"),
        ({"program": 3, "tests": [], "code": 3}, "string"),
        (b" " * (17 << 20), "16 MiB"),
    ],
)
def test_invalid_requests(server, path, body, culprit):
    """Wrong fields are in test_request_fields.py; the server answers the next request."""
    try:
        status, reply = server.ask(path, body)
        expected = 422 if isinstance(body, dict) and path == "/run_code" else 400
        assert status == (413 if culprit == "16 MiB" else expected)
        assert culprit in reply["error"]
        assert ("detail" in reply) == isinstance(body, dict)
    except httpx.TransportError:  # the server may close while we still send what is too large
        assert culprit == "16 MiB"
    assert server.ask("/health")[0] == 200


@needs_sandbox
def test_other_methods_paths_and_types(server):
    assert server.ask("/test_program")[0] == 405
    assert server.ask("/nowhere")[0] == 404
    octets = "application/octet-stream"
    assert server.ask("/test_program", asserts_request(), content_type=octets)[0] == 400


@needs_sandbox
@pytest.mark.parametrize(
    "header",
    [
        ("Host", "a-website.example"),
        ("Origin", "http://a.example"),
        ("Sec-Fetch-Site", "cross-site"),
    ],
)
def test_pages_of_other_sites_are_rejected(server, header):
    """A browser on this machine reaches the server; a page must not run programs in it."""
    url = f"http://127.0.0.1:{server.port}/test_program"
    headers = {"Authorization": f"Bearer {server.token}", header[0]: header[1]}
    response = httpx.post(url, json=asserts_request(), headers=headers, timeout=600)
    assert response.status_code == 403


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("token", ["wrong", "secre", "secrets", "é".encode().decode("latin-1")])
def test_a_token_is_required(server, token):
    body = {"program": ADD, "tests": ["assert add(1, 2) == 3"], "max_execution_time": 5}
    assert server.ask("/test_program", body, token=token)[0] == 401
    assert server.ask("/test_program", body, token="")[0] == 401
    assert server.ask("/test_program", body)[0] == 200


@pytest.mark.slow
@needs_sandbox
def test_the_queue_is_bounded_and_recovers(server, children):
    """With one worker and a queue of one, some of six requests get 429, the others are served."""
    replies: list[tuple[int, dict]] = []
    body = {
        "program": "import time\ndef f(): time.sleep(3)",
        "tests": ["f()"],
        "max_execution_time": 20,
    }

    def work() -> None:
        replies.append(server.ask("/test_program", body))

    threads = in_threads(work)
    wait_for(lambda: children(server.process.pid), "the first program to run")
    join(threads + in_threads(*[work] * 5))
    statuses = [status for status, _ in replies]
    assert statuses.count(200) >= 2
    assert statuses.count(429) >= 1
    assert statuses.count(200) + statuses.count(429) == 6
    assert all(reply["results"] == [1] for status, reply in replies if status == 200)
    assert server.ask("/test_program", body)[0] == 200


@pytest.mark.slow
@needs_sandbox
def test_a_client_that_disconnects_frees_its_place(server):
    body = json.dumps(
        {
            "program": "import time\ndef f(): time.sleep(1)",
            "tests": ["f()"],
            "max_execution_time": 20,
        }
    )
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
        connection.request("POST", "/test_program", body, headers)
        time.sleep(0.1)
        connection.close()
    quick = asserts_request(tests=["assert add(1, 2) == 3"], max_execution_time=5)
    wait_for(lambda: server.ask("/test_program", quick)[0] == 200, "a free place")


@pytest.mark.slow
@needs_sandbox
@tabled("path, body")
def test_the_jobs_of_clients_that_are_gone_end_at_once(server, children, path, body):
    """One runs, one is queued; both would hold the only worker for minutes."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    gone = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=600) for _ in range(2)]
    for connection in gone:
        connection.request("POST", path, json.dumps(body), headers)
    wait_for(lambda: children(server.process.pid), "the first program to run")
    began = time.monotonic()
    for connection in gone:
        connection.close()
    quick = {"program": ADD, "tests": ["assert add(1, 2) == 3"], "max_execution_time": 5}
    wait_for(lambda: server.ask("/test_program", quick)[0] == 200, "a free worker")
    assert time.monotonic() - began < 40
    wait_for(lambda: not children(server.process.pid), "the programs to end")


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_clean_shutdown_while_a_program_runs(number, children):
    server = start("--workers", "1")
    body = {"program": LOOP, "tests": ["f()"], "max_execution_time": 60}

    def work() -> None:
        with contextlib.suppress(httpx.TransportError):
            server.ask("/test_program", body)

    threads = in_threads(work)
    wait_for(lambda: children(server.process.pid), "the program to run")
    inside = children(server.process.pid)
    assert stop(server, number) == 0
    join(threads)
    wait_for(lambda: not any(is_alive(pid) for pid in inside), "the program to end")


@pytest.mark.slow
@needs_sandbox
def test_the_code_verifier_can_use_a_server(server, monkeypatch):
    """Without bubblewrap here, results can only come from the server."""
    responses = [f"```python\ndef add(a, b):\n    return a {sign} b\n```" for sign in "+-"]
    tests = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])
    pairs = json.dumps([{"input": "1", "output": "2"}])
    items = [(response, Problem("p", (), tests, "code")) for response in responses]
    items.append(("```python\nprint(int(input()) + 1)\n```", Problem("p", (), pairs, "code")))
    undecidable = "import threading\nassert add(threading.Lock(), 1)"
    half_decidable = Problem("p", (), json.dumps([undecidable, "assert add(0, 1) == 1"]), "code")
    items += [(response, half_decidable) for response in responses]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("POSTGRAD_SANDBOX", f"http://127.0.0.1:{server.port}/")
    monkeypatch.setenv("POSTGRAD_SANDBOX_TOKEN", "secret")
    with VerifierPool(workers=2, timeout_s=30) as pool:
        results = pool.verify(items, ["code"] * 5)
    assert [(r.value, r.parts["passed"]) for r in results[:3]] == [
        (1.0, 1.0),
        (0.0, 0.5),
        (1.0, 1.0),
    ]
    assert results[3].kind == "unsupported" and "lock" in results[3].reason
    assert results[4] == Score(0.0, {"answer": 0.0, "passed": 0.0, "format": 1.0})
    monkeypatch.setenv("POSTGRAD_SANDBOX_TOKEN", "wrong")
    with VerifierPool(workers=1, timeout_s=30) as pool:
        (result,) = pool.verify(items[:1], ["code"])
    assert result.kind == "error"
    assert "401" in result.reason
    with pytest.raises(SandboxError, match="gave no result"):
        RemoteSandbox("http://127.0.0.1:9", retry_s=0.1).test_asserts("", ["assert 1"])


def code_request(code: str, **fields: object) -> dict[str, object]:
    """Return a request as verl sends it."""
    limits = {"compile_timeout": 10, "run_timeout": 10, "memory_limit_MB": 1024}
    return (
        {"code": code, "stdin": None, "language": "python", "files": {}, "fetch_files": []}
        | limits
        | fields
    )


HELLO = "print('x', flush=True)\n"
LARGE = "bytes({} << 20)\nprint('x')"


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize(
    ("body", "status", "ended", "code", "stdout"),
    [
        (code_request("print(int(input()) + 1)", stdin="41"), "Success", "Finished", 0, "42\n"),
        (code_request(HELLO + "raise SystemExit(3)"), "Failed", "Finished", 3, "x\n"),
        (code_request("print(1"), "Failed", "Finished", 1, ""),
        (
            code_request(HELLO + "while True: pass", run_timeout=1),
            "Failed",
            "TimeLimitExceeded",
            None,
            "x\n",
        ),
        (code_request(LARGE.format(200), memory_limit_MB=-1), "Success", "Finished", 0, "x\n"),
        (code_request(LARGE.format(200), memory_limit_MB=100), "Failed", "Finished", 1, ""),
        (code_request(LARGE.format(800), memory_limit_MB=1024), "Failed", "Finished", 1, ""),
    ],
)
def test_run_code_replies_as_sandbox_fusion(server, body, status, ended, code, stdout):
    """The server's own memory limit is 512 MiB; a request cannot raise it."""
    http_status, reply = server.ask("/run_code", body)
    assert http_status == 200
    result = reply.pop("run_result")
    assert reply == {
        "status": status,
        "message": "",
        "compile_result": None,
        "executor_pod_name": None,
        "files": {},
    }
    assert (result["status"], result["return_code"], result["stdout"]) == (ended, code, stdout)
    assert 0 < result["execution_time"] < 10
    assert bool(result["stderr"]) == (code == 1)


@pytest.mark.slow
@needs_sandbox
def test_a_program_that_prints_too_much_has_failed(server):
    _, reply = server.ask("/run_code", code_request("while True: print('x' * 1000)"))
    assert reply["status"] == "Failed"
    assert reply["run_result"]["status"] == "Finished"
    assert reply["run_result"]["return_code"] != 0


@pytest.mark.slow
@needs_sandbox
def test_run_code_accepts_the_token_as_a_password(server):
    """verl can send a token in the address only: http://any:secret@host/run_code."""
    assert server.ask("/run_code", code_request(""), token="wrong")[0] == 401
    words = [("Basic", b"verl:secret", 200), ("Basic", b"verl:secre", 401)]
    for kind, word, status in (*words, ("Bearer", b"verl:secret", 401)):
        header = {"Authorization": f"{kind} {base64.b64encode(word).decode()}"}
        url = f"http://127.0.0.1:{server.port}/run_code"
        response = httpx.post(url, json=code_request(""), headers=header, timeout=600)
        assert response.status_code == status


@pytest.mark.slow
@needs_sandbox
def test_the_fusion_client_works_with_our_server(server, monkeypatch):
    """Asserts need a second process, which our sandbox forbids: they are a Failure."""
    url = f"http://127.0.0.1:{server.port}"
    outcome = FusionSandbox(f"{url}/run_code", "secret").run("print(input())", "x")
    assert (outcome.code, outcome.output, outcome.stopped) == (0, "x\n", "")
    outcome = RemoteSandbox(url, "secret").run("print(2)")
    assert (outcome.code, outcome.output) == (0, "2\n"), (
        "our own client runs a single program by the same route"
    )
    pairs = json.dumps([{"input": "1", "output": "2"}, {"input": "-5", "output": "-4"}])
    programs = ["print(int(input()) + 1)", "print(abs(int(input())) + 1)", "print("]
    programs += ["import sys; sys.exit(0)", "def f(): pass"]
    asserts = json.dumps(["assert f() is None"])
    items = []
    for program, tests in zip(programs, [pairs] * 4 + [asserts], strict=True):
        items.append((f"```python\n{program}\n```", Problem("p", (), tests, "code")))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("POSTGRAD_SANDBOX", f"{url}/run_code")
    monkeypatch.setenv("POSTGRAD_SANDBOX_TOKEN", "secret")
    with VerifierPool(workers=1, timeout_s=30) as pool:
        results = pool.verify(items, ["code"] * 5)
    assert [result.parts["passed"] for result in results if isinstance(result, Score)] == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]
    assert isinstance(results[4], Failure)
    assert "for asserts leave /run_code off" in results[4].reason


@pytest.mark.slow
@needs_sandbox
def test_a_server_beyond_loopback_always_has_a_token():
    server = start("--host", "0.0.0.0")
    try:
        assert len(server.token) >= 20
        body = {"program": ADD, "tests": ["assert add(1, 2) == 3"], "max_execution_time": 5}
        assert server.ask("/test_program", body, token="")[0] == 401
        assert server.ask("/test_program", body)[0] == 200
    finally:
        assert stop(server) == 0


@pytest.mark.slow
@needs_sandbox
def test_a_host_that_does_not_exist_is_refused(capsys):
    assert main(["sandbox", "--host", "no.such.host.invalid", "--port", "0"]) == 2
    assert "cannot listen" in capsys.readouterr().err

"""`postgrad sandbox`: the endpoints of the specification, limits, token, malformed and huge requests, the queue, the end."""

import base64
import contextlib
import http.client
import json
import pickle
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from postgrad.cli.main import main
from postgrad.problem import Failure, Problem, Score
from postgrad.sandbox.client import RemoteSandbox
from postgrad.sandbox.fusion import FusionSandbox
from postgrad.sandbox.local import probe
from postgrad.sandbox.outcome import SandboxError
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
        kind: str = "application/json",
    ) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": kind}
        )
        if given := self.token if token is None else token:
            request.add_header("Authorization", f"Bearer {given}")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else {
                "error": text.decode()
            }


def start(*words: str, token: str = "") -> Server:
    command = [sys.executable, "-m", "postgrad.cli.main", "sandbox", "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = []
    while not said or "http://" not in said[-1]:
        said.append(process.stdout.readline())
        assert said[-1], said
    printed = next(
        (line.removeprefix("token: ").strip() for line in said if line.startswith("token: ")), token
    )
    return Server(process, int(said[-1].strip().rpartition(":")[2]), printed)


def stop(server: Server, number: int = signal.SIGTERM) -> int:
    server.process.send_signal(number)
    try:
        return server.process.wait(60)
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
def test_the_numbers_of_the_specification(server):
    """Classmate's 8.11."""
    assert server.ask("/health", token="") == (200, {"status": "healthy"})
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 1"]
    status, answer = server.ask(
        "/test_program", {"program": ADD, "tests": tests, "max_execution_time": 5.0}
    )
    assert (
        status == 200
        and answer["results"] == [1, 1, 0]
        and answer["runtimes"][2] == -1.0
        and 0 < answer["runtimes"][0] < 5
    )
    pairs = [
        {"input": a, "output": b} for a, b in (("1", "2"), ("100", "101"), ("1", "2.0"), ("1", "3"))
    ]
    body = {"program": "print(int(input()) + 1)", "tests": pairs, "max_execution_time": 5.0}
    status, answer = server.ask("/test_program_stdio", body)
    assert status == 200 and answer["results"] == [1, 1, 1, 0]
    assert server.ask("/test_program", {"program": LOOP, "tests": ["f()", "assert 1"]})[1][
        "results"
    ] == [0, 1]
    status, answer = server.ask(
        "/test_program", {"program": ADD, "tests": json.dumps(tests), "max_execution_time": 5}
    )
    assert answer["results"] == [1, 1, 0], "the list may come as a JSON text"


@needs_sandbox
def test_what_the_reference_refused_by_its_words_is_run_behind_walls(server):
    """`import os` may stand in a program; what it would reach is not there."""
    program = "import os\ndef f(): return sorted(os.environ), os.path.exists('/etc/passwd')"
    status, answer = server.ask(
        "/test_program",
        {
            "program": program,
            "tests": ["assert not f()[1] and 'USER' not in f()[0]"],
            "max_execution_time": 5,
        },
    )
    assert (status, answer["results"]) == (200, [1])


PICKLED = base64.b64encode(zlib.compress(pickle.dumps(["assert 1"]))).decode()


@needs_sandbox
@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b"", 400, "not JSON"),
        ([], 400, "object with `program`"),
        ({}, 400, "object with `program`"),
        ({"program": 3, "tests": ["assert 1"]}, 400, "object with `program`"),
        ({"program": ADD}, 400, "`tests` must be a list"),
        ({"program": ADD, "tests": []}, 400, "`tests` must be a list"),
        ({"program": ADD, "tests": {"a": 1}}, 400, "`tests` must be a list"),
        ({"program": ADD, "tests": [{"input": "1", "output": "2"}]}, 400, "list of texts"),
        ({"program": ADD, "tests": PICKLED}, 400, "pickled tests are not accepted"),
        ({"program": ADD, "tests": ["assert 1"], "max_execution_time": 0}, 400, "max_execution_time"),
        ({"program": ADD, "tests": ["assert 1"], "max_execution_time": 1e9}, 400, "max_execution_time"),
        ({"program": ADD, "tests": ["assert 1"], "max_execution_time": "1"}, 400, "max_execution_time"),
        ({"program": ADD, "tests": ["assert 1"], "max_execution_time": True}, 400, "max_execution_time"),
        ({"program": ADD, "tests": ["assert 1"], "setup": 3}, 400, "`setup`"),
        ({"program": "#" * 1_100_000, "tests": ["assert 1"]}, 413, "longer than"),
        ({"program": ADD, "tests": ["assert 1"] * 1001}, 413, "more than 1000"),
        (b" " * (17 << 20), 413, "larger than 16 MiB"),
        ({"program": "def f(x): 1", "tests": ["class M: pass\nassert f(M())"], "max_execution_time": 5}, 422, "cannot be handed"),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_served(server, body, status, says):
    try:
        code, answer = server.ask("/test_program", body)
    except (
        urllib.error.URLError,
        ConnectionError,
    ):  # the server may close while we still send what is too large
        assert status == 413
        return
    assert code == status and says in answer["error"]


@needs_sandbox
def test_other_methods_paths_and_types(server):
    assert server.ask("/test_program")[0] == 405
    assert server.ask("/nowhere")[0] == 404
    assert (
        server.ask(
            "/test_program",
            {"program": ADD, "tests": ["assert 1"]},
            kind="application/octet-stream",
        )[0]
        == 400
    )
    assert server.ask("/test_program_stdio", {"program": ADD, "tests": ["assert 1"]})[0] == 400
    assert (
        server.ask("/test_program_stdio", {"program": ADD, "tests": [{"input": 1, "output": "1"}]})[
            0
        ]
        == 400
    )


@needs_sandbox
@pytest.mark.parametrize("token", ["wrong", "secre", "secrets", "é".encode().decode("latin-1")])
def test_the_token_is_asked_for(server, token):
    body = {"program": ADD, "tests": ["assert add(1, 2) == 3"], "max_execution_time": 5}
    assert server.ask("/test_program", body, token=token)[0] == 401
    assert server.ask("/test_program", body, token="")[0] == 401
    assert server.ask("/test_program", body)[0] == 200


@needs_sandbox
def test_the_queue_is_bounded_and_recovers(server):
    """One place to work and one to wait: of six requests at once some are turned away at once, the others are served."""
    answers: list[tuple[int, dict]] = []
    body = {
        "program": "import time\ndef f(): time.sleep(1.5)",
        "tests": ["f()"],
        "max_execution_time": 20,
    }

    def work() -> None:
        answers.append(server.ask("/test_program", body))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(100)
    counts = {status: [code for code, _ in answers].count(status) for status in (200, 429)}
    assert counts[200] >= 2 and counts[429] >= 1 and counts[200] + counts[429] == 6
    assert all(answer["results"] == [1] for code, answer in answers if code == 200)
    assert server.ask("/test_program", body)[0] == 200


@needs_sandbox
def test_a_client_that_leaves_gives_its_place_back(server):
    body = json.dumps(
        {
            "program": "import time\ndef f(): time.sleep(1)",
            "tests": ["f()"],
            "max_execution_time": 20,
        }
    )
    for _ in range(3):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
        connection.request("POST", "/test_program", body, headers)
        time.sleep(0.1)
        connection.close()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        status, _ = server.ask(
            "/test_program",
            {"program": ADD, "tests": ["assert add(1, 2) == 3"], "max_execution_time": 5},
        )
        if status == 200:
            return
        assert status == 429
        time.sleep(0.2)
    pytest.fail("the places never came back")


@needs_sandbox
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_end_while_a_program_runs(number, children):
    server = start("--workers", "1")
    body = {"program": LOOP, "tests": ["f()"], "max_execution_time": 60}

    def work() -> None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, http.client.HTTPException):
            server.ask("/test_program", body)

    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + 60
    while not (inside := children(server.process.pid)) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)
    assert inside and stop(server, number) == 0
    thread.join(60)
    end = time.monotonic() + 60
    while any(alive(pid) for pid in inside) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in inside)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_sandbox
def test_the_code_verifier_can_use_a_sandbox_elsewhere(server, monkeypatch):
    """Here without bubblewrap: the verdicts can only come from the server. A wrong token and no server are Failures."""
    answers = [
        "```python\ndef add(a, b):\n    return a + b\n```",
        "```python\ndef add(a, b):\n    return a - b\n```",
    ]
    tests = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"])
    pairs = json.dumps([{"input": "1", "output": "2"}])
    items = [(answer, Problem("p", (), tests, "code")) for answer in answers]
    items.append(("```python\nprint(int(input()) + 1)\n```", Problem("p", (), pairs, "code")))
    items.append(
        (answers[0], Problem("p", (), json.dumps(["class M: pass\nassert add(M(), 1)"]), "code"))
    )
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("POSTGRAD_SANDBOX", f"http://127.0.0.1:{server.port}/")
    monkeypatch.setenv("POSTGRAD_SANDBOX_TOKEN", "secret")
    with VerifierPool(workers=2, timeout_s=30) as pool:
        results = pool.verify(items, ["code"] * 4)
    assert [(r.value, r.parts["passed"]) for r in results[:3]] == [
        (1.0, 1.0),
        (0.0, 0.5),
        (1.0, 1.0),
    ]
    assert isinstance(results[3], Failure) and results[3].kind == "unsupported"
    monkeypatch.setenv("POSTGRAD_SANDBOX_TOKEN", "wrong")
    with VerifierPool(workers=1, timeout_s=30) as pool:
        (result,) = pool.verify(items[:1], ["code"])
    assert isinstance(result, Failure) and result.kind == "error" and "401" in result.reason
    with pytest.raises(SandboxError, match="gave no verdict"):
        RemoteSandbox("http://127.0.0.1:9", patience_s=0.1).test_asserts("", ["assert 1"])


def code_request(code: str, **fields: object) -> dict[str, object]:
    """As verl sends it."""
    limits = {"compile_timeout": 10, "run_timeout": 10, "memory_limit_MB": 1024}
    return (
        {"code": code, "stdin": None, "language": "python", "files": {}, "fetch_files": []}
        | limits
        | fields
    )


@needs_sandbox
@pytest.mark.parametrize(
    ("request_", "status", "how", "code", "stdout"),
    [
        (code_request("print(int(input()) + 1)", stdin="41"), "Success", "Finished", 0, "42\n"),
        (code_request("print('x')\nraise SystemExit(3)"), "Failed", "Finished", 3, "x\n"),
        (code_request("print(1"), "Failed", "Finished", 1, ""),
        (code_request("print('x', flush=True)\nwhile True: pass", run_timeout=1), "Failed", "TimeLimitExceeded", None, "x\n"),
        (code_request("bytes(200 << 20)\nprint('x')", memory_limit_MB=-1), "Success", "Finished", 0, "x\n"),
        (code_request("bytes(200 << 20)\nprint('x')", memory_limit_MB=100), "Failed", "Finished", 1, ""),
        (code_request("bytes(800 << 20)\nprint('x')", memory_limit_MB=1024), "Failed", "Finished", 1, ""),
    ],
)  # fmt: skip
def test_a_program_in_the_words_of_sandbox_fusion(server, request_, status, how, code, stdout):
    """The server's own limit of memory, 512 MiB, counts where more is asked for."""
    answered, answer = server.ask("/run_code", request_)
    assert answered == 200 and answer.keys() == {
        "status",
        "message",
        "compile_result",
        "run_result",
        "executor_pod_name",
        "files",
    }
    assert (answer["status"], answer["message"], answer["compile_result"], answer["files"]) == (
        status,
        "",
        None,
        {},
    )
    result = answer["run_result"]
    assert (result["status"], result["return_code"], result["stdout"]) == (how, code, stdout)
    assert 0 < result["execution_time"] < 10 and bool(result["stderr"]) == (code == 1)


@needs_sandbox
def test_a_program_that_prints_too_much_has_failed(server):
    _, answer = server.ask("/run_code", code_request("while True: print('x' * 1000)"))
    assert (
        answer["status"] == "Failed"
        and answer["run_result"]["status"] == "Finished"
        and answer["run_result"]["return_code"] != 0
    )


@needs_sandbox
@pytest.mark.parametrize(
    ("body", "status", "field", "says"),
    [
        (
            code_request("int main() {}", language="cpp"),
            422,
            "language",
            "Input should be 'python'",
        ),
        (code_request("", language="cobol"), 422, "language", "Input should be 'python'"),
        (code_request("", language=None), 422, "language", "valid string"),
        ({"code": ""}, 422, "language", "Field required"),
        ({"language": "python"}, 422, "code", "Field required"),
        (code_request("", stdin=3), 422, "stdin", "valid string"),
        (code_request("", run_timeout=0), 422, "run_timeout", "at most 60 seconds"),
        (code_request("", run_timeout=61), 422, "run_timeout", "at most 60 seconds"),
        (code_request("", run_timeout=True), 422, "run_timeout", "at most 60 seconds"),
        (code_request("", memory_limit_MB=0.5), 422, "memory_limit_MB", "valid integer"),
        (code_request("", files={"a.txt": "eA=="}), 422, "files", "takes no files"),
        (code_request("", fetch_files=["a.txt"]), 422, "fetch_files", "takes no files"),
        (code_request("#" * 1_100_000), 413, "", "longer than"),
        ([], 400, "", "`code` and `language`"),
        (b"{", 400, "", "not JSON"),
    ],
)
def test_what_run_code_refuses(server, body, status, field, says):
    """422 with `detail`, as Sandbox Fusion refuses a language it does not know."""
    answered, answer = server.ask("/run_code", body)
    assert answered == status
    if status == 422:
        assert answer["detail"][0]["loc"] == ["body", field] and says in answer["detail"][0]["msg"]
    else:
        assert says in answer["error"]


@needs_sandbox
def test_run_code_wants_the_token_also_as_a_password(server):
    """verl can give a token in the address only: http://any:secret@host/run_code."""
    assert server.ask("/run_code", code_request(""), token="wrong")[0] == 401
    for kind, word, status in (
        ("Basic", b"verl:secret", 200),
        ("Basic", b"verl:secre", 401),
        ("Bearer", b"verl:secret", 401),
    ):
        header = {
            "Content-Type": "application/json",
            "Authorization": f"{kind} {base64.b64encode(word).decode()}",
        }
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/run_code", json.dumps(code_request("")), header)
        assert connection.getresponse().status == status
        connection.close()


@needs_sandbox
def test_our_client_speaks_fusion_to_our_server(server, monkeypatch):
    """Inputs and outputs by the whole code verifier; asserts need a second process, which our sandbox does not give: a Failure."""
    url = f"http://127.0.0.1:{server.port}"
    outcome = FusionSandbox(f"{url}/run_code", "secret").run("print(input())", "x")
    assert (outcome.code, outcome.output, outcome.stopped) == (0, "x\n", "")
    outcome = RemoteSandbox(url, "secret").run("print(2)")
    assert (outcome.code, outcome.output) == (0, "2\n"), (
        "our own client runs a single program by the same route"
    )
    pairs = json.dumps([{"input": "1", "output": "2"}, {"input": "-5", "output": "-4"}])
    programs = [
        "print(int(input()) + 1)",
        "print(abs(int(input())) + 1)",
        "print(",
        "import sys; sys.exit(0)",
    ]
    items = [
        (f"```python\n{program}\n```", Problem("p", (), pairs, "code")) for program in programs
    ]
    items.append(
        (
            "```python\ndef f(): pass\n```",
            Problem("p", (), json.dumps(["assert f() is None"]), "code"),
        )
    )
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
    assert (
        isinstance(results[4], Failure)
        and "for asserts leave /run_code off its address" in results[4].reason
    )


@needs_sandbox
def test_beyond_loopback_there_is_always_a_token():
    server = start("--host", "0.0.0.0")
    try:
        assert len(server.token) >= 20
        body = {"program": ADD, "tests": ["assert add(1, 2) == 3"], "max_execution_time": 5}
        assert (
            server.ask("/test_program", body, token="")[0] == 401
            and server.ask("/test_program", body)[0] == 200
        )
    finally:
        assert stop(server) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prot", "1"], "did you mean --port?"),
        (["--port"], "--port: "),
        (["--port", "x"], "--port: x"),
        (["--port", "70000"], "--port: 70000"),
        (["--workers", "0"], "--workers: 0"),
        (["--host", "no.such.host.invalid", "--port", "0"], "cannot listen"),
    ],
)
def test_wrong_options_are_one_line(words, message, capsys):
    if "--host" in words and MISSING:
        pytest.skip(f"no sandbox here: {MISSING}")
    assert main(["sandbox", *words]) == 2
    assert message in capsys.readouterr().err

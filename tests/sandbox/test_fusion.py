"""Programs and tests on a Sandbox Fusion server, with a fake server that has its protocol.

The fake server replies what a test has prepared, or runs the request as Fusion does but without
isolation: a folder with the files, the code as a file in it, one process. So it only gets programs
that are harmless outside a sandbox.
"""

import ast
import base64
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from refused import refused
from sandbox_programs import FAKE_TESTS, FAKES, RIGHT
from tables import tabled

from postgrad.environments.tools import python
from postgrad.net import client
from postgrad.problem import Failure, Problem, Score
from postgrad.sandbox.bubblewrap import INSIDE
from postgrad.sandbox.outcome import Limits, SandboxError
from postgrad.sandbox.remote import START_S, FusionSandbox, RemoteSandbox, remote_sandbox
from postgrad.verifiers.grading.code import sandbox
from postgrad.verifiers.pool import VerifierPool

ONE = [{"input": "1", "output": "2"}]
# Harmless outside a sandbox; each needs one request per test.
HARMLESS_CHEATS = (
    "equal to everything",
    "an object that agrees",
    "result lines",
    "exit code",
    "hard exit",
    "patched builtins",
    "shadowed names",
)


class FakeFusion(ThreadingHTTPServer):
    """A server with POST /run_code.

    Attributes:
        replies: what the next requests get, as a status and a JSON value, bytes, or a function of
            the request; when they are used up, the code is run.
        requests: the requests so far, with their Authorization header.
        sent: the replies so far.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/run_code"
        self.reset()

    def reset(self) -> None:
        self.replies: list[tuple[int, Any]] = []
        self.requests: list[tuple[dict[str, Any], str | None]] = []
        self.sent: list[Any] = []
        self.delay_s = 0.0


class Handler(BaseHTTPRequestHandler):
    server: FakeFusion

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.delay_s)
        self.server.requests.append((body, self.headers["Authorization"]))
        status, reply = 200, None
        if self.path != "/run_code":
            status, reply = 404, {"detail": "Not Found"}
        elif self.server.replies:
            status, reply = self.server.replies.pop(0)
        else:
            reply = run_as_fusion(body)
        if callable(reply):
            reply = reply(body)
        self.server.sent.append(reply)
        text = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def run_as_fusion(body: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in body["files"].items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(base64.b64decode(content))
        (Path(folder) / "code.py").write_text(body["code"])
        kib = body["memory_limit_MB"] << 10
        command = f"ulimit -S -v {kib} -d {kib} -s {kib} && exec {sys.executable} code.py"
        options: dict[str, Any] = {
            "input": body["stdin"],
            "timeout": body["run_timeout"],
            "capture_output": True,
            "text": True,
        }
        start = time.monotonic()
        try:
            process = subprocess.run(["/bin/bash", "-c", command], cwd=folder, **options)
        except subprocess.TimeoutExpired as late:
            return ended(None, (late.stdout or b"").decode(), seconds=body["run_timeout"])
        return ended(process.returncode, process.stdout, process.stderr, time.monotonic() - start)


def ended(
    code: int | None, stdout: str = "", stderr: str = "", seconds: float = 0.1, compiled: Any = None
) -> dict[str, Any]:
    """Return Fusion's reply for a program with this exit code; None: its time was up."""
    result = {
        "status": "TimeLimitExceeded" if code is None else "Finished",
        "execution_time": seconds,
        "return_code": code,
        "stdout": stdout,
        "stderr": stderr,
    }
    rest = {
        "compile_result": compiled,
        "run_result": result,
        "executor_pod_name": None,
        "files": {},
    }
    return {"status": "Success" if code == 0 else "Failed", "message": ""} | rest


@pytest.fixture(scope="module")
def running() -> Iterator[FakeFusion]:
    with FakeFusion() as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield server
        server.shutdown()


@pytest.fixture
def fusion(running: FakeFusion) -> FakeFusion:
    running.reset()
    return running


NOT_COMPILED = {
    "status": "Finished",
    "execution_time": 0.2,
    "return_code": 1,
    "stdout": "",
    "stderr": "error: expected ;",
}
SANDBOX_FAILED = {
    "status": "SandboxError",
    "message": "no cgroup left",
    "compile_result": None,
    "run_result": None,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reply", "passed", "reason"),
    [
        (ended(0, "2\n"), True, ""),
        (ended(0, "2.0"), True, ""),
        (ended(0, "3\n"), False, "wrong output"),
        (ended(0, "2\n", compiled=NOT_COMPILED | {"return_code": 0}), True, ""),
        (ended(1, "2\n", "Traceback\nValueError: x"), False, "ended with code 1 ValueError: x"),
        (ended(None, "2\n"), False, "took too long"),
        (
            ended(1) | {"compile_result": NOT_COMPILED, "run_result": None},
            False,
            "ended with code 1 error: expected ;",
        ),
        (
            ended(1)
            | {
                "compile_result": NOT_COMPILED | {"status": "TimeLimitExceeded"},
                "run_result": None,
            },
            False,
            "took too long",
        ),
    ],
)
def test_outcomes_of_a_program(fusion, reply, passed, reason):
    fusion.replies = [(200, reply)]
    (result,) = FusionSandbox(fusion.url).test_stdio("print(int(input()) + 1)", ONE)
    assert (result.passed, result.reason) == (passed, reason)
    assert result.seconds == (0.1 if passed else -1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "reply", "reason"),
    [
        (200, SANDBOX_FAILED, "SandboxError no cgroup left"),
        (200, ended(0, "2") | {"run_result": None}, "not Sandbox Fusion's"),
        (200, ended(0, "2") | {"status": "Fine"}, "not Sandbox Fusion's"),
        (
            200,
            ended(1, "2") | {"status": "Success"},
            "Success with a program that ended as Finished, code 1",
        ),
        (
            200,
            ended(0, "2") | {"status": "Failed"},
            "Failed with a program that ended as Finished, code 0",
        ),
        (
            200,
            ended(0) | {"run_result": {"status": "Error", "stderr": "no bash"}},
            "ended as Error, code None no bash",
        ),
        (200, ended(0) | {"run_result": {"status": "Finished", "stdout": "2"}}, "code None"),
        (200, {"results": [1]}, "not Sandbox Fusion's"),
        (200, [], "no JSON object"),
        (200, b"<html>welcome</html>", "no JSON object but '<html>"),
        (401, {"error": "this sandbox wants a token"}, "401 this sandbox wants a token"),
        (404, {"detail": "Not Found"}, "is it the address of a Sandbox Fusion server"),
        (
            422,
            {"detail": [{"loc": ["body", "language"], "msg": "Input should be 'cpp'"}]},
            "422 Input should be 'cpp'",
        ),
    ],
)
def test_a_reply_without_a_result_is_an_error_without_retry(fusion, status, reply, reason):
    fusion.replies = [(status, reply)]
    with pytest.raises(SandboxError) as error:
        FusionSandbox(fusion.url).test_stdio("", ONE)
    assert reason in str(error.value)
    assert fusion.url in str(error.value)
    assert len(fusion.requests) == 1


@pytest.mark.slow
def test_a_busy_or_failing_server_is_asked_again(fusion):
    fusion.replies = [(500, {"detail": "boom"}), (429, b""), (200, ended(0, "2"))]
    (result,) = FusionSandbox(fusion.url).test_stdio("", ONE)
    assert result.passed
    assert len(fusion.requests) == 3
    fusion.replies = [(502, b"bad gateway")] * 9
    with pytest.raises(
        SandboxError, match="no result: 502 the reply is no JSON object but 'bad gateway'"
    ):
        FusionSandbox(fusion.url, retry_s=0.6).test_stdio("", ONE)
    assert 1 <= 9 - len(fusion.replies) <= 3
    with pytest.raises(SandboxError, match="Connection refused"):
        FusionSandbox("http://127.0.0.1:9/run_code", retry_s=0.3).run("")


def test_a_reply_that_is_too_large_is_an_error(fusion, monkeypatch):
    monkeypatch.setattr(client, "MAX_ANSWER_BYTES", 1000)
    fusion.replies = [(200, ended(0, "2" * 1000))] * 9
    with pytest.raises(SandboxError, match="too large"):
        FusionSandbox(fusion.url, retry_s=0.1).run("")


@pytest.mark.slow
def test_the_request_has_the_limits_and_the_token(fusion):
    limits = Limits(time_s=2.5, memory_mb=300)
    FusionSandbox(fusion.url, "secret", limits).run("print(input())", "x")
    body, authorization = fusion.requests[0]
    assert body == {
        "code": "print(input())",
        "language": "python",
        "stdin": "x",
        "compile_timeout": 2.5 + START_S,
        "run_timeout": 2.5 + START_S,
        "memory_limit_MB": 300,
        "files": {},
        "fetch_files": [],
    }
    assert authorization == "Bearer secret"
    FusionSandbox(fusion.url).run("")
    assert fusion.requests[1][1] is None


@pytest.mark.slow
def test_only_the_program_s_own_time_counts(fusion):
    """Three tests of 0.4 s can start within 1 s of the program's time, a fourth one cannot."""
    fusion.replies = [(200, ended(0, "2", seconds=0.4))] * 4
    results = FusionSandbox(fusion.url).test_stdio("", ONE * 4, total_s=1.0)
    assert [result.passed for result in results] == [True, True, True, False]
    assert "used up" in results[3].reason
    fusion.replies = [(500, b""), (500, b""), (200, ended(0, "2", seconds=0.01))]
    results = FusionSandbox(fusion.url).test_stdio("", ONE, total_s=0.1)
    assert results[0].passed, "pauses between retries do not count"


@pytest.mark.slow
def test_a_server_that_is_too_slow_is_an_error(fusion):
    fusion.replies = [(200, ended(0, "2", seconds=0.0))] * 9
    fusion.delay_s = 0.3
    with pytest.raises(SandboxError, match="too slow"):
        FusionSandbox(fusion.url, retry_s=0.3).test_stdio("", ONE * 9, total_s=0.2)


@pytest.mark.slow
def test_asserts_run_in_a_process_of_their_own(fusion):
    sandbox = FusionSandbox(fusion.url, limits=Limits(time_s=5.0))
    program = "import sys\nprint('{}')\ndef add(a, b):\n    return a + b"
    tests = [
        "assert add(1, 2) == 3",
        "print('x')\nassert add(0, 0) == 1",
        "assert add([1], [2]) == [1, 2]",
    ]
    results = sandbox.test_asserts(program, tests)
    assert [result.passed for result in results] == [True, False, True]
    assert results[0].seconds > 0
    assert "failed: print('x')" in results[1].reason
    for name in ("linked nodes", "thread"):
        program, tests, _ = RIGHT[name]
        assert all(result.passed for result in sandbox.test_asserts(program, tests))


@pytest.mark.slow
def test_numpy_arrays_are_rebuilt_on_the_test_s_side(fusion):
    """The fake server runs this interpreter, which has NumPy; our own sandbox has none."""
    pytest.importorskip("numpy")
    program = """if True:
        import numpy as np
        class Pretender:
            dtype = np.dtype("float64")
            def __array__(self, *_, **__): return np.ones(2)
            def __eq__(self, other): return np.array([True, True])
            def all(self): return True
        def f(x): return np.asarray(x, dtype="float64") * 2
        def mean(x): return np.mean(x)
        def fill(x): x[:] = 7
        def cheat(x): return Pretender()
        class pretend:
            def __init__(self, x): pass
            def __sub__(self, other): return self
            __rsub__ = __abs__ = __sub__
            def max(self): return 0
    """
    tests = [
        "import numpy as np\nassert (f(np.array([1, 2])) == np.array([2.0, 4.0])).all()",
        "import numpy as np\nassert np.allclose(f([[1, 2], [3, 4]]), [[2, 4], [6, 8]])",
        "assert f([1, 2]).tolist() == [2.0, 4.0] and f([1, 2]).shape == (2,)",
        "assert mean([1, 2, 6]) == 3 and abs(mean([1, 2]) - 1.5) < 1e-9",
        "import numpy as np\nx = np.zeros(3)\nfill(x)\nassert x.tolist() == [7, 7, 7]",
        "import numpy as np\nassert (cheat(1) == np.array([2.0, 4.0])).all()",
        "import numpy as np\nassert np.allclose(cheat(1), [1, 1])",
        "import numpy as np\nassert np.array_equal(cheat(1), np.ones(2))",
        "import numpy as np\nassert abs(pretend(1) - np.array([41])).max() < 1e-6",
    ]
    sandbox = FusionSandbox(fusion.url, limits=Limits(time_s=20.0, memory_mb=4096))
    results = sandbox.test_asserts(program, tests)
    assert [result.passed for result in results] == [True] * 5 + [False] * 4, results


def test_a_test_that_cannot_be_run_is_no_result(fusion):
    sandbox = FusionSandbox(fusion.url, limits=Limits(time_s=5.0))
    tests = ["import threading\nassert f(threading.Lock())"]
    (result,) = sandbox.test_asserts("def f(x): 1", tests)
    assert result.unsupported
    assert "lock" in result.reason


def test_a_program_that_does_not_load_fails_all_tests(fusion):
    sandbox = FusionSandbox(fusion.url, limits=Limits(time_s=5.0))
    results = sandbox.test_asserts("import nothing_of_that_name", ["assert 1", "assert 2"])
    assert len(fusion.requests) == 1
    assert len(results) == 2
    assert all("ModuleNotFoundError" in result.reason for result in results)


@pytest.mark.slow
def test_a_test_that_takes_too_long_fails_alone(fusion, tmp_path):
    file = tmp_path / "pids"
    program = f"""if True:
        import os, time
        open({str(file)!r}, "a").write(f"{{os.getpid()}} ")
        def f(x):
            time.sleep(60 * x)
    """
    sandbox = FusionSandbox(fusion.url, limits=Limits(time_s=3.0))
    results = sandbox.test_asserts(program, ["f(0)", "f(1)", "f(0)"], total_s=30.0)
    assert [result.passed for result in results] == [True, False, True]
    assert "took too long" in results[1].reason
    statuses = [reply["run_result"]["status"] for reply in fusion.sent]
    assert statuses == ["Finished"] * 3, "the alarm ends a test, not the limit of all tests"
    pids = [int(word) for word in file.read_text().split()]
    assert len(pids) == 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "no program is left"
    (result,) = sandbox.test_asserts("while True: pass", ["f(0)"], total_s=0.6)
    assert "took too long" in result.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS_CHEATS)
def test_cheats_do_not_pass(name, fusion):
    results = FusionSandbox(fusion.url, limits=Limits(time_s=5.0)).test_asserts(
        FAKES[name], FAKE_TESTS[:1]
    )
    assert [result.passed for result in results] == [False], results


@pytest.mark.slow
@pytest.mark.parametrize(
    "reply",
    [
        ended(1, "", "PermissionError: no fork"),
        ended(0, "hello\n"),
        ended(None),
        ended(0, '{"ready": true}\n{"test": 0, "passed": true, "seconds": 0.1}\n'),
        ended(0, '{"key": "guessed", "test": 0, "passed": true, "seconds": 0.1}\n'),
    ],
)
def test_output_without_the_test_runner_s_key_is_an_error(fusion, reply):
    fusion.replies = [(200, reply)]
    with pytest.raises(SandboxError, match="tests do not start in that sandbox"):
        FusionSandbox(fusion.url).test_asserts("", ["assert 1"])


def test_a_program_that_kills_the_test_runner_does_not_pass(fusion):
    def killed(request):
        key = json.loads(request["stdin"])["settings"]["key"]
        return ended(-9, json.dumps({"key": key, "ready": True}) + "\n")

    fusion.replies = [(200, killed)]
    (result,) = FusionSandbox(fusion.url).test_asserts("", ["assert 1"])
    assert not result.passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://host:8080/run_code", FusionSandbox),
        ("https://host/some/where/run_code/", FusionSandbox),
        ("http://host:1234", RemoteSandbox),
        ("http://host:1234/run_codes", RemoteSandbox),
    ],
)
def test_the_address_chooses_the_protocol(url, kind):
    assert type(remote_sandbox(url)) is kind


@tabled("url")
def test_a_malformed_address_is_refused(url):
    with refused("wrong_value", "POSTGRAD_SANDBOX"):
        remote_sandbox(url)


def test_a_fusion_address_without_run_code_is_explained(fusion):
    with pytest.raises(SandboxError, match="Sandbox Fusion server ends in /run_code"):
        RemoteSandbox(fusion.url.removesuffix("/run_code")).test_stdio("", ONE)


@pytest.mark.slow
def test_the_code_verifier_over_fusion(fusion, monkeypatch):
    """Without bubblewrap here, results can only come from the server."""
    tests, pairs = json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"]), json.dumps(ONE)
    right, wrong = (f"```python\ndef add(a, b):\n    return a {sign} b\n```" for sign in "+-")
    items = [(answer, Problem("p", (), tests, "code")) for answer in (right, wrong)]
    items.append(("```python\nprint(int(input()) + 1)\n```", Problem("p", (), pairs, "code")))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("POSTGRAD_SANDBOX", fusion.url)
    with VerifierPool(workers=1, timeout_s=30) as pool:
        results = pool.verify(items, ["code"] * 3)
        assert [(r.value, r.parts["passed"]) for r in results if isinstance(r, Score)] == [
            (1.0, 1.0),
            (0.0, 0.5),
            (1.0, 1.0),
        ]
        fusion.replies = [(200, SANDBOX_FAILED), (200, b"what?")]
        failures = pool.verify(items[1:], ["code"] * 2)
        assert [failure.kind for failure in failures] == ["error", "error"]
        assert "no cgroup left" in failures[0].reason
        assert "no JSON object" in failures[1].reason
    sandbox.cache_clear()
    try:
        assert python("print(6 * 7)") == "42", "the tool of that name runs there too"
    finally:
        sandbox.cache_clear()
    monkeypatch.setenv("POSTGRAD_SANDBOX", "fusion:8080/run_code")
    with VerifierPool(workers=1, timeout_s=30) as pool:
        (result,) = pool.verify(items[:1], ["code"])
    assert isinstance(result, Failure)
    assert "POSTGRAD_SANDBOX=fusion:8080/run_code" in result.reason


def test_inside_has_no_newer_syntax_than_fusion_s_python():
    """Fusion's image has Python 3.10."""
    for file in sorted(INSIDE.glob("*.py")):
        ast.parse(file.read_text(), feature_version=(3, 10))

"""fusion.py: programs and tests on a Sandbox Fusion server, of which a stand-in here speaks the protocol.

The stand-in answers what a test lays down for it, or runs the request as Fusion does without isolation: a folder with the files, the
code as a file in it, one process. Only programs that are harmless outside a sandbox are given to it.
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
from sandbox_programs import FAKE_TESTS, FAKES, RIGHT

from postgrad.errors import ConfigError
from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.tools import python
from postgrad.sandbox.bubblewrap import INSIDE
from postgrad.sandbox.client import RemoteSandbox, remote_sandbox
from postgrad.sandbox.fusion import START_S, FusionSandbox
from postgrad.sandbox.outcome import Limits, SandboxError
from postgrad.verifiers.code import sandbox
from postgrad.verifiers.pool import VerifierPool

ONE = [{"input": "1", "output": "2"}]
# Harmless outside a sandbox; each needs one request a test.
CHEATS = (
    "equal to everything",
    "an object that agrees",
    "result lines",
    "exit code",
    "hard exit",
    "patched builtins",
    "shadowed names",
)


class StandIn(ThreadingHTTPServer):
    """`answers`: what the next requests get, a status and a JSON value or bytes; when they are used up, the code is run."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/run_code"
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[dict[str, Any], str | None]] = []
        self.answered: list[Any] = []
        self.delay_s = 0.0


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.delay_s)
        self.server.asked.append((body, self.headers["Authorization"]))
        if self.path != "/run_code":
            status, answer = 404, {"detail": "Not Found"}
        else:
            status, answer = (
                self.server.answers.pop(0) if self.server.answers else (200, as_fusion_runs(body))
            )
        self.server.answered.append(answer)
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def as_fusion_runs(body: dict[str, Any]) -> dict[str, Any]:
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
            done = subprocess.run(["/bin/bash", "-c", command], cwd=folder, **options)
        except subprocess.TimeoutExpired as late:
            return ended(None, (late.stdout or b"").decode(), seconds=body["run_timeout"])
        return ended(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def ended(
    code: int | None, stdout: str = "", stderr: str = "", seconds: float = 0.1, compiled: Any = None
) -> dict[str, Any]:
    """Fusion's answer; no code: the time is up."""
    how = "TimeLimitExceeded" if code is None else "Finished"
    result = {
        "status": how,
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
def running() -> Iterator[StandIn]:
    with StandIn() as server:
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        yield server
        server.shutdown()


@pytest.fixture
def fusion(running: StandIn) -> StandIn:
    running.answers, running.asked, running.answered, running.delay_s = [], [], [], 0.0
    return running


NOT_COMPILED = {
    "status": "Finished",
    "execution_time": 0.2,
    "return_code": 1,
    "stdout": "",
    "stderr": "error: expected ;",
}
NO_VERDICT = {
    "status": "SandboxError",
    "message": "no cgroup left",
    "compile_result": None,
    "run_result": None,
}


@pytest.mark.parametrize(
    ("answer", "passed", "reason"),
    [
        (ended(0, "2\n"), True, ""),
        (ended(0, "2.0"), True, ""),
        (ended(0, "3\n"), False, "printed something else"),
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
def test_what_fusion_says_of_a_program(fusion, answer, passed, reason):
    fusion.answers = [(200, answer)]
    (result,) = FusionSandbox(fusion.url).test_stdio("print(int(input()) + 1)", ONE)
    assert (result.passed, result.reason) == (passed, reason)
    assert result.seconds == (0.1 if passed else -1.0)


@pytest.mark.parametrize(
    ("status", "answer", "says"),
    [
        (200, NO_VERDICT, "SandboxError no cgroup left"),
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
def test_an_answer_without_a_verdict_is_an_error_at_once(fusion, status, answer, says):
    """Asked once: the server has answered. The code verifier makes a Failure of the error."""
    fusion.answers = [(status, answer)]
    with pytest.raises(SandboxError, match="gave no verdict") as error:
        FusionSandbox(fusion.url).test_stdio("", ONE)
    assert says in str(error.value) and fusion.url in str(error.value) and len(fusion.asked) == 1


def test_a_server_in_trouble_is_asked_again(fusion):
    fusion.answers = [(500, {"detail": "boom"}), (429, b""), (200, ended(0, "2"))]
    (result,) = FusionSandbox(fusion.url).test_stdio("", ONE)
    assert result.passed and len(fusion.asked) == 3
    fusion.answers = [(502, b"bad gateway")] * 9
    with pytest.raises(SandboxError, match="no verdict: 502 no JSON object but 'bad gateway'"):
        FusionSandbox(fusion.url, patience_s=0.6).test_stdio("", ONE)
    assert 1 <= 9 - len(fusion.answers) <= 3
    with pytest.raises(SandboxError, match="Connection refused"):
        FusionSandbox("http://127.0.0.1:9/run_code", patience_s=0.3).run("")


def test_the_request_has_the_limits_and_the_token(fusion):
    FusionSandbox(fusion.url, "secret", Limits(time_s=2.5, memory_mb=300)).run(
        "print(input())", "x"
    )
    body, token = fusion.asked[0]
    assert body == {
        "code": "print(input())", "language": "python", "stdin": "x", "compile_timeout": 2.5 + START_S, "run_timeout": 2.5 + START_S,
        "memory_limit_MB": 300, "files": {}, "fetch_files": [],
    }  # fmt: skip
    assert token == "Bearer secret"
    FusionSandbox(fusion.url).run("")
    assert fusion.asked[1][1] is None


def test_time_that_only_the_server_takes_is_not_the_programs(fusion):
    """Three tests of 0.4 s each in 1 s: the third has its turn, a fourth has not. A server that is too slow is an error."""
    fusion.answers = [(200, ended(0, "2", seconds=0.4))] * 4
    results = FusionSandbox(fusion.url).test_stdio("", ONE * 4, total_s=1.0)
    assert [result.passed for result in results] == [
        True,
        True,
        True,
        False,
    ] and "used up" in results[3].reason
    fusion.answers = [(500, b""), (500, b""), (200, ended(0, "2", seconds=0.01))]
    assert FusionSandbox(fusion.url).test_stdio("", ONE, total_s=0.1)[0].passed, (
        "the pauses do not count"
    )
    fusion.answers, fusion.delay_s = [(200, ended(0, "2", seconds=0.0))] * 9, 0.3
    with pytest.raises(SandboxError, match="too slow"):
        FusionSandbox(fusion.url, patience_s=0.3).test_stdio("", ONE * 9, total_s=0.2)


def test_asserts_are_judged_by_a_process_of_their_own(fusion):
    box = FusionSandbox(fusion.url, limits=Limits(time_s=5.0))
    tests = [
        "assert add(1, 2) == 3",
        "print('x')\nassert add(0, 0) == 1",
        "assert add([1], [2]) == [1, 2]",
    ]
    results = box.test_asserts("import sys\nprint('{}')\ndef add(a, b):\n    return a + b", tests)
    assert [result.passed for result in results] == [True, False, True] and results[0].seconds > 0
    assert "failed: print('x')" in results[1].reason
    (result,) = box.test_asserts("def f(x): 1", ["class M: pass\nassert f(M())"])
    assert result.unsupported and "cannot be handed" in result.reason
    fusion.asked.clear()
    results = box.test_asserts("import nothing_of_that_name", ["assert 1", "assert 2"])
    assert len(fusion.asked) == 1 and [
        "does not load: ModuleNotFoundError" in r.reason for r in results
    ] == [True, True]
    for name in ("class with state", "thread"):
        assert all(result.passed for result in box.test_asserts(*RIGHT[name]))


def test_a_test_that_takes_too_long_ends_alone(fusion, tmp_path):
    program = f"import os, time\nopen({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')\ndef f(x):\n    time.sleep(60 * x)\n"
    box = FusionSandbox(fusion.url, limits=Limits(time_s=0.5))
    results = box.test_asserts(program, ["f(0)", "f(1)", "f(0)"], total_s=30.0)
    assert [result.passed for result in results] == [
        True,
        False,
        True,
    ] and "took too long" in results[1].reason
    # Ended from within at the test's time, not by the limit for all of them.
    assert [answer["run_result"]["status"] for answer in fusion.answered] == ["Finished"] * 3
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in pids), (
        "no program stays behind"
    )
    results = box.test_asserts("while True: pass", ["f(0)"], total_s=0.6)
    assert [result.passed for result in results] == [False] and "took too long" in results[0].reason


@pytest.mark.parametrize("name", CHEATS)
def test_no_program_talks_itself_into_a_pass(name, fusion):
    results = FusionSandbox(fusion.url, limits=Limits(time_s=5.0)).test_asserts(
        FAKES[name], FAKE_TESTS[:1]
    )
    assert [result.passed for result in results] == [False], results


def test_a_server_that_cannot_start_the_tests_is_an_error(fusion):
    """No verdict, whatever the reason: an old Python, no second process, a program of another kind."""
    for answer in (ended(1, "", "PermissionError: no fork"), ended(0, "hello\n"), ended(None)):
        fusion.answers = [(200, answer)]
        with pytest.raises(SandboxError, match="tests do not start in that sandbox"):
            FusionSandbox(fusion.url).test_asserts("", ["assert 1"])
    fusion.answers = [(200, ended(-9, '{"ready": true}\n'))]
    (result,) = FusionSandbox(fusion.url).test_asserts("", ["assert 1"])
    assert not result.passed, "what kills its judge has not passed"


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


@pytest.mark.parametrize(
    "url",
    [
        "host:1234",
        "ftp://host/run_code",
        "http://",
        "http:///run_code",
        "http://host:x",
        "http://me:secret@host",
    ],
)
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(ConfigError, match="is not an address such as http://host:1234"):
        remote_sandbox(url)


def test_our_protocol_to_a_fusion_server_says_what_the_address_lacks(fusion):
    with pytest.raises(SandboxError, match="a Sandbox Fusion server's address ends in /run_code"):
        RemoteSandbox(fusion.url.removesuffix("/run_code")).test_stdio("", ONE)


def test_the_code_verifier_over_fusion(fusion, monkeypatch):
    """Without bubblewrap here: the verdicts can only come from the server. What is no verdict is a Failure with its reason."""
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
        fusion.answers = [(200, NO_VERDICT), (200, b"what?")]
        for says, result in zip(
            ("no cgroup left", "no JSON object"), pool.verify(items[1:], ["code"] * 2), strict=True
        ):
            assert isinstance(result, Failure) and result.kind == "error" and says in result.reason
    sandbox.cache_clear()
    try:
        assert python("print(6 * 7)") == "42", "the tool of that name runs there, too"
    finally:
        sandbox.cache_clear()
    monkeypatch.setenv("POSTGRAD_SANDBOX", "fusion:8080/run_code")
    with VerifierPool(workers=1, timeout_s=30) as pool:
        (result,) = pool.verify(items[:1], ["code"])
    assert (
        isinstance(result, Failure)
        and "POSTGRAD_SANDBOX=fusion:8080/run_code is not an address" in result.reason
    )


def test_what_is_sent_is_read_by_the_python_of_fusion():
    """Fusion's image has Python 3.10; nothing newer may stand in inside/."""
    for file in sorted(INSIDE.glob("*.py")):
        ast.parse(file.read_text(), feature_version=(3, 10))

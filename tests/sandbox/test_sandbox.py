"""The sandbox: running and testing programs, cheats, refusing to work, and the verifier.

The tests need bubblewrap and permission to use it; otherwise they are skipped.
"""

import json
from pathlib import Path

import pytest
from sandbox_limits import lines, needs_sandbox
from sandbox_programs import FAKE_TESTS, FAKES, RIGHT
from tables import tabled

from postgrad.problem import Failure, Problem, Score
from postgrad.sandbox import bubblewrap, local
from postgrad.sandbox.local import Sandbox
from postgrad.sandbox.outcome import Limits, SandboxError, same_output
from postgrad.sandbox.seccomp import seccomp_filter
from postgrad.verifiers.grading.code import code
from postgrad.verifiers.pool import VerifierPool


def passed(results) -> list[int]:
    return [int(result.passed) for result in results]


# ---- running and testing


@needs_sandbox
def test_a_program_runs_with_its_input(box):
    outcome = box.run("import math\nprint(math.factorial(int(input())))", "5\n")
    assert (outcome.code, outcome.output, outcome.stopped) == (0, "120\n", "")
    assert outcome.seconds > 0
    outcome = box.run("import sys\nprint('x', file=sys.stderr)\nsys.exit(3)")
    assert (outcome.code, outcome.output, outcome.errors) == (3, "", "x\n")


@pytest.mark.slow
@needs_sandbox
def test_asserts_outputs_and_time_limits(box):
    """The numbers of Classmate's section 8.11."""
    add = "def add(a, b):\n    return a + b\n"
    results = box.test_asserts(
        add, ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 0) == 1"]
    )
    assert passed(results) == [1, 1, 0] and results[2].seconds == -1.0 and results[0].seconds > 0
    pairs = [
        {"input": a, "output": b} for a, b in (("1", "2"), ("100", "101"), ("1", "2.0"), ("1", "3"))
    ]
    results = box.test_stdio("print(int(input()) + 1)", pairs)
    assert passed(results) == [1, 1, 1, 0] and results[3].reason == "wrong output"
    loop = "def f():\n    while True: pass\n"
    assert passed(box.test_asserts(loop, ["f()", "assert 1"], limits=Limits(time_s=1.0))) == [0, 1]


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_pass(name, box):
    program, tests, unsupported = RIGHT[name]
    results = box.test_asserts(program, tests)
    assert {n for n, result in enumerate(results) if result.unsupported} == unsupported
    assert all(result.passed or result.unsupported for result in results), results


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import nowhere", "ModuleNotFoundError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import os; os._exit(0)", "ended"),
        ("def g(): return 1", "NameError"),
        ("def f(): return 1 / 0", "ZeroDivisionError"),
        ("f = 3", "TypeError"),
        ("import os\ndef f(): os._exit(0)", "the program ended"),
        ("def f(): exit()", "SystemExit"),
        ("f = lambda: f()", "RecursionError"),
        ("\0", "Error"),
        ("x = '\ud800'", "Error"),
    ],
)
def test_wrong_programs_fail_with_their_reason(program, reason, box):
    (result,) = box.test_asserts(program, ["assert f() == 1"])
    assert not result.passed and reason in result.reason


# ---- cheats: none of these programs knows the answer


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("name", FAKES)
def test_no_program_passes_without_the_answer(name, box):
    """Two programs never reply, so that each test takes its full second: they get one test."""
    tests = FAKE_TESTS[:1] if name in ("patched channel", "alarm") else FAKE_TESTS
    results = box.test_asserts(FAKES[name], tests, limits=Limits(time_s=1.0, memory_mb=256))
    assert passed(results) == [0] * len(tests), [
        (t, r) for t, r in zip(tests, results, strict=True) if r.passed
    ]


@needs_sandbox
def test_the_same_tests_pass_with_the_answer(box):
    assert passed(box.test_asserts("import math\ndef f(x): return 41", FAKE_TESTS)) == [1] * len(
        FAKE_TESTS
    )


@needs_sandbox
def test_the_program_never_sees_the_expected_value(box):
    """The program searches its process for a number that only the tests have."""
    hunt = """
    import gc, sys, os
    def f(x):
        seen = []
        for o in gc.get_objects():
            try: seen.append(repr(o))
            except BaseException: pass
        text = "".join(seen)
        return 7316 * 1000 + 4205 if ("7316" + "4205") in text.replace("7316 * 1000", "") else 0
    """
    (result,) = box.test_asserts(lines(hunt), ["assert f(1) == 73164205"])
    assert not result.passed and "failed" in result.reason


@needs_sandbox
def test_the_test_runner_only_calls_functions_that_a_test_passed(box):
    """The program sends requests of its own while it serves one."""
    hostile = """
    import gc
    def f(g):
        channel = g.channel
        out = []
        requests = [("getattr", [g, "__globals__"]), ("eval", ["1"])]
        requests.append(("call", ["__import__", "os"]))
        for what, arguments in requests:
            try: out.append(str(channel.ask(what, *arguments)))
            except BaseException as error: out.append(type(error).__name__)
        return out, g(20)
    """
    (result,) = box.test_asserts(
        lines(hostile), ["got = f(lambda x: x + 1)\nassert got == (['ValueError'] * 3, 21), got"]
    )
    assert result.passed, result


@needs_sandbox
def test_a_test_whose_value_cannot_be_sent_is_unsupported(box):
    (result,) = box.test_asserts(
        "def f(x): return 1", ["import threading\nassert f(threading.Lock()) == 1"]
    )
    assert not result.passed and result.unsupported and "lock" in result.reason


# ---- refusing to work


def test_it_refuses_without_bubblewrap(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    bubblewrap.find_bubblewrap.cache_clear()
    local.probe.cache_clear()
    try:
        with pytest.raises(SandboxError, match="install bubblewrap"):
            Sandbox()
    finally:
        monkeypatch.undo()
        bubblewrap.find_bubblewrap.cache_clear()
        local.probe.cache_clear()


@needs_sandbox
@pytest.mark.parametrize(
    ("option", "failure"),
    [
        ("--unshare-net", ""),
        ("--remount-ro", "root folder can be written"),
        ("--clearenv", "environment is not empty"),
    ],
)
def test_the_probe_finds_a_missing_protection(option, failure, monkeypatch):
    """The network has a second protection, the call filter: only without both it is found."""
    all_args = bubblewrap.bwrap_args

    def without(level, limits):
        args = all_args(level, limits)
        start = args.index(option)
        del args[start : start + (2 if option == "--remount-ro" else 1)]
        if option == "--clearenv":
            args[1:1] = ["--setenv", "LEAK", "1"]
        return args

    level = local.probe()
    monkeypatch.setattr(bubblewrap, "bwrap_args", without)
    if option == "--unshare-net":
        assert local.failed_protections(level) == []
        monkeypatch.setattr(bubblewrap, "seccomp_filter", lambda machine=None: None)
        assert "the network can be reached" in local.failed_protections(level)
    elif option == "--remount-ro" and level.own_user:
        assert local.failed_protections(level) == []  # the root folder belongs to root
    else:
        assert any(failure in text for text in local.failed_protections(level))


@needs_sandbox
def test_a_failed_probe_is_a_refusal(monkeypatch):
    monkeypatch.setattr(local, "failed_protections", lambda level: ["memory is not limited"])
    local.probe.cache_clear()
    try:
        with pytest.raises(
            SandboxError, match=r"no safe sandbox on this machine \(memory is not limited\)"
        ):
            Sandbox()
    finally:
        local.probe.cache_clear()


def test_the_call_filter_exists_for_two_processors():
    assert seccomp_filter("x86_64")
    assert seccomp_filter("aarch64")
    assert seccomp_filter("riscv64") is None
    for machine in ("x86_64", "aarch64"):
        program = seccomp_filter(machine)
        assert program and len(program) % 8 == 0 and len(program) // 8 < 4096


@tabled("output, expected, same")
def test_same_output(output, expected, same):
    assert same_output(output, expected) is same


# ---- the verifier


ADD = json.dumps(["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0, 5) == 5"])


FENCE = "Here it is:\n```python\n{}\n```\nDone."


@pytest.mark.slow
@needs_sandbox
def test_code_verifier():
    stdio = json.dumps([{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "6\n"}])
    humaneval = {
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "f",
        "prompt": "import math\n\ndef f(x):\n    '''Square.'''\n",
    }
    mbpp = {"test_list": ["assert math.isclose(area(1), math.pi)"], "test_imports": ["import math"]}
    apps = json.dumps({"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"})
    right = FENCE.format("def add(a, b):\n    return a + b")
    wrong = FENCE.format("def add(a, b):\n    return a - b")
    partly_right = FENCE.format("def add(a, b):\n    return max(a + b, 1)")
    method = FENCE.format("class Solution:\n    def add(self, a, b): return a + b")
    endless = FENCE.format("while True: pass")
    continued = FENCE.format("    return x * x")
    defined = FENCE.format("def f(x):\n    return math.prod([x, x])")
    area = FENCE.format("def area(r):\n    return 3.141592653589793 * r * r")
    add_problem = Problem("a", (), ADD, "code")
    one_test = Problem("a", (), json.dumps(["assert add(1, 2) == 3"]), "code")
    stdio_problem = Problem("b", (), stdio, "code_stdio")
    humaneval_problem = Problem("c", (), "", "openai_humaneval", (), humaneval)
    mbpp_problem = Problem("d", (), "", "mbpp", (), mbpp)
    apps_problem = Problem("e", (), apps, "apps")
    # (response, problem, (value, share of tests passed, format))
    rows = [
        (right, add_problem, (1, 1, 1)),
        (wrong, add_problem, (0, 0, 1)),
        (partly_right, add_problem, (0, 2 / 3, 1)),
        ("```\nnot this\n```\n" + right, add_problem, (1, 1, 1)),
        ("```python\ndef add(a, b):\n    return a + b", add_problem, (1, 1, 0)),
        ("def add(a, b):\n    return a + b\n", add_problem, (1, 1, 0)),
        ("I do not know.", add_problem, (0, 0, 0)),
        ("", add_problem, (0, 0, 0)),
        (endless, one_test, (0, 0, 1)),
        (FENCE.format("print(int(input()) + 1)"), stdio_problem, (1, 1, 1)),
        (FENCE.format("print(2)"), stdio_problem, (0, 0.5, 1)),
        (continued, humaneval_problem, (1, 1, 1)),
        (defined, humaneval_problem, (1, 1, 1)),
        (area, mbpp_problem, (1, 1, 1)),
        (right, apps_problem, (1, 1, 1)),
        (method, apps_problem, (1, 1, 1)),
    ]
    with VerifierPool(
        workers=2, timeout_s=1
    ) as pool:  # the verifier has a limit of its own, well above this
        results = pool.verify(
            [(response, problem) for response, problem, _ in rows], ["code"] * len(rows)
        )
        (bad,) = pool.verify([(right, Problem("f", (), "42", "code"))], ["code"])
    for (response, _, (answer, share, form)), result in zip(rows, results, strict=True):
        assert isinstance(result, Score), (response, result)
        assert (result.value, result.parts["passed"], result.parts["format"]) == (
            answer,
            pytest.approx(share),
            form,
        ), response
    assert isinstance(bad, Failure) and bad.kind == "invalid"


@pytest.mark.slow
@needs_sandbox
@pytest.mark.parametrize("order", [1, -1])
def test_one_failed_test_makes_a_program_wrong_whatever_cannot_be_tested(order):
    undecidable = "import threading\nassert add(threading.Lock(), 1)"
    tests = ["assert add(1, 2) == 3", undecidable, "assert add(2, 2) == 4"][::order]
    problem = Problem("g", (), json.dumps(tests), "code")
    fails_one = FENCE.format("def add(a, b):\n    return min(a + b, 3)")
    right = FENCE.format("def add(a, b):\n    return a + b")
    wrong = code(fails_one, problem)
    assert isinstance(wrong, Score) and (wrong.value, wrong.parts["passed"]) == (0, 1 / 3)
    unknown = code(right, problem)
    assert isinstance(unknown, Failure) and unknown.kind == "unsupported"


def test_code_without_a_sandbox_is_a_failure(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with VerifierPool(workers=1, timeout_s=20) as pool:
        (result,) = pool.verify(
            [(FENCE.format("def add(a, b):\n    return a + b"), Problem("a", (), ADD, "code"))],
            ["code"],
        )
    assert isinstance(result, Failure) and result.kind == "error" and "bubblewrap" in result.reason


HOSTILE_MATH = [
    "\\boxed{10^{10^{10}}}",
    "\\boxed{9^{9^{9^9}}}",
    "\\boxed{99999999!}",
    "\\boxed{" + "{" * 5_000 + "}" * 5_000 + "}",
    "\\boxed{" + "(" * 900 + ")" * 900 + "}",
    "\\boxed{" + "7" * 1_000_000 + "}",
    "7" * 1_000_000,
    "\\boxed{" * 20_000,
    "\\boxed{\\frac{1}{\\frac{1}{" * 50,
    "\\boxed{\\sqrt{" + "\\sqrt{" * 300 + "2" + "}" * 301 + "}",
    "\\boxed{__import__('os').system('true')}",
    "\ud800\x00\\boxed{\x00}",
]


HOSTILE_CODE = [
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "import os\nwhile True: os.write(1, b'x' * 65536)",
    "import threading\nwhile True:\n    try: threading.Thread(target=input).start()\n"
    "    except RuntimeError: break",
]


@needs_sandbox
@pytest.mark.slow
def test_a_thousand_responses_with_hostile_ones(problem, children):
    """Every twentieth response is hostile; all others get the right score, and nothing is left."""
    before, files = set(children()), len([*Path("/proc/self/fd").iterdir()])
    tests = json.dumps(["assert add(1, 2) == 3"])
    items, names, expected = [], [], []
    for i in range(1000):
        if i % 200 == 100:
            response = FENCE.format(HOSTILE_CODE[i // 200 % len(HOSTILE_CODE)])
            items.append((response, problem(tests, "code")))
        elif i % 20 == 0:
            items.append((HOSTILE_MATH[i // 20 % len(HOSTILE_MATH)], problem("\\frac{x}{3}")))
        else:
            items.append((f"so \\boxed{{{i % 7}}}", problem(str(i % 5))))
        names.append("code" if i % 200 == 100 else "math")
        expected.append(0.0 if i % 20 == 0 else float(i % 7 == i % 5))
    with VerifierPool(workers=2, timeout_s=10) as pool:
        results = pool.verify(items, names)
        assert len(set(children()) - before) <= 2
    hurt = [r for i, r in enumerate(results) if i % 20 == 0]
    assert all(isinstance(r, Failure) or r.value == 0.0 for r in hurt)
    assert [r.value for i, r in enumerate(results) if i % 20 and isinstance(r, Score)] == [
        e for i, e in enumerate(expected) if i % 20
    ]
    assert set(children()) == before and len([*Path("/proc/self/fd").iterdir()]) == files

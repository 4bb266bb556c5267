"""VerifierPool: one Score or Failure per response whatever a verifier does; no process is left."""

import os
import subprocess
import sys
import time

import pytest
from refused import refused
from waiting import wait_for_end

from postgrad.problem import Failure, Score
from postgrad.verifiers import pool as pool_module
from postgrad.verifiers.loading import find_verifier
from postgrad.verifiers.pool import VerifierPool
from postgrad.verifiers.table import VERIFIERS


@pytest.mark.slow
def test_verdicts_are_in_the_order_of_the_responses(problem, hostile):
    """Some verifiers run in this process, the others in two children."""
    with VerifierPool(workers=2, timeout_s=20) as pool:
        items = [("x" * i if i % 3 else "5", problem("5")) for i in range(150)]
        names = [hostile("length") if i % 3 else "exact" for i in range(150)]
        expected = [float(i) if i % 3 else 1.0 for i in range(150)]
        results = pool.verify(items, names)
        assert [r.value for r in results if isinstance(r, Score)] == expected
        assert len(pool.processes.children) == 2


@pytest.mark.slow
def test_without_a_number_there_are_as_many_processes_as_cores(problem, hostile, monkeypatch):
    """Functions of the user have two, also after a built-in verifier had more."""
    monkeypatch.setattr(pool_module, "available_cores", lambda: 5)
    with VerifierPool(timeout_s=20) as pool:
        answers = [(f"\\boxed{{{i}+x}}", problem("x+1")) for i in range(64)]
        results = pool.verify(answers, ["math"] * 64)
        assert [r.value for r in results if isinstance(r, Score)] == [0.0, 1.0, *[0.0] * 62]
        assert len(pool.processes.children) == 4
        items = [(str(i), problem("5")) for i in range(64)]
        own = pool.verify(items, [hostile("process")] * 64)
        assert len({result.value for result in own if isinstance(result, Score)}) == 2


@pytest.mark.parametrize(("cores", "expected"), [(1, 2), (3, 2), (8, 7), (128, 16)])
def test_number_of_processes_by_cores(monkeypatch, cores, expected):
    monkeypatch.setattr(pool_module, "available_cores", lambda: cores)
    assert pool_module.default_workers([VERIFIERS["math"]]) == expected
    both = [VERIFIERS["math"], VERIFIERS["format"]]
    assert pool_module.default_workers(both) == expected


def test_a_sum_with_an_own_function_has_two_processes(hostile, monkeypatch):
    monkeypatch.setattr(pool_module, "available_cores", lambda: 8)
    specs = [VERIFIERS["math"], find_verifier(hostile("length"))]
    assert pool_module.default_workers(specs) == 2


@pytest.mark.slow
def test_hostile_responses_fail_alone_with_their_kind(problem, hostile, children):
    before = set(children())
    commands = ["ok", "sleep", "ok", "exit", "ok", "segfault", "ok", "raise", "system exit"]
    commands += ["recursion", "ok", "memory", "ok", "close everything", "print", "ok"]
    with VerifierPool(workers=2, timeout_s=6) as pool:
        results = pool.verify(
            [(command, problem("5")) for command in commands],
            [hostile("by_command")] * len(commands),
        )
    by_command = dict(zip(commands, results, strict=True))
    for command, result in zip(commands, results, strict=True):
        if command in ("ok", "print"):
            assert result == Score(1.0), command
    assert by_command["sleep"] == Failure("timeout", "no score within 6 s")
    assert by_command["exit"] == Failure("crash", "the verifier's process ended: exit code 7")
    assert by_command["segfault"] == Failure("crash", "the verifier's process ended: SIGSEGV")
    for command, reason in (("raise", "ValueError: bad answer"), ("system exit", "SystemExit: 3")):
        assert by_command[command].kind == "error"
        assert by_command[command].reason.startswith(f"{reason} (hostile_verifiers.py, line ")
    assert by_command["recursion"].kind in ("error", "crash")
    assert by_command["memory"].kind == "crash"
    assert "2048 MiB" in by_command["memory"].reason
    assert by_command["close everything"].kind == "crash"
    assert set(children()) == before


@pytest.mark.slow
def test_memory_used_by_earlier_responses_fails_no_response(problem, hostile):
    """Three responses fill a child's memory; the next one runs in a fresh child."""
    with VerifierPool(workers=1, timeout_s=20) as pool:
        assert pool.verify([("", problem("5"))] * 8, [hostile("leaks")] * 8) == [Score(1.0)] * 8


@pytest.mark.slow
def test_imports_inside_a_function_do_not_count(problem, tmp_path):
    """Loading the file and the first call, which imports a package, take longer than the limit."""
    (tmp_path / "heavy_package.py").write_text("import time\ntime.sleep(2)\nVALUE = 1.0\n")
    verifier = tmp_path / "mine.py"
    verifier.write_text(
        "import sys, time\n"
        "time.sleep(2)\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "def score(response, problem):\n"
        "    import heavy_package\n"
        "    time.sleep(60 if response == 'hang' else 0)\n"
        "    return heavy_package.VALUE\n"
    )
    with VerifierPool(workers=1, timeout_s=1) as pool:
        items = [("", problem("5")), ("hang", problem("5")), ("", problem("5"))]
        first, hanging, last = pool.verify(items, [f"{verifier}:score"] * 3)
    assert first == last == Score(1.0)
    assert isinstance(hanging, Failure) and hanging.kind == "timeout"


def test_return_values_of_user_verifiers(problem, hostile):
    cases = ["true", "int", "float", "dict", "nan", "infinite", "nan part", "none", "text"]
    cases += ["no score", "list", "missing"]
    with VerifierPool(workers=1, timeout_s=20) as pool:
        results = pool.verify(
            [(case, problem("5")) for case in cases], [hostile("returns")] * len(cases)
        )
    assert results[:4] == [Score(1.0), Score(2.0), Score(0.25), Score(0.5, {"acc": 1.0})]
    assert [r.kind for r in results[4:] if isinstance(r, Failure)] == ["invalid"] * 7 + ["error"]
    assert results[-1].reason.startswith("KeyError: 'missing' (hostile_verifiers.py, line ")


def test_child_imports_no_torch_and_gets_all_fields_of_the_problem(problem, hostile):
    numpy = pytest.importorskip("numpy")
    sent_problem = problem(
        "5",
        demonstrations=("a", "b"),
        extra={"array": numpy.array([1, 2]), "number": numpy.float64(3.5)},
    )
    with VerifierPool(workers=1, timeout_s=20) as pool:
        (result,) = pool.verify([("", sent_problem)], [hostile("inspect_environment")])
    assert isinstance(result, Score) and result.parts.pop("pid") != os.getpid()
    assert result.parts == {"torch": 0.0, "messages": 1.0, "demonstrations": 1.0, "extra": 1.0}


@pytest.mark.slow
def test_large_responses_and_odd_characters(problem, hostile):
    responses = ["x" * 1_000_000] * 40 + ["\ud800 \x00 \n é", ""]
    with VerifierPool(workers=2, timeout_s=20) as pool:
        results = pool.verify(
            [(r, problem("5")) for r in responses], [hostile("length")] * len(responses)
        )
    assert results == [Score(float(len(r))) for r in responses]


def test_a_module_that_loads_here_but_not_in_the_child(problem, tmp_path):
    file = tmp_path / "picky.py"
    file.write_text(
        "import sys\nassert 'pytest' in sys.modules, 'only here'\n"
        "def right(response, problem):\n    return 1.0\n"
    )
    with VerifierPool(workers=1, timeout_s=20) as pool:
        (result,) = pool.verify([("a", problem("5"))], [f"{file}:right"])
    assert isinstance(result, Failure) and result.kind == "error" and "only here" in result.reason


def test_unknown_verifier(problem):
    with VerifierPool(workers=2) as pool, refused("unknown_name", "reward.verifier"):
        pool.verify([("a", problem("5"))], ["mth"])


@pytest.mark.slow
def test_busy_children_end_when_the_parent_is_killed(hostile, children):
    """They are in C code that holds the GIL, where only SIGALRM ends them."""
    code = f"""if True:
        import time
        from postgrad.problem import Problem
        from postgrad.verifiers.pool import VerifierPool
        problem = Problem("p", (), "5")
        with VerifierPool(workers=2, timeout_s=1.5) as pool:
            pool.verify([("ok", problem)] * 2, [{hostile("by_command")!r}] * 2)
            print("scoring", flush=True)
            pool.verify([("hold the lock", problem)] * 2, [{hostile("by_command")!r}] * 2)
            time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "scoring\n"
    time.sleep(0.3)
    orphans = children(parent.pid)
    assert len(orphans) == 2
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    wait_for_end(*orphans)

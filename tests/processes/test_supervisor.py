"""The contract of child processes: kills, deadlines, replacement; no process is left.

What verifiers, environments and the model's process add is tested with them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import in_threads, join, wait_for, wait_for_end

from postgrad.errors import RunError
from postgrad.processes.child import Child, describe_exit
from postgrad.processes.supervisor import Ended, Supervisor

LIMIT_S = 20.0


def started() -> Supervisor:
    return Supervisor("worker_program", [], "worker", {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def pool(children):
    before = set(children())
    made = started()
    yield made
    made.close()
    assert set(children()) == before


def run(pool: Supervisor, *commands: str, workers: int = 1, limit_s: float = LIMIT_S) -> list:
    """Return per command True, or how its child ended."""
    rows = [command.split("=") for command in commands]
    results = pool.run(
        len(rows),
        workers,
        lambda items: [[item, *rows[item]] for item in items],
        lambda item: limit_s,
    )
    return [result if isinstance(result, Ended) else True for result in results]


@pytest.mark.parametrize(
    ("command", "late", "how"),
    [
        ("exit", False, "exit code 7"),
        ("segfault", False, "SIGSEGV"),
        ("close everything", False, "SIGKILL"),
        pytest.param("sleep", True, "SIGKILL", marks=pytest.mark.slow),
        ("die before the start", False, "exit code 4"),
    ],
)
def test_an_item_that_ends_its_child_fails_alone(pool, command, late, how):
    limit_s = 2.0 if late else LIMIT_S
    before, ended, after = run(pool, "ok", command, "ok", limit_s=limit_s)
    assert before is after is True
    assert (ended.late, ended.how) == (late, how)
    assert not late or ended.limit_s == limit_s


def test_results_are_in_order_with_few_children_and_all_files_are_closed(children):
    before, files = set(children()), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    pool = started()
    assert set(children()) == before, "children start only when needed"
    sizes = [i % 97 for i in range(1000)]
    results = pool.run(
        1000, 2, lambda items: [[i, "ok", "x" * sizes[i]] for i in items], lambda _: LIMIT_S
    )
    assert [size for size, _ in results] == [size + 4 for size in sizes]
    assert {pid for _, pid in results} <= set(children()) - before
    assert len(set(children()) - before) == 2
    pool.close()
    assert set(children()) == before
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208


@pytest.mark.slow
def test_the_limit_is_per_item_and_does_not_count_pauses(pool):
    assert run(pool, *["nap"] * 4, limit_s=1.5) == [True] * 4
    assert run(pool, "import", limit_s=1.0) == [True]


def test_items_of_a_child_that_leaves_on_purpose_are_not_to_blame(pool, monkeypatch):
    """It leaves once; its item is done by the next child."""
    sent = []

    def pack(items):
        sent.append(list(items))
        return [[item, "leave" if len(sent) == 1 else "ok"] for item in items]

    results = pool.run(3, 1, pack, lambda _: LIMIT_S)
    assert [len(result) for result in results] == [2, 2, 2]
    assert sent[0] == sent[1][:1]


@pytest.mark.slow
def test_grandchildren_are_killed_too(pool, tmp_path):
    note = tmp_path / "pid"
    (ended,) = run(pool, f"grandchild={note}", limit_s=3)
    assert ended.late
    wait_for_end(int(note.read_text()))


def test_an_idle_child_that_was_killed_is_replaced(pool):
    run(pool, "ok")
    (child,) = pool.children
    os.kill(child.process.pid, signal.SIGKILL)
    wait_for_end(child.process.pid)
    assert run(pool, "ok") == [True]


def test_children_that_cannot_start(pool, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(
            RunError, match=r"worker processes do not start \(exit code 1\); see their output above"
        ):
            run(pool, *["ok"] * 10, workers=2)
        assert not pool.children
    assert run(pool, "ok") == [True], "it is usable again"


def test_close_ends_run_in_another_thread(pool):
    outcome = []

    def work() -> None:
        with contextlib.suppress(RunError):
            outcome.append(run(pool, *["sleep"] * 4, workers=2, limit_s=600))
        outcome.append("ended")

    threads = in_threads(work)
    wait_for(lambda: len(pool.children) == 2, "both children")
    pool.close()
    pool.close()
    join(threads)
    assert outcome == ["ended"]
    with pytest.raises(RunError, match="closed"):
        run(pool, "ok")


def test_an_interrupt_leaves_no_children_and_no_old_results(pool, monkeypatch, children):
    """After Ctrl-C the busy children are gone; the next call does not get their old results."""
    before = set(children())
    calls = []

    def interrupted(*_: object) -> None:
        calls.append(1)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_handle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(pool, *["ok"] * 20, workers=2)
    assert len(calls) == 1 and set(children()) == before
    assert run(pool, *["ok"] * 3, workers=2) == [True] * 3


def test_a_garbage_collected_supervisor_ends_its_children(children):
    before = set(children())
    pool = started()
    run(pool, "ok")
    assert len(set(children()) - before) == 1
    del pool
    assert set(children()) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ok", "sleep"])
def test_children_end_when_the_parent_is_killed(command, children):
    """Idle, and in the middle of a call."""
    code = f"""if True:
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from postgrad.processes.supervisor import Supervisor
        pool = Supervisor("worker_program", [], "worker")
        for command in ("ok", {command!r}):
            print("running", flush=True)
            pool.run(2, 2, lambda items: [[i, command] for i in items], lambda _: 60)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["running\n"] * 2
    time.sleep(0.3)
    orphans = children(parent.pid)
    assert len(orphans) == 2
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    wait_for_end(*orphans)


def test_signals_to_all_processes_of_a_run_are_left_to_the_parent(pool):
    """The parent finishes its step first."""
    run(pool, "ok")
    (child,) = pool.children
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child.process.pid, number)
        assert run(pool, "ok") == [True]
    assert pool.children == [child]


def test_a_child_that_is_closed_ends_by_itself(children):
    """Its functions of atexit run; nothing is killed while there is time."""
    ended = threading.Event()
    child = Child("worker_program", [], lambda *_: None, lambda _: ended.set(), exit_limit_s=60)
    assert child.close(60) == "exit code 0"
    assert ended.is_set() and child.process.pid not in children()


def test_how_a_process_ended():
    assert [describe_exit(code) for code in (0, 7, -9, -63, None)] == [
        "exit code 0",
        "exit code 7",
        "SIGKILL",
        "signal 63",
        "still running",
    ]

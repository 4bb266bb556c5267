"""Sessions in threads and in child processes: every operation has a result, whatever happens."""

import time
from pathlib import Path

import numpy as np
import pytest
from games import Echo

from postgrad.environments.calls import Call
from postgrad.environments.host import ThreadHost
from postgrad.environments.pool import ChildPool
from postgrad.environments.port import EnvironmentFailure, Observation, Outcome, read_step
from postgrad.environments.session import Session, SessionSpec
from postgrad.problem import Failure, Problem

GAMES = Path(__file__).parent / "games.py"
LIMIT_S = 60.0


def spec(name: str, **changes) -> SessionSpec:
    return SessionSpec(f"{GAMES}:{name}", **changes)


def problem(uid: str = "u") -> Problem:
    return Problem(uid, ({"role": "user", "content": ""},), "")


@pytest.fixture(params=["threads", "processes"])
def host(request):
    made = ThreadHost() if request.param == "threads" else ChildPool(2)
    yield made
    made.close()


@pytest.fixture
def pool():
    made = ChildPool(2)
    yield made
    made.close()


def seen(text: str) -> Observation:
    """What reset() shows."""
    return Observation(({"role": "user", "content": text},))


def collect(sessions, count: int) -> dict:
    """The next `count` results by key."""
    results: dict = {}
    deadline = time.monotonic() + LIMIT_S
    while len(results) < count:
        assert time.monotonic() < deadline, f"only {results}"
        results.update(sessions.collect(1.0))
    return results


def test_a_session_opens_acts_and_ends(host):
    sessions = host.new_sessions()
    for key in (0, 1):
        sessions.open(key, spec("Echo", options={"turns": 2}), problem(f"p{key}"), seed=key)
    assert collect(sessions, 2) == {0: seen("hello p0"), 1: seen("hello p1")}
    sessions.act(0, "ab", [])
    sessions.act(1, "abc", [])
    replies = collect(sessions, 2)
    assert [replies[key].messages[0]["content"] for key in (0, 1)] == [
        "you said ab",
        "you said abc",
    ]
    assert [replies[key].reward for key in (0, 1)] == [2.0, 3.0]
    assert not replies[0].done
    sessions.act(0, "x", [])
    assert collect(sessions, 1)[0].done
    sessions.finish(0)
    assert collect(sessions, 1) == {0: Outcome(0.5, {"bonus": 0.25}, {"seen": ["ab", "x"]})}
    sessions.close(0)
    sessions.close(1)


def test_a_state_becomes_values_of_json_or_is_refused(host):
    sessions = host.new_sessions()
    for key, kind in enumerate(["plain", "tuple keys", "circular"]):
        sessions.open(key, spec("Board", options={"kind": kind}), problem(), 0)
    collect(sessions, 3)
    for key in range(3):
        sessions.finish(key)
    results = collect(sessions, 3)
    assert results[0].state == {"path": "/tmp", "3": [1.5]}
    for key in (1, 2):
        assert isinstance(results[key], Failure) and results[key].kind == "invalid"
        assert "get_state" in results[key].reason


def test_public_methods_are_tools(host):
    sessions = host.new_sessions()
    sessions.open(7, spec("Wallet", options={"money": 5}), problem(), 0)
    assert collect(sessions, 1) == {7: seen("")}
    sessions.act(7, "", [Call("pay", {"amount": 2}), Call("score", {})])
    answer = collect(sessions, 1)[7]
    texts = [message["content"] for message in answer.messages]
    assert texts == ["3 left", "error: there is no tool score; there are: pay"]
    assert (answer.calls, answer.errors, answer.done) == (2, 1, False)
    sessions.act(7, "I am done", [])
    assert collect(sessions, 1)[7] == Observation(done=True)
    sessions.finish(7)
    assert collect(sessions, 1)[7].reward == -3.0


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        pytest.param("hang", "timeout", marks=pytest.mark.slow),
        ("leave", "error"),
        ("raise", "error"),
        ("nan", "invalid"),
        ("wrong", "invalid"),
        ("no reward", "invalid"),
        ("done as text", "invalid"),
        ("swapped", "invalid"),
    ],
)
def test_a_failure_is_a_value(action, kind, host):
    sessions = host.new_sessions()
    sessions.open(0, spec("Hostile", timeout_s=2.0 if action == "hang" else 60.0), problem(), 0)
    collect(sessions, 1)
    sessions.act(0, action, [])
    result = collect(sessions, 1)[0]
    assert isinstance(result, Failure) and result.kind == kind


@pytest.mark.parametrize(
    ("value", "done"), [(True, True), (np.bool_(True), True), (np.int64(0), False), (1, True)]
)
def test_done_is_any_bool(value, done):
    assert read_step(("", 0.0, value))[2] is done


class Unscored(Echo):
    def score(self):
        return None


def test_a_score_of_none_is_a_failure():
    session = Session(SessionSpec(), problem(), 0)
    session.environment = Unscored()
    session.environment.reset(problem(), 0)
    with pytest.raises(EnvironmentFailure, match="score returned None"):
        session.finish()


def test_a_long_observation_is_cut_before_it_is_sent(host):
    sessions = host.new_sessions()
    sessions.open(0, spec("Hostile", max_chars=100), problem(), 0)
    collect(sessions, 1)
    sessions.act(0, "long", [])
    assert len(collect(sessions, 1)[0].messages[0]["content"]) == 105


@pytest.mark.slow
def test_a_crash_fails_one_session_and_the_others_are_replayed(pool):
    """Sessions of the same process lose their objects and get them back by replay."""
    sessions = pool.new_sessions()
    for key in range(4):
        sessions.open(key, spec("Hostile"), problem(), 0)
    collect(sessions, 4)
    for key in range(4):
        sessions.act(key, "go", [])
    assert {one.messages[0]["content"] for one in collect(sessions, 4).values()} == {"step 1"}
    sessions.act(0, "crash", [])
    assert collect(sessions, 1)[0].kind == "crash"
    for key in (1, 2, 3):
        sessions.act(key, "go", [])
    assert {one.messages[0]["content"] for one in collect(sessions, 3).values()} == {"step 2"}


@pytest.mark.slow
def test_a_session_that_ran_beside_a_crash_is_not_blamed(pool):
    """With one process, both sessions run when it dies; only the one that kills it fails."""
    pool.workers = 1
    sessions = pool.new_sessions()
    sessions.open(0, spec("Hostile"), problem(), 0)
    sessions.open(1, spec("Hostile", timeout_s=2.0), problem(), 0)
    collect(sessions, 2)
    sessions.act(1, "hang", [])
    sessions.act(0, "crash", [])
    results = collect(sessions, 2)
    assert (results[0].kind, results[1].kind) == ("crash", "timeout")

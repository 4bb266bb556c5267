"""Environments behind a server: a stand-in for OpenEnv's wire, and the openenv package itself."""

import os
import re
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from refused import refused
from tables import tabled
from test_pool import collect, problem, seen

from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.environments import remote
from postgrad.environments.host import ThreadHost
from postgrad.environments.lookup import Environments
from postgrad.environments.port import EnvironmentFailure, Outcome
from postgrad.environments.remote import RemoteEnvironment, find_action_field, problem_seed
from postgrad.environments.session import SessionSpec
from postgrad.problem import Failure

pytest.importorskip("websockets")
import wire_server

ROOT = Path(__file__).parents[2]
OPENENV_PYTHON = Path(os.environ.get("OPENENV_PYTHON", ROOT / ".venv-openenv/bin/python"))


@pytest.fixture
def serve():
    """Starts the stand-in in a thread; returns its address."""
    with ExitStack() as servers:
        yield lambda **options: servers.enter_context(wire_server.running(**options))
    remote.fetch_schema.cache_clear()


def remote_spec(url: str, timeout_s: float = 30.0, max_chars: int = 4096, **options) -> SessionSpec:
    """The session that a run with environment=URL makes."""
    config = EnvironmentConfig(url, options, timeout_s=timeout_s, max_chars=max_chars)
    return Environments(config, RolloutConfig()).spec_for(problem())


def open_sessions(url: str, keys=(0,), **changes):
    sessions = ThreadHost().new_sessions()
    for key in keys:
        sessions.open(key, remote_spec(url, **changes), problem(f"p{key}"), seed=key)
    return sessions


def test_a_session_plays_on_the_server(serve):
    sessions = open_sessions(serve(), (0, 1))
    assert collect(sessions, 2) == {0: seen("hello p0"), 1: seen("hello p1")}
    sessions.act(0, "ab", [])
    first = collect(sessions, 1)[0]
    assert (first.messages[0]["content"], first.reward, first.done) == ("ab", 2.0, False)
    sessions.act(0, "no reward", [])
    second = collect(sessions, 1)[0]
    assert (second.reward, second.done) == (0.0, False)
    sessions.finish(0)
    assert collect(sessions, 1) == {0: Outcome(state={"words": ["ab", "no reward"]})}
    for word, done in (("a", False), ("b", True)):
        sessions.act(1, word, [])
        assert collect(sessions, 1)[1].done is done


@pytest.mark.slow
@tabled("action, kind")
def test_a_failure_behind_a_server_is_a_value(action, kind, serve):
    timeout_s = 1.0 if action == "hang" else 30.0
    sessions = open_sessions(serve(), timeout_s=timeout_s)
    collect(sessions, 1)
    sessions.act(0, action, [])
    result = collect(sessions, 1)[0]
    assert isinstance(result, Failure) and result.kind == kind
    sessions.close(0)


def test_an_action_that_the_server_refuses_is_answered_with_the_reason(serve):
    sessions = open_sessions(serve())
    collect(sessions, 1)
    sessions.act(0, "invalid", [])
    result = collect(sessions, 1)[0]
    assert result.messages[0]["content"] == "error: not a word" and not result.done


def test_ten_megabytes_from_a_server_are_cut(serve):
    sessions = open_sessions(serve(), max_chars=100)
    collect(sessions, 1)
    sessions.act(0, "long", [])
    assert len(collect(sessions, 1)[0].messages[0]["content"]) == 105


@pytest.mark.slow
def test_a_full_server_is_waited_for_and_named_when_it_stays_full(serve):
    url = serve(sessions=1)
    sessions = open_sessions(url)
    collect(sessions, 1)
    with pytest.raises(EnvironmentFailure, match="1 sessions run") as error:
        RemoteEnvironment(url, timeout_s=3.0).reset(problem(), 0)
    assert error.value.failure.kind == "capacity"
    late = open_sessions(url, (6,))
    sessions.close(0)
    assert collect(late, 1) == {6: seen("hello p6")}


def test_the_token_is_sent(serve, monkeypatch):
    url = serve(token="secret")
    with refused("unreachable", "environment", shows="401"):
        remote_spec(url)
    monkeypatch.setenv(remote.TOKEN_VARIABLE, "secret")
    assert collect(open_sessions(url), 1) == {0: seen("hello p0")}


def test_each_run_asks_the_server_for_its_schema(serve):
    url = serve()
    remote.fetch_schema(url)["action"]["properties"] = {}  # as of a server that was replaced
    remote_spec(url)
    assert remote.fetch_schema(url)["action"]["properties"]


@pytest.mark.slow
def test_servers_that_cannot_be_used_are_refused(serve):
    with refused("unreachable", "environment"):
        remote_spec("http://127.0.0.1:1")
    with refused("unknown_name", "environment.options.action_field"):
        remote_spec(serve(), action_field="move")
    with refused("unknown_name", "environment.options.speed"):
        remote_spec(serve(), speed=3)
    with refused("damaged", "environment"):
        remote_spec(serve(schema={"observation": {}}))


def schema(required=(), **fields) -> dict:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    return {"action": {"properties": {**properties, "metadata": {}}, "required": list(required)}}


@pytest.mark.parametrize(
    ("described", "field", "text", "action"),
    [
        (schema(word="string"), "word", "12", {"word": "12"}),
        (schema(move="integer"), "move", "12", {"move": 12}),
        (schema(["word"], word="string", loud="boolean"), "word", "hi", {"word": "hi"}),
        (schema(row="integer", column="integer"), "", 'so: {"row": 1} ok', {"row": 1}),
        (schema(row="integer", column="integer"), "", "row 1", None),
    ],
)
def test_the_text_of_a_turn_becomes_an_action(described, field, text, action, monkeypatch):
    assert find_action_field(described) == field
    monkeypatch.setattr(remote, "fetch_schema", lambda url: described)
    assert RemoteEnvironment("http://h")._action(text) == action


# ---- the openenv package, in an environment of its own: its dependencies exclude mcp 2


@pytest.fixture
def openenv(tmp_path):
    if not OPENENV_PYTHON.exists():
        pytest.skip("openenv is not installed; run make test-openenv")
    processes = []

    def start(kind: str) -> str:
        script = Path(__file__).parent / "openenv_server.py"
        processes.append(subprocess.Popen([str(OPENENV_PYTHON), str(script), str(tmp_path), kind]))
        deadline = time.monotonic() + 120
        while not (tmp_path / "address").exists():
            assert processes[0].poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        return (tmp_path / "address").read_text()

    yield start
    remote.fetch_schema.cache_clear()
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_the_real_server_plays_episodes(openenv):
    url = openenv("word")
    spec = remote_spec(url, observation_field="echo", max_chars=100)
    sessions = ThreadHost().new_sessions()
    for key in (0, 1):
        sessions.open(key, spec, problem("same"), seed=key)
    texts = {key: one.messages[0]["content"] for key, one in collect(sessions, 2).items()}
    assert texts[0] == texts[1] == f" same {problem_seed(problem('same'))}"
    sessions.act(0, "hello", [])
    reply = collect(sessions, 1)[0]
    assert (reply.messages[0]["content"], reply.reward, reply.done) == ("hello", 5.0, False)
    sessions.act(0, "end", [])
    assert collect(sessions, 1)[0].done
    sessions.finish(0)
    outcome = collect(sessions, 1)[0]
    assert outcome.state["words"] == ["hello", "end"] and outcome.reward == 0.0
    sessions.act(1, "long", [])
    assert len(collect(sessions, 1)[1].messages[0]["content"]) == 105
    sessions.act(1, "raise", [])
    assert collect(sessions, 1)[1] == Failure("error", "no such word")
    late = ThreadHost().new_sessions()
    late.open(2, spec, problem("late"), 0)  # the server runs two sessions at a time
    sessions.close(0)
    assert collect(late, 1)[2].messages[0]["content"].startswith(" late")
    late.close(2)
    late.open(3, remote_spec(url, timeout_s=1.0), problem("late"), 0)
    collect(late, 1)
    late.act(3, "hang", [])
    assert collect(late, 1)[3].kind == "timeout"


@pytest.mark.slow
def test_the_real_server_takes_actions_of_several_fields(openenv):
    sessions = ThreadHost().new_sessions()
    sessions.open(0, remote_spec(openenv("move")), problem(), 0)
    assert collect(sessions, 1) == {0: seen("{}")}
    for text in ("top left", '{"row": "x", "column": 2}'):
        sessions.act(0, text, [])
        reply = collect(sessions, 1)[0]
        assert reply.messages[0]["content"].startswith("error: ") and not reply.done
        assert re.search("row|integer", reply.messages[0]["content"])
    sessions.act(0, 'I take {"row": 1, "column": 2}', [])
    reply = collect(sessions, 1)[0]
    assert (reply.reward, reply.done) == (12.0, True)

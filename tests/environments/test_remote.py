"""Environments behind a server: our own server, and the one of the openenv package."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from test_pool import GAMES, collect, problem

from postgrad import web
from postgrad.cli.main import main
from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.environments import remote
from postgrad.environments.host import ThreadHost
from postgrad.environments.lookup import Environments
from postgrad.environments.port import EnvironmentFailure, Outcome
from postgrad.environments.remote import RemoteEnvironment, find_action_field, problem_seed
from postgrad.environments.server import make_app
from postgrad.environments.session import SessionSpec
from postgrad.errors import ConfigError
from postgrad.problem import Failure

pytest.importorskip("websockets")
ROOT = Path(__file__).parents[2]
OPENENV_PYTHON = Path(os.environ.get("OPENENV_PYTHON", ROOT / ".venv-openenv/bin/python"))


@pytest.fixture
def serve():
    """Starts our server for an environment class in a thread; returns its address."""
    servers = []

    def start(spec: SessionSpec, token: str = "", sessions: int = 8) -> str:
        app = make_app(spec, "127.0.0.1", token, sessions)
        server = web.make_server(app, 1, websockets=True)
        listener = web.listen("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        servers.append((server, thread))
        return web.address_of(listener)

    yield start
    remote.fetch_schema.cache_clear()
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


def game(name: str, **options) -> SessionSpec:
    return SessionSpec(f"{GAMES}:{name}", options)


def remote_spec(url: str, timeout_s: float = 30.0, max_chars: int = 4096, **options) -> SessionSpec:
    """The session that a run with environment=URL makes."""
    config = EnvironmentConfig(url, options, timeout_s=timeout_s, max_chars=max_chars)
    return Environments(config, RolloutConfig()).spec_for(problem())


def open_sessions(url: str, keys=(0,), **changes):
    sessions = ThreadHost().new_sessions()
    for key in keys:
        sessions.open(key, remote_spec(url, **changes), problem(f"p{key}"), seed=key)
    return sessions


def test_a_class_behind_a_server_is_the_class(serve):
    sessions = open_sessions(serve(game("Echo", turns=2)), (0, 1))
    assert collect(sessions, 2) == {0: "hello p0", 1: "hello p1"}
    sessions.act(0, "ab", [])
    first = collect(sessions, 1)[0]
    assert (first.messages[0]["content"], first.reward, first.done) == ("you said ab", 2.0, False)
    sessions.act(0, "x", [])
    assert collect(sessions, 1)[0].done
    sessions.finish(0)
    assert collect(sessions, 1) == {0: Outcome(0.5, {"bonus": 0.25}, {"seen": ["ab", "x"]})}


@pytest.mark.slow
@pytest.mark.parametrize(("action", "kind"), [("raise", "error"), ("nan", "error"),
                                              ("wrong", "error"), ("hang", "timeout")])  # fmt: skip
def test_a_failure_behind_a_server_is_a_value(action, kind, serve):
    timeout_s = 3.0 if action == "hang" else 30.0
    sessions = open_sessions(serve(game("Hostile")), timeout_s=timeout_s)
    collect(sessions, 1)
    sessions.act(0, action, [])
    result = collect(sessions, 1)[0]
    assert isinstance(result, Failure) and result.kind == kind
    sessions.close(0)


def test_ten_megabytes_from_a_server_are_cut(serve):
    """The server sends them whole: its own limit is far higher here."""
    sessions = open_sessions(
        serve(SessionSpec(f"{GAMES}:Hostile", max_chars=20_000_000)), max_chars=100
    )
    collect(sessions, 1)
    sessions.act(0, "long", [])
    assert len(collect(sessions, 1)[0].messages[0]["content"]) == 105


@pytest.mark.slow
def test_a_full_server_is_waited_for_and_named_when_it_stays_full(serve):
    url = serve(game("Echo"), sessions=1)
    sessions = open_sessions(url)
    collect(sessions, 1)
    with pytest.raises(EnvironmentFailure, match="1 of 1 sessions") as error:
        RemoteEnvironment(url, timeout_s=3.0).reset(problem(), 0)
    assert error.value.failure.kind == "capacity"
    late = open_sessions(url, (6,))
    sessions.close(0)
    assert collect(late, 1) == {6: "hello p6"}


@pytest.mark.slow
def test_a_server_that_dies_fails_its_trajectories():
    command = [sys.executable, "-m", "postgrad.cli.main", "environment", f"{GAMES}:Hostile"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        sessions = open_sessions(process.stdout.readline().strip(), (0, 1))
        collect(sessions, 2)
        sessions.act(0, "crash", [])  # the environment kills its own process
        assert collect(sessions, 1)[0].kind == "connection"
        sessions.act(1, "go", [])
        assert collect(sessions, 1)[1].kind == "connection"
        assert process.wait(10) == -signal.SIGKILL
    remote.fetch_schema.cache_clear()


def test_a_server_with_a_token_refuses_others(serve, monkeypatch):
    url = serve(game("Echo"), token="secret")
    with pytest.raises(ConfigError, match="401"):
        remote_spec(url)
    monkeypatch.setenv(remote.TOKEN_VARIABLE, "secret")
    assert collect(open_sessions(url), 1) == {0: "hello p0"}


def test_a_server_for_other_machines_has_any_name_for_clients_with_the_token():
    name = {"Host": "gpu1.cluster.example"}
    client = TestClient(make_app(game("Echo"), "0.0.0.0", "secret"))
    assert client.get("/schema", headers=name).status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert client.get("/schema", headers=name | key).status_code == 200
    open_client = TestClient(make_app(game("Echo"), "0.0.0.0"))
    assert open_client.get("/schema", headers=name).status_code == 401


def test_each_run_asks_the_server_for_its_schema(serve):
    url = serve(game("Echo"))
    remote.fetch_schema(url)["action"]["properties"] = {}  # as of a server that was replaced
    remote_spec(url)
    assert remote.fetch_schema(url)["action"]["properties"]


@pytest.mark.slow
def test_servers_that_cannot_be_used_are_refused(serve):
    with pytest.raises(ConfigError, match=r"environment=http://127\.0\.0\.1:1"):
        remote_spec("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"environment\.options\.action_field=move"):
        remote_spec(serve(game("Echo")), action_field="move")
    with pytest.raises(ConfigError, match=r"environment\.options"):
        remote_spec(serve(game("Echo")), speed=3)
    with pytest.raises(ConfigError, match="Wallet"):
        make_app(game("Wallet"), "127.0.0.1")
    assert main(["environment", f"{GAMES}:Echo", "turn=2"]) == 2
    assert main(["environment", f"{GAMES}:NoEnvironment"]) == 2


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
    texts = collect(sessions, 2)
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
    assert collect(late, 1)[2].startswith(" late")
    late.close(2)
    late.open(3, remote_spec(url, timeout_s=1.0), problem("late"), 0)
    collect(late, 1)
    late.act(3, "hang", [])
    assert collect(late, 1)[3].kind == "timeout"


@pytest.mark.slow
def test_the_real_server_takes_actions_of_several_fields(openenv):
    sessions = ThreadHost().new_sessions()
    sessions.open(0, remote_spec(openenv("move")), problem(), 0)
    assert collect(sessions, 1) == {0: "{}"}
    for text in ("top left", '{"row": "x", "column": 2}'):
        sessions.act(0, text, [])
        reply = collect(sessions, 1)[0]
        assert reply.messages[0]["content"].startswith("error: ") and not reply.done
        assert re.search("row|integer", reply.messages[0]["content"])
    sessions.act(0, 'I take {"row": 1, "column": 2}', [])
    reply = collect(sessions, 1)[0]
    assert (reply.reward, reply.done) == (12.0, True)

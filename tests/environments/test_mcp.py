"""Tools of a real MCP server, started as a command."""

import os
import sys
import threading
from pathlib import Path

import pytest
from refused import refused

from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.environments import mcp_tools
from postgrad.environments.calls import Call
from postgrad.environments.lookup import Environments
from postgrad.environments.session import Session
from postgrad.environments.tools import Toolbox
from postgrad.problem import Problem

SERVER = Path(__file__).parent / "mcp_server.py"


@pytest.mark.slow
def test_the_tools_of_a_server():
    pytest.importorskip("mcp")
    box = Toolbox([f"mcp:{sys.executable} {SERVER}"], timeout_s=30)
    (schema,) = box.schemas
    assert schema["function"]["name"] == "buy"
    assert set(schema["function"]["parameters"]["properties"]) == {"item", "count"}
    problem = Problem("u", (), "")
    assert box.answer(Call("buy", {"item": "apples", "count": 2}), problem, {}) == "1 apples left"
    late = box.answer(Call("buy", {"item": "apples", "count": 2}), problem, {})
    assert late.startswith("error: ") and "not enough apples" in late
    assert box.answer(Call("buy", {}), problem, {}).startswith("error: ")
    box.close()


BUY = Call("buy", {"item": "apples", "count": 2})
PROBLEM = Problem("u", (), "")


def new_run(prefix: str) -> Environments:
    rollout = RolloutConfig(tools=[f"{prefix}{sys.executable} {SERVER}"], tool_timeout_s=30)
    return Environments(EnvironmentConfig(), rollout)


def connections() -> list[threading.Thread]:
    """Return the threads that hold connections open."""
    return [one for one in threading.enumerate() if one.name.startswith("mcp ")]


def buy(session: Session) -> str:
    (message,) = session.act("", [BUY]).messages
    return message["content"]


@pytest.mark.slow
def test_a_run_has_its_own_connection():
    """The server sells its three apples once per run, whatever an earlier run bought."""
    pytest.importorskip("mcp")
    first, second = new_run("mcp:"), new_run("mcp:")
    one = Session(first.spec_for(PROBLEM), PROBLEM, 0)
    assert buy(one) == "1 apples left"
    assert "not enough" in buy(Session(first.spec_for(PROBLEM), PROBLEM, 1))  # shared in a run
    other = Session(second.spec_for(PROBLEM), PROBLEM, 0)
    assert buy(other) == "1 apples left"
    first.close()
    assert buy(one).startswith("error: ")
    assert "not enough" in buy(other)  # the other run still has its connection
    second.close()
    assert not connections()


@pytest.mark.slow
def test_a_trajectory_has_its_own_connection():
    pytest.importorskip("mcp")
    run = new_run("mcp_session:")
    assert [schema["function"]["name"] for schema in run.schemas] == ["buy"]
    assert not connections()  # the list of tools needs none any more
    sessions = [Session(run.spec_for(PROBLEM), PROBLEM, seed) for seed in range(2)]
    assert [buy(session) for session in sessions] == ["1 apples left"] * 2
    assert "not enough" in buy(sessions[0])
    sessions[0].close()
    assert len(connections()) == 1
    run.close()  # also those of trajectories that were not closed
    assert not connections()


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_refused():
    pytest.importorskip("mcp")
    with refused("unreachable", "rollout.tools"):
        Toolbox(["mcp:no-such-command --here"])


@pytest.mark.slow
def test_a_server_that_does_not_answer_in_time_is_stopped(tmp_path, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(mcp_tools, "START_S", 3.0)
    monkeypatch.chdir(tmp_path)
    with refused("unreachable", "rollout.tools"):
        mcp_tools.McpServer("sh -c 'echo $$ > pid; exec sleep 600'")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)

"""Tools of a real MCP server, started as a command."""

import os
import sys
from pathlib import Path

import pytest

from postgrad.environments import mcp_tools
from postgrad.environments.calls import Call
from postgrad.environments.tools import Toolbox
from postgrad.errors import ConfigError
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


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_refused():
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match="no-such-command"):
        Toolbox(["mcp:no-such-command --here"])


@pytest.mark.slow
def test_a_server_that_does_not_answer_in_time_is_stopped(tmp_path, monkeypatch):
    pytest.importorskip("mcp")
    monkeypatch.setattr(mcp_tools, "START_S", 3.0)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="sleep"):
        mcp_tools.connect("sh -c 'echo $$ > pid; exec sleep 600'")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)

"""`postgrad init`: its files pass their own test, and it never overwrites a file."""

import subprocess
import sys

import preloaded
import pytest
from tables import tabled
from tiny_runs import tree

from postgrad.cli.main import main


@pytest.mark.slow
@tabled("arguments, command")
def test_the_written_files_pass_their_own_test(arguments, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == 0
    out = capsys.readouterr().out
    name = arguments[0]
    assert sorted(tree(tmp_path)) == [f"{name}.py", f"test_{name}.py"]
    assert command in out
    assert f"python -m pytest test_{name}.py" in out
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider"]
    done = preloaded.run(program, *options, f"test_{name}.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=100"]
    lint = subprocess.run(
        [*ruff, "--select=E,F,W,B,UP", "."], capture_output=True, text=True, cwd=tmp_path
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_without_arguments_it_prints_the_help(capsys):
    assert main(["init"]) == 0
    assert "--verifier" in capsys.readouterr().out

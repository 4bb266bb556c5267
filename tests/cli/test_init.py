"""`postgrad init`: what it writes works as it is written, and it never writes over anything."""

import os
import subprocess
import sys

import pytest
from world import tree

from postgrad.cli.main import main


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "use"),
    [
        (
            ["my_method"],
            "postgrad train grpo method=my_method:MyMethod model.path=MODEL data.train=FILE",
        ),
        (
            ["my_verifier", "--verifier"],
            "postgrad train grpo reward.verifier=my_verifier.py:my_verifier model.path=MODEL data.train=FILE",
        ),
    ],
)
def test_what_it_writes_passes_its_own_test_as_written(
    overrides, use, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *overrides]) == 0
    out = capsys.readouterr().out
    name = overrides[0]
    assert sorted(tree(tmp_path)) == [f"{name}.py", f"test_{name}.py"]
    assert use in out and f"python -m pytest test_{name}.py" in out
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{name}.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lint = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=140", "--select=E,F,W,B,UP", "."],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert lint.returncode == 0, lint.stdout + lint.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["there"], "there.py is there already; choose another name, or move it away"),
        (["half"], "test_half.py is there already"),
        (["there", "--verifier"], "there.py is there already"),
        (
            ["my-method"],
            "my-method cannot be the name of a Python file; use letters, digits and _, e.g. my_method",
        ),
        (["class"], "class cannot be the name of a Python file"),
        (["../up"], "cannot be the name of a Python file"),
        (
            ["torch"],
            "torch is the name of an installed module, which torch.py would hide; choose another, e.g. my_torch",
        ),
        (["a", "b"], "init wants one name, and --verifier if you like; it got a b"),
        (["--verifyer", "a"], "init wants one name"),
        (["--verifier"], "init wants one name, and --verifier if you like; it got none"),
    ],
)
def test_wrong_names_are_one_line_and_nothing_is_written(
    overrides, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("mine = 1\n")
    (tmp_path / "test_half.py").write_text("mine = 1\n")
    before = tree(tmp_path)
    assert main(["init", *overrides]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and tree(tmp_path) == before


def test_help(capsys):
    assert main(["init"]) == 0 and "--verifier" in capsys.readouterr().out

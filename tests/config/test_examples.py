"""Every script of examples/ composes and passes the checks; the smallest one runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.config.compose import compose
from postgrad.data.prepare.request import parse_request
from postgrad.methods import find_method

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))


def commands(script: Path) -> list[list[str]]:
    lines = script.read_text().replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith("postgrad ")]


def test_every_script_is_listed():
    listed = re.findall(r"^\| `([^`]+)`", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    scripts = [name for name in listed if "/" not in name]
    assert sorted(scripts) == [script.name for script in SCRIPTS] and len(scripts) >= 15
    environments = {f"environments/{file.name}" for file in EXAMPLES.glob("environments/*.py")}
    assert {name for name in listed if "/" in name} == environments


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_commands_pass_the_checks(script):
    assert os.access(script, os.X_OK)
    for _, command, name, *words in commands(script):
        if command == "data":
            set_name, *options = words
            pairs = dict(word.split("=", 1) for word in options)
            for key in ("out", "tokenizer"):
                pairs.pop(key, None)
            parse_request(set_name, pairs, len)
            continue
        overrides = [word.replace("$", "") for word in words]
        config = compose(name, overrides, lambda name: find_method(name).Settings)
        find_method(config.method.name)(config).check()


@pytest.mark.slow
def test_smallest_script_runs(tmp_path):
    program = tmp_path / "bin" / "postgrad"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m postgrad.cli.main "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(EXAMPLES / "tiny.sh")], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/example-tiny/metrics.jsonl").is_file()

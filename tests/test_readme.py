"""The commands and the Python of README.md run as they are, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


def test_the_first_screen_has_commands_a_picture_and_python():
    lines = (ROOT / "README.md").read_text().splitlines()
    first = "\n".join(lines[:40])
    assert len(lines) <= 130
    assert all(text in first for text in ("make demo", "make test", "![", "```python"))
    assert [language for language, _ in BLOCKS] == ["python", "sh"]
    assert BLOCKS[0][1] in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("language", "code"),
    [
        pytest.param(*block, id=block[0], marks=[pytest.mark.nightly] * (block[0] == "sh"))
        for block in BLOCKS
    ],
)
def test_a_block_runs_as_it_is(language, code, tmp_path):
    program = [sys.executable, "-c"] if language == "python" else ["bash", "-euc"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*program, code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "runs").glob("*/checkpoints/latest")), done.stdout
    if language == "python":  # the reward of the last step is more than twice that of the first
        rewards = re.findall(r"\[(.*)\]", done.stdout.splitlines()[-1])[0].split(", ")
        assert float(rewards[-1]) > 2 * float(rewards[0])

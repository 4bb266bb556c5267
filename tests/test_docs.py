"""The documentation builds, and its links lead somewhere."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def build(folder: Path, out: Path) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "-f",
        str(folder / "mkdocs.yml"),
        "-d",
        str(out),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_every_page_is_in_the_site_and_every_link_is_found(tmp_path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        place = (
            tmp_path / "index.html" if page.stem == "index" else tmp_path / page.stem / "index.html"
        )
        assert "<h1" in place.read_text(), page


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[gone](no-such-page.md)", "[gone](scale.md#no-such-heading)"])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path, text):
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as file:
        file.write(f"\n{text}\n")
    assert build(tmp_path, tmp_path / "site").returncode != 0

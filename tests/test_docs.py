"""The documentation builds, and its links lead somewhere."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))

import docs_site  # noqa: E402

FOLDERS = (ROOT, ROOT / "src" / "postgrad")
# BuPO's own script.
ELSEWHERE = {"visualization/plot_internal_entropy.py"}


def build(folder: Path, out: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "-f", str(folder / "mkdocs.yml")]
    return subprocess.run([*command, "-d", str(out)], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_in_the_site_and_every_link_is_found(site):
    for page in (ROOT / "docs").glob("*.md"):
        place = site / "index.html" if page.stem == "index" else site / page.stem / "index.html"
        assert "<h1" in place.read_text(), page
    assert "Trainer.stop()" in (site / "reference" / "index.html").read_text()


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    page = (site / "index.html").read_text()
    assert not re.findall(r'(?:src|stylesheet" href)="(?:https?:)?//[^"]*', page)


def test_formulas_become_mathml_and_code_stays():
    text = "A $x^2$ and `$x$`.\n\n    $ make\n    $ make $HOME\n\n$$\n\\log x\n$$\n"
    shown = docs_site.with_formulas(text)
    assert shown.count("<math") == 2 and 'display="block"' in shown
    assert "`$x$`" in shown and "    $ make\n    $ make $HOME\n" in shown


def test_files_that_the_pages_name_exist():
    gone: list[str] = []
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        names = re.findall(
            r"`(?:python |pytest )?((?:[\w.*-]+/)+[\w.*-]+\.(?:py|md|jsonl))", page.read_text()
        )
        found = {name for name in names for folder in FOLDERS if any(folder.glob(name))}
        gone += [f"{page.name}: {name}" for name in names if name not in found | ELSEWHERE]
    assert gone == []


@pytest.mark.nightly
@pytest.mark.parametrize("text", ["[gone](no-such-page.md)", "[gone](machines.md#no-such-heading)"])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path, text):
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for folder in ("docs", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    with (tmp_path / "docs" / "index.md").open("a") as file:
        file.write(f"\n{text}\n")
    assert build(tmp_path, tmp_path / "site").returncode != 0

"""The attacks notice a missing protection: each row breaks one in a copy of src, and one must fail.

The changed text must be in the file: if a protection moves, move its row.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
INSIDE = "sandbox/inside/"


class Mutation(NamedTuple):
    """What is broken: in the file, `old` becomes `new`. The selected tests of `tests` then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    selection: str


def cheats(name: str, file: str, old: str, new: str, selection: str) -> Mutation:
    return Mutation(name, INSIDE + file, old, new, "sandbox/test_cheats.py", selection)


PAGE, SERVER = "view/test_server.py", "sandbox/test_sandbox_server.py"
ESCAPES, MODELS = "sandbox/test_sandbox_escapes.py", "attack/test_hostile_models.py"
FOLDER = "model/load/folder_checks.py"
MUTATIONS = [
    Mutation("no Host check", "net/guard.py", "if not any_name and", "if False and", PAGE,
             "other_hosts"),
    Mutation("no token check", "net/guard.py", "return not token or", "return True or", SERVER,
             "token_is_required"),
    Mutation("no system-call filter", "sandbox/seccomp.py", "if machine not in ARCHITECTURES",
             "if True", ESCAPES, "no_access_to_other or no_child_processes"),
    Mutation("open files without limit", INSIDE + "limits.py", "OPEN_FILES = 64",
             "OPEN_FILES = 1000", ESCAPES, "open_files"),
    Mutation("links out of the folder", FOLDER, "if not file.is_symlink():", "if True:", MODELS,
             "refused and link"),
    Mutation("pickles", FOLDER, 'PICKLES = (".bin", ".pt",', "PICKLES = (", MODELS,
             "refused and pickle"),
    cheats("operators of the program", "handles.py",
           'return self._handle_channel.refuse(f"used by an operator, {name}")',
           'return self._handle_channel.ask_attribute(self, f"__{name}__")(*_)', "tolerance"),
    cheats("fields that hide methods", "plain.py", "if callable(item) and field in ATTRIBUTES",
           "if False", "hide_methods or namedtuple"),
    cheats("exceptions that nobody demands", "test_runner.py",
           "if self.demanded.isdisjoint(names)", "if False", "exceptions"),
    cheats("results that end early", "lengths.py", "if not self.is_result(iterables[ended])",
           "if True", "results"),
    cheats("Python's functions in the test's process", "test_runner.py", """\
        name = standard_name(value)
        if name:
            return plain.tagged("standard", name)
        if not self.is_own_function(value):
""", "        if not callable(value):\n", "functions"),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_missing_protection_is_noticed(mutation, tmp_path):
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    file = source / "postgrad" / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1
    file.write_text(text.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--nightly", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/{mutation.tests}", "-k", mutation.selection],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1 and re.search(r"^FAILED ", done.stdout, re.MULTILINE), done.stdout

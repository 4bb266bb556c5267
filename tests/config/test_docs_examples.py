"""The commands of the documentation compose.

Every `postgrad train` and `postgrad doctor --fit` passes its method's check and has a mesh that its
workers can form; every `postgrad launch` prints a job file.
"""

import re
import shlex
from pathlib import Path

import pytest

from postgrad.cli.main import main
from postgrad.config.compose import compose, recipe_names
from postgrad.methods import find_method
from postgrad.model.parallel.ranks import check_mesh

ROOT = Path(__file__).parents[2]
REQUIRED = {"model.path": "tiny", "data.train": "arithmetic:1"}
# Commands that the documentation shows as wrong, or that use a module which the reader writes.
EXCEPTIONS = ("optimizer.lrr", "method=careful:", "method=my_")


def find_commands(pattern: str) -> list[str]:
    """Returns what follows the pattern in the commands of the documentation."""
    commands: list[str] = []
    for page in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(rf"{pattern} ([^\n`]*)", text):
            commands.append(re.split(r" #|; | && | > ", line)[0])
    return list(dict.fromkeys(commands))


def examples() -> list[str]:
    """Returns recipe and overrides of each command, without those for any RECIPE."""
    commands: list[str] = []
    for pattern in ("postgrad train", "postgrad doctor --fit"):
        for command in find_commands(pattern):
            command = re.sub(r" --device(-gib)? \S+", "", command)
            command = re.sub(r"\$\w+", "1", command)  # a variable of the shell
            if command.split(" ")[0] not in recipe_names():
                continue
            if not any(exception in command for exception in EXCEPTIONS):
                commands.append(command)
    return list(dict.fromkeys(commands))


def test_the_documentation_has_examples():
    assert len(examples()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("command", examples())
def test_a_documented_command_passes_the_checks(command):
    arguments = [word for word in shlex.split(command) if word not in ("...", "…")]
    recipe, *overrides = [word for word in arguments if not word.startswith("-")]
    keys = {override.partition("=")[0] for override in overrides}
    overrides += [f"{key}={value}" for key, value in REQUIRED.items() if key not in keys]
    config = compose(recipe, overrides, lambda name: find_method(name).Settings)
    find_method(config.method.name)(config).check()
    if config.cluster.backend == "ray":
        check_mesh(config.cluster.workers, config.cluster)


def test_documented_job_files_are_printed(capsys):
    commands = [command for command in find_commands("postgrad launch") if "=" in command]
    assert len(commands) >= 4
    for command in commands:
        words = [word for word in shlex.split(command) if word not in ("...", "…")]
        assert main(["launch", *words]) == 0, command
        assert "postgrad" in capsys.readouterr().out

"""The program without a known command: what it says."""

import pytest

from postgrad.cli.main import COMMANDS, OTHER_NAMES, main


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("infer", "use postgrad generate MODEL"),
        ("resume", "use postgrad train RECIPE"),
        ("grpo", "it is a recipe: postgrad train grpo"),
        ("trian", "did you mean train?"),
    ],
)
def test_an_unknown_command_names_the_one_to_use(capsys, wrong, hint):
    assert main([wrong]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"unknown command {wrong}" in line and hint in line


def test_names_of_other_programs_lead_to_commands():
    for name, command in OTHER_NAMES.items():
        assert name not in COMMANDS
        assert COMMANDS[command][1].startswith(f"{command} ")

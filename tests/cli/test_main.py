"""The program without a known command: what it says."""

from operator import itemgetter

import pytest

from postgrad.cli import train
from postgrad.cli.main import COMMANDS, OTHER_NAMES, main


def test_names_of_other_programs_lead_to_commands():
    for name, command in OTHER_NAMES.items():
        assert name not in COMMANDS
        assert COMMANDS[command].startswith(f"{command} ")


def test_ctrl_c_that_a_library_replaces_by_its_own_error_is_one_line(capsys, monkeypatch):
    """As the clean-up of a library may do."""

    def run(argv):
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("'NoneType' object has no attribute")

    monkeypatch.setattr(train, "run", run)
    assert main(["train", "grpo"]) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("postgrad: stopped; the same command continues")


def test_a_mistake_of_the_program_is_raised(monkeypatch):
    """One in a user's file is a line; this one has no frame outside of the package."""
    monkeypatch.setattr(train, "run", itemgetter(9))
    with pytest.raises(IndexError):
        main(["train", "grpo"])

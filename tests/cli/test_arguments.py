"""A command's parser is made from the function: words, settings, options, types, defaults, help."""

import importlib
from pathlib import Path
from typing import Any, Literal

import pytest
from tables import tabled

from postgrad.cli.arguments import CountFrom1, HelpPrinted, Parser
from postgrad.cli.main import COMMANDS, MODULES
from postgrad.errors import ConfigError


def convert(
    files: list[Path],
    *overrides: str,
    from_: str,
    steps: CountFrom1 = 3,
    kind: Literal["merge", "keep"] = "merge",
    is_private: bool = True,
    dry_run: bool = False,
    name: str | None = None,
) -> Any:
    """Convert files.

    Args:
        files [FILE]: what is read
        overrides: settings, see below
        from: where the rows are from
        steps [N]: how many steps; a long help text goes on
            in the next line
        kind: what happens
        is_private: who may read
        --dry-run: write nothing
        --name: of the result

    After the arguments.
    """
    return files, overrides, from_, steps, kind, is_private, dry_run, name


PARSER = Parser(convert, "convert")


def test_words_settings_and_options_reach_the_parameters():
    argv = ["a.txt", "from=hub", "steps=7", "--dry-run", "--name", "x", "is_private=false"]
    expected = ([Path("a.txt")], (), "hub", 7, "merge", False, True, "x")
    assert PARSER.call(argv) == expected
    assert PARSER.call(["a", "from=b"])[2:] == ("b", 3, "merge", True, False, None)


def test_the_help_has_the_docstring_and_the_defaults(capsys):
    with pytest.raises(HelpPrinted):
        PARSER.call([])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "usage: postgrad convert FILE [FILE ...] [key=value ...] from=FROM [steps=N]",
        "Convert files.",
        "how many steps; a long help text goes on in the next line (default 3)",
        "is_private=true|false who may read (default true)",
        "--dry-run write nothing",
        "After the arguments.",
    ):
        assert part in text


@tabled("argv, message")
def test_mistakes_name_the_argument(argv, message):
    with pytest.raises(ConfigError) as caught:
        PARSER.call(argv)
    assert message in str(caught.value) and "postgrad convert --help" in str(caught.value)


def test_every_command_has_help_for_its_arguments():
    for name in COMMANDS:
        module_name = MODULES.get(name, name)
        module = importlib.import_module(f"postgrad.cli.{module_name}")
        if not hasattr(module, "run"):
            assert Parser(getattr(module, module_name), name).description, name

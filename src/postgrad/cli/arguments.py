"""Command line arguments: argparse with one-line errors, and settings written as `key=value`.

A setting `step=3` is declared with `add_setting("step", ...)` and parsed by argparse as `--step=3`.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from postgrad.config.foreign_names import foreign_names
from postgrad.errors import ConfigError, did_you_mean

MAX_PORT = 65535


class HelpPrinted(Exception):
    """The help text was printed; the command ends with exit code 0."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows settings as key=VALUE and keeps the line breaks of descriptions."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, SettingAction):
            return f"{action.key}={action.metavar or action.key.upper()}"
        return super()._format_action_invocation(action)


class SettingAction(argparse._StoreAction):
    """Stores the value of a `key=value` setting."""

    @property
    def key(self) -> str:
        return self.option_strings[0].removeprefix("--")


class Parser(argparse.ArgumentParser):
    """Parses the arguments of one command.

    `usage` is what follows `postgrad`, e.g. "export SOURCE OUT [step=latest]".
    Words with "=" that are neither a declared setting nor an existing path go to `overrides`
    if the parser has that positional argument; otherwise they are an error.
    """

    def __init__(self, usage: str, description: str, epilog: str = "") -> None:
        super().__init__(
            usage=f"postgrad {usage}",
            description=description,
            epilog=epilog,
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        self.takes_overrides = False
        self.settings: list[str] = []
        self.settings_group = self.add_argument_group("settings")

    def add_setting(self, key: str, **options: Any) -> None:
        """Declares `key=value`; the keyword arguments are those of add_argument()."""
        self.settings.append(key)
        self.settings_group.add_argument(f"--{key}", action=SettingAction, **options)

    def add_overrides(self, help: str) -> None:
        """Lets any `key=value` follow; they are collected in `overrides`."""
        self.takes_overrides = True
        self.add_argument("overrides", nargs="*", metavar="key=value", help=help)

    def add_model(self) -> None:
        """Adds the argument MODEL of commands that load one."""
        self.add_argument(
            "model",
            metavar="MODEL",
            help="run folder (its newest checkpoint), checkpoint, model folder, GGUF file, "
            "hub id, smollm2 or tiny",
        )

    def add_host(self) -> None:
        """Adds --host, the address that a server listens on."""
        self.add_argument(
            "--host",
            default="127.0.0.1",
            help="address to listen on (default 127.0.0.1); any other address requires a token",
        )

    def add_address(self, port: int) -> None:
        """Adds --host and --port of a server with this default port."""
        self.add_host()
        self.add_argument(
            "--port",
            type=port_number,
            default=port,
            help=f"port to listen on (default {port}); 0 takes a free one",
        )

    def parse(self, argv: Sequence[str], help_if_empty: bool = False) -> argparse.Namespace:
        """Returns the parsed arguments.

        Raises:
            ConfigError: an argument is unknown, missing or wrong.
            HelpPrinted: --help was given, or nothing was given and `help_if_empty` is set.
        """
        if help_if_empty and not argv:
            self.print_help()
            raise HelpPrinted
        translated = [self._translate(word) for word in argv]
        parsed, unknown = self.parse_known_intermixed_args(translated)
        if unknown:
            self._refuse(unknown[0])
        return parsed

    def _translate(self, word: str) -> str:
        """Returns a declared setting `key=value` as `--key=value`, any other word unchanged."""
        key, equals, value = word.partition("=")
        if not equals or word.startswith("-"):
            return word
        if key in self.settings:
            if not value:
                self.error(f"{key}= has no value; write {key}=VALUE")
            return f"--{word}"
        if self.takes_overrides or "/" in key or ":" in key or Path(word).exists():
            return word
        raise ConfigError(f"unknown setting {word}; {did_you_mean(key, self.settings)}")

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word}")
        option = word.partition("=")[0]
        if self.takes_overrides:
            # As in `trl grpo --num_generations 8`; the last part of OpenRLHF's --actor.adam.lr.
            name = option.lstrip("-").rpartition(".")[2].replace("-", "_")
            foreign = foreign_names().names.get(name, "")
            hint = f"; the nearest here is {foreign}" if foreign else ""
            self.error(
                f"unknown option {option}; settings are written key=value, without dashes{hint}"
            )
        options = [name for name in self._option_string_actions if name.startswith("--")]
        raise ConfigError(f"unknown option {option}; {did_you_mean(option, options)}")

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with argparse's message; a setting is named `key=`, not `--key`."""
        for key in self.settings:
            message = message.replace(f"argument --{key}:", f"{key}:")
            message = re.sub(rf"--{key}(?=,|$)", f"{key}=", message)
        message = message.removeprefix("argument ")
        command = re.split(r" [^a-z]", str(self.usage))[0]
        raise ConfigError(f"{message}; see {command} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """argparse calls this after it has printed the help text."""
        raise HelpPrinted


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Returns an argparse type: a whole number from `least` to `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def convert(text: str) -> int:
        is_number = text.isascii() and text.isdigit()
        if not is_number or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number {bounds}")
        return int(text)

    return convert


def positive_number(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def true_or_false(text: str) -> bool:
    """An argparse type: the words true and false."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text == "true"


port_number = whole_number(0, MAX_PORT)

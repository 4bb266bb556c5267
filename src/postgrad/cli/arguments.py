"""A command is a function: its parser is made from its signature and its docstring.

    def export(source: str, out: Path, *, step: str = "latest", card: bool = False) -> int:
        '''Write a model folder.

        Args:
            source [FOLDER|RUN]: what is exported
            out: folder to write
            step: checkpoint of a run
            --card: print the card and write nothing

        What follows Args is printed after the list of arguments.
        '''

Positional parameters are words; a list takes several. Keyword-only parameters are settings
`step=3`, or options `--card` where the docstring has dashes; `--card` is a switch. `*overrides`
takes any other `key=value`. The help names the defaults. `from_` is the setting `from`. argparse
reads `step=3` as `--step=3`.
"""

import argparse
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from postgrad.config.suggestions import foreign_names
from postgrad.errors import UnknownName, WrongValue, did_you_mean

WIDTH = 98  # columns of a usage
ENTRY = re.compile(r"(--)?(\w[\w-]*)(?: \[(.+?)\])?: (.*)")  # of a docstring's Args


class HelpPrinted(Exception):
    """The help text was printed; the command ends with exit code 0."""


# ---- types of arguments


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type: a whole number from `least` to `most`."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def convert(text: str) -> int:
        is_number = text.isascii() and text.isdigit()
        if not is_number or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number {bounds}")
        return int(text)

    return convert


def positive_number(text: str) -> float:
    """Return an argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def true_or_false(text: str) -> bool:
    """Return an argparse type: the words true and false."""
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return text == "true"


Count = Annotated[int, whole_number(0)]
CountFrom1 = Annotated[int, whole_number(1)]
Positive = Annotated[float, positive_number]
Port = Annotated[int, whole_number(0, 65535)]


def _conversion(hint: Any) -> dict[str, Any]:
    """Return the options of add_argument() that read a value of a type."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is list:
        return {"nargs": "+", **_conversion(get_args(hint)[0])}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is Annotated:
        return {"type": hint.__metadata__[0]}
    return {"type": true_or_false if hint is bool else hint}


# ---- the docstring


class Entry(typing.NamedTuple):
    """What a docstring says of an argument: whether it is an option, its metavar, its help."""

    is_option: bool
    metavar: str
    help: str


def read_docstring(function: Callable[..., int]) -> tuple[str, dict[str, Entry], str]:
    """Return (the text before Args, the entries of Args by parameter, the text after them)."""
    text = inspect.getdoc(function) or ""
    description, _, rest = text.partition("\nArgs:\n")
    block, _, epilog = rest.partition("\n\n")
    entries: dict[str, Entry] = {}
    name = ""
    for line in textwrap.dedent(block).splitlines():
        if match := ENTRY.match(line):
            dashes, key, metavar, help_text = match.groups(default="")
            name = key.replace("-", "_")
            entries[name] = Entry(bool(dashes), metavar, help_text)
        elif name:
            longer = f"{entries[name].help} {line.strip()}"
            entries[name] = entries[name]._replace(help=longer)
    return description.strip(), entries, epilog.strip("\n")


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


# ---- the parser


class Parser(argparse.ArgumentParser):
    """Parses the arguments of the command that a function is.

    Words with "=" that are neither a declared setting nor an existing path go to `*overrides`; if
    the function has none, they are an error.
    """

    def __init__(self, function: Callable[..., int], name: str, epilog: str = "") -> None:
        description, entries, more = read_docstring(function)
        self.function = function
        self.command = f"postgrad {name}"
        super().__init__(
            description=description,
            epilog="\n\n".join(text for text in (more, epilog) if text),
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        self.settings: list[str] = []
        self.positional: list[str] = []
        self.overrides = ""
        words: list[str] = []
        group = self.add_argument_group("settings")
        hints = typing.get_type_hints(function, include_extras=True)
        for key, parameter in inspect.signature(function).parameters.items():
            entry = entries[_word(key)]
            if parameter.kind is parameter.VAR_POSITIONAL:
                self.overrides = key
                self.add_argument(key, nargs="*", metavar="key=value", help=entry.help)
                words.append("[key=value ...]")
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                words.append(self._add_word(key, parameter, hints[key], entry))
            elif entry.is_option:
                words.append(self._add_option(key, parameter, hints[key], entry))
            else:
                words.append(self._add_setting(key, parameter, hints[key], entry, group))
        self.usage = textwrap.fill(
            " ".join((self.command, *words)),
            WIDTH,
            subsequent_indent=" " * 8,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def _add_word(self, key: str, parameter: inspect.Parameter, hint: Any, entry: Entry) -> str:
        metavar = entry.metavar or key.upper()
        options = _conversion(hint)
        is_optional = parameter.default is not parameter.empty
        if is_optional:
            options |= {"nargs": "?", "default": parameter.default}
        self.positional.append(key)
        self.add_argument(key, metavar=metavar, help=_help(entry, parameter), **options)
        if options.get("nargs") == "+":
            return f"{metavar} [{metavar} ...]"
        return f"[{metavar}]" if is_optional else metavar

    def _add_option(self, key: str, parameter: inspect.Parameter, hint: Any, entry: Entry) -> str:
        option = f"--{_word(key).replace('_', '-')}"
        if hint is bool:
            self.add_argument(option, dest=key, action="store_true", help=entry.help)
            return f"[{option}]"
        metavar = entry.metavar or key.upper()
        self.add_argument(
            option,
            dest=key,
            metavar=metavar,
            default=parameter.default,
            help=_help(entry, parameter),
            **_conversion(hint),
        )
        return f"[{option} {metavar}]"

    def _add_setting(
        self, key: str, parameter: inspect.Parameter, hint: Any, entry: Entry, group: Any
    ) -> str:
        is_required = parameter.default is parameter.empty
        options = _conversion(hint)
        word = _word(key)
        choices = ("true", "false") if hint is bool else options.get("choices", ())
        metavar = entry.metavar or "|".join(choices) or word.upper()
        self.settings.append(word)
        group.add_argument(
            f"--{word}",
            dest=key,
            action=SettingAction,
            metavar=metavar,
            required=is_required,
            default=None if is_required else parameter.default,
            help=_help(entry, parameter),
            **options,
        )
        return f"{word}={metavar}" if is_required else f"[{word}={metavar}]"

    def call(self, argv: Sequence[str], helps: bool = True) -> int:
        """Parse the arguments and run the function; return its exit code.

        Without arguments the help is printed, if the function needs some and `helps` is set.

        Raises:
            ConfigError: an argument is unknown, missing or wrong.
            HelpPrinted: the help text was printed.
        """
        parameters = inspect.signature(self.function).parameters
        needs = [
            key for key in self.positional if parameters[key].default is inspect.Parameter.empty
        ]
        if needs and helps and not argv:
            self.print_help()
            raise HelpPrinted
        given = self.parse(argv)
        words = [given.pop(key) for key in self.positional]
        overrides = given.pop(self.overrides) if self.overrides else ()
        return self.function(*words, *overrides, **given)

    def parse(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the arguments by parameter. Raises ConfigError and HelpPrinted as `call`."""
        translated = [self._translate(word) for word in argv]
        parsed, unknown = self.parse_known_intermixed_args(translated)
        if unknown:
            self._refuse(unknown[0])
        return vars(parsed)

    def _translate(self, word: str) -> str:
        """Return a declared setting `key=value` as `--key=value`, any other word unchanged."""
        key, equals, value = word.partition("=")
        if not equals or word.startswith("-"):
            return word
        if key in self.settings:
            if not value:
                self.error(f"{key}= has no value; write {key}=VALUE")
            return f"--{word}"
        if self.overrides or "/" in key or ":" in key or Path(word).exists():
            return word
        raise UnknownName(f"unknown setting {word}; {did_you_mean(key, self.settings)}", at=key)

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word}")
        option = word.partition("=")[0]
        if self.overrides:
            # As in `trl grpo --num_generations 8`; the last part of OpenRLHF's --actor.adam.lr.
            name = option.lstrip("-").rpartition(".")[2].replace("-", "_")
            foreign = foreign_names().names.get(name, "")
            hint = f"; the nearest here is {foreign}" if foreign else ""
            self.error(
                f"unknown option {option}; settings are written key=value, without dashes{hint}"
            )
        options = [name for name in self._option_string_actions if name.startswith("--")]
        raise UnknownName(f"unknown option {option}; {did_you_mean(option, options)}", at=option)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of the choices, with the nearest one."""
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(str(value), action.choices)
            raise argparse.ArgumentError(action, f"{value} is unknown; {hint}")

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with argparse's message; a setting is named `key=`, not `--key`."""
        for key in self.settings:
            message = message.replace(f"argument --{key}:", f"{key}:")
            message = re.sub(rf"--{key}(?=,|$)", f"{key}=", message)
        raise WrongValue(f"{message.removeprefix('argument ')}; see {self.command} --help")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """argparse calls this after it has printed the help text."""
        raise HelpPrinted


def _word(parameter: str) -> str:
    """Return what people type for a parameter: `from_` is `from`, which Python reserves."""
    return parameter.rstrip("_")


def _help(entry: Entry, parameter: inspect.Parameter) -> str:
    """Return the help of an argument, with its default."""
    default = parameter.default
    if default in (parameter.empty, None, "") or isinstance(default, list):
        return entry.help
    shown = str(default).lower() if isinstance(default, bool) else f"{default}"
    return f"{entry.help} (default {shown})".replace("%", "%%")


def run_subcommand(
    name: str, commands: Mapping[str, Callable[..., int]], argv: Sequence[str]
) -> int:
    """Run the function that the first word names. Raises ConfigError for an unknown name."""
    if argv[0] not in commands:
        raise UnknownName(
            f"unknown command {name} {argv[0]}; {did_you_mean(argv[0], commands)}", at="command"
        )
    return Parser(commands[argv[0]], f"{name} {argv[0]}").call(argv[1:], helps=False)

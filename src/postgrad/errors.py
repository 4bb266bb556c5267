"""The three kinds of errors.

ConfigError: the user's input is wrong. The command line prints one line and exits with code 2.
RunError: the run cannot continue. The command line prints one line and exits with code 1; the run
    can be resumed.
Failure (in problem.py): one response could not be scored. It is recorded, counted and kept out of
    the loss.
"""

import difflib
import re
from collections.abc import Iterable
from typing import ClassVar

CODES: dict[str, type["ConfigError"]] = {}  # code -> the class of its errors

# The place that a sentence begins with: `--option`, `section.key`, a word before `=` or `:`, or a
# path that a colon, a comma or one of these verbs follows.
_PLACE = re.compile(
    r"--[\w-]+|\w+(?:\.\w+)+(?=[=:, ]|$)|\w+(?=[=:])"
    r"|\S*/.*?(?=[:,] | (?:is|has|lacks|exists|cannot|needs|holds|was|failed|and)\b)"
)


class ConfigError(Exception):
    """The user's input is wrong. We raise one of the classes below, each of which has a code.

    A user's own class may raise this one.

    Args:
        sentence: one line: what was seen, why it is wrong, what to type instead.
        at: where the error is, for programs: a setting's key, an option, an argument, a column or
            a file. By default the setting, option or file that the sentence begins with.
    """

    code: ClassVar[str] = "user_code"

    def __init_subclass__(cls, code: str = "") -> None:
        if code:
            cls.code = code
            CODES[code] = cls

    def __init__(self, sentence: str, *, at: object = None) -> None:
        super().__init__(sentence)
        found = _PLACE.match(sentence)
        self.at = str(at) if at is not None else found[0] if found else ""

    def reworded(self, sentence: str, *, at: object = None) -> "ConfigError":
        """Return an error of the same code with another sentence, which may begin with a place."""
        error = CODES[self.code](sentence, at=at)
        error.at = error.at or self.at
        return error

    def to_wire(self) -> list[str]:
        """Return what another process needs to raise the error again."""
        return [str(self), self.code, self.at]

    @staticmethod
    def from_wire(parts: list[str]) -> "ConfigError":
        """Return the error whose `to_wire` gave the parts."""
        sentence, code, at = parts
        return CODES[code](sentence, at=at)


class UnknownName(ConfigError, code="unknown_name"):
    """There is nothing of this name; the sentence lists or suggests names."""


class WrongValue(ConfigError, code="wrong_value"):
    """The value has a wrong type or form, or is out of range."""


class Missing(ConfigError, code="missing"):
    """The place needs something that was not given."""


class NoEffect(ConfigError, code="no_effect"):
    """Nothing reads the setting in this combination."""


class Conflict(ConfigError, code="conflict"):
    """Two things that were given do not go together."""


class Unsupported(ConfigError, code="unsupported"):
    """This model, engine, machine or method cannot do it."""


class TooLarge(ConfigError, code="too_large"):
    """It exceeds a limit: the model's context, the memory, the cluster, the data."""


class Unreadable(ConfigError, code="unreadable"):
    """The file or folder does not exist or cannot be read."""


class Damaged(ConfigError, code="damaged"):
    """The file can be read, but its content is malformed or contradicts itself."""


class Unwritable(ConfigError, code="unwritable"):
    """The output exists already, is in use, or cannot be written."""


class Unreachable(ConfigError, code="unreachable"):
    """The server, hub or cluster does not answer or refuses the request."""


class NotInstalled(ConfigError, code="not_installed"):
    """A package or a program is missing on this machine."""


class Changed(ConfigError, code="changed"):
    """The settings or the data differ from those of the stored run."""


class UserCode(ConfigError, code="user_code"):
    """The user's class or function cannot be used, or it failed."""


class RunError(Exception):
    """The run cannot continue. One line: what failed, and how to continue."""


class CacheMemoryError(RunError):
    """The cache of keys and values does not fit on the device.

    Args:
        problem: what does not fit, without advice: a server has other options than a run.
        advice: the settings of a run that help.
    """

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}; {advice}")
        self.problem = problem


def first_line(error: BaseException, max_chars: int = 300) -> str:
    """Return the first line of an error's text; the name of its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:max_chars] if lines else type(error).__name__


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the most similar known name, or all known names."""
    names = sorted(known)
    swapped = [name for name in names if sorted(name) == sorted(wrong)]
    similar = difflib.get_close_matches(wrong, swapped or names, n=1, cutoff=0.5)
    if similar:
        return f"did you mean {similar[0]}?"
    return f"known: {', '.join(names)}" if names else "there are none"

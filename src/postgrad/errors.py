"""The three kinds of errors.

ConfigError: the user's input is wrong. The command line prints one line and exits with code 2.
RunError: the run cannot continue. The command line prints one line and exits with code 1; the run
    can be resumed.
Failure (in problem.py): one response could not be scored. It is recorded, counted and kept out of
    the loss.
"""

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """The user's input is wrong. One line: what was seen, why it is wrong, what to type instead."""


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

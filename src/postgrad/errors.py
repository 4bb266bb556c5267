"""The three kinds of trouble.

ConfigError: the user's input is wrong; the command line prints one line and exits with code 2.
RunError: the run cannot go on; the command line prints one line that names the stage and exits with code 1, the run stays resumable.
Failure (in types.py): one sample could not be judged; it is recorded, counted and kept out of the loss.
"""

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """The user's input is wrong. The message says what was seen, why it matters and what to do, in one line."""


class RunError(Exception):
    """The run cannot go on. The message names what failed and how to continue."""


def did_you_mean(wrong: str, right: Iterable[str]) -> str:
    """A tail for error messages: the nearest right name, or all of them when none is near."""
    names = sorted(right)
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"known: {', '.join(names)}" if names else "nothing is known here"

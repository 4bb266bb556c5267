"""How much commands print: quiet, normal or debug.

Set by --quiet or --debug anywhere in a command, or by the environment variable POSTGRAD_LOG, which
child processes inherit. It is no setting of a run: the same run folder
continues at any level, and its files are the same.
"""

import os
import sys

from postgrad.errors import UnknownName, did_you_mean

VARIABLE = "POSTGRAD_LOG"
QUIET = "quiet"  # notes, warnings, errors and the result
NORMAL = "normal"  # also progress
DEBUG = "debug"  # also times of stages, checkpoints, log messages of libraries, tracebacks
LEVELS = (QUIET, NORMAL, DEBUG)
OPTIONS = {"--quiet": QUIET, "--debug": DEBUG}


def log_level() -> str:
    """Return the level. Raises ConfigError for an unknown one."""
    level = os.environ.get(VARIABLE) or NORMAL
    if level not in LEVELS:
        raise UnknownName(f"{VARIABLE}={level} is no log level; {did_you_mean(level, LEVELS)}")
    return level


def take_option(argv: list[str]) -> list[str]:
    """Return the arguments without --quiet and --debug, which set the level wherever they are."""
    for word in argv:
        if word in OPTIONS:
            os.environ[VARIABLE] = OPTIONS[word]
    return [word for word in argv if word not in OPTIONS]


def set_up_logging() -> None:
    """Print the log messages of libraries to stderr at level debug; else leave them as they are."""
    if log_level() == DEBUG:
        import logging

        form = "%(asctime)s %(name)s %(levelname)s: %(message)s"
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=form, datefmt="%H:%M:%S")

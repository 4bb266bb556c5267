"""`postgrad COMMAND ...`: finds the command's file and turns errors into one line and an exit code.

0 done · 1 the run could not go on · 2 wrong input, nothing was written · 130 interrupted, resumable.
"""

import importlib
import os
import signal
import sys

from postgrad import __version__
from postgrad.errors import ConfigError, RunError, did_you_mean

# name -> (module with run(arguments) -> exit code, what it does)
COMMANDS = {
    "demo": ("postgrad.cli.demo", "learn arithmetic in front of your eyes, on a CPU, no download"),
    "train": (
        "postgrad.cli.train",
        "train RECIPE key=value ...: run a recipe, or continue its run",
    ),
    "eval": (
        "postgrad.cli.eval",
        "eval MODEL data=SET n=16 ...: answers, avg@k, pass@k, maj@k with intervals; compare A B",
    ),
    "analyze": (
        "postgrad.cli.analyze",
        "analyze entropy MODEL data=...: entropy of the policies inside a model, figures and JSON",
    ),
    "doctor": (
        "postgrad.cli.doctor",
        "what this machine offers and what will be used; --fit RECIPE ...: will it fit, how long",
    ),
    "recipes": (
        "postgrad.cli.recipes",
        "list the recipes, or show one with every setting: recipes [NAME]",
    ),
    "view": (
        "postgrad.cli.view",
        "the page over runs, rollouts and evaluations, live: view [RUNS]",
    ),
    "data": ("postgrad.cli.data", "prepare, show, check and export data sets: data prepare gsm8k"),
    "serve": (
        "postgrad.cli.serve",
        "models behind OpenAI's HTTP interface: serve MODEL [MODEL ...] --port 8000",
    ),
    "sandbox": (
        "postgrad.cli.sandbox",
        "the code sandbox over HTTP, for verifiers on other machines",
    ),
    "plot": ("postgrad.cli.plot", "the same charts as a picture: plot RUN [RUN ...] [FILE.png]"),
    "export": (
        "postgrad.cli.export",
        "export RUN|VERL_FOLDER OUT: a stock Hugging Face folder from a checkpoint or verl's shards",
    ),
    "push": (
        "postgrad.cli.push",
        "push FOLDER|RUN user/name: publish a model on a hub, with a card written from the run",
    ),
    "init": (
        "postgrad.cli.init",
        "a method or verifier of your own, with its test: init NAME [--verifier]",
    ),
}


# What a command that was stopped at once says of its next start.
FROM_CHECKPOINT = "; the same command continues from the last checkpoint"
CONTINUES = {
    "train": FROM_CHECKPOINT,
    "demo": FROM_CHECKPOINT,
    "eval": "; the same command continues",
}


def usage() -> str:
    lines = [
        f"postgrad {__version__}: RL post-training for language models",
        "",
        "usage: postgrad COMMAND ...",
        "",
    ]
    lines += [f"  {name:<10}{help_line}" for name, (_, help_line) in COMMANDS.items()]
    lines += [
        "",
        "postgrad COMMAND --help tells more. Settings are key=value words: postgrad recipes grpo shows them all.",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """A command by its words; without words the program itself, which SIGTERM stops as Ctrl-C does."""
    if arguments is not None:
        return run(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run(sys.argv[1:], alone=True)
    _turn_deaf()
    return code


def _turn_deaf() -> None:
    """An impatient second Ctrl-C must not end in a traceback of the interpreter's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def run(words: list[str], alone: bool = False) -> int:
    """Find the command and run it; errors become one line and an exit code. `alone`: the process ends with it."""
    if len(words) == 2 and words[0] == "help" and words[1] in COMMANDS:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(__version__)
        return 0
    # oneDNN keeps nearly a megabyte of code for each shape it met, a thousand shapes by default. Read when torch loads.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    try:
        if words[0] not in COMMANDS:
            raise ConfigError(f"unknown command {words[0]}; {did_you_mean(words[0], COMMANDS)}")
        return importlib.import_module(COMMANDS[words[0]][0]).run(words[1:])
    except ConfigError as error:
        print(f"postgrad: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"postgrad: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if alone:
            _turn_deaf()
        print(f"postgrad: stopped{CONTINUES.get(words[0], '')}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    sys.exit(main())

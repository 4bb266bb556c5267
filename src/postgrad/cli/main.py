"""`postgrad COMMAND ...`: runs the command's module; an error becomes one line and an exit code.

Exit codes: 0 success, 1 the run failed, 2 wrong input and nothing was written,
130 interrupted and resumable.
"""

import importlib
import os
import signal
import sys

from postgrad.cli.arguments import HelpPrinted, Parser
from postgrad.errors import ConfigError, RunError, UnknownName, did_you_mean
from postgrad.log_level import DEBUG, QUIET, VARIABLE, log_level, set_up_logging, take_option
from postgrad.phases import PhaseLines, Show, shown_by
from postgrad.version import __version__

# The module of a command has its name, and a function of that name, or `run` if it parses its
# arguments itself.
COMMANDS = {
    "demo": "train a tiny model on addition, on a CPU, no download",
    "train": "train RECIPE key=value ...: start a run, or continue it",
    "eval": "eval MODEL data=SET n=16 ...: avg@k, pass@k and maj@k",
    "generate": "generate MODEL data=SET out=FILE: responses without scores",
    "score": "score FILE ...: score responses that a file already has",
    "analyze": "analyze entropy MODEL data=...: entropy after every block",
    "doctor": "show the machine; --fit RECIPE: estimate memory and time",
    "recipes": "recipes [NAME]: list the recipes, or one recipe's settings",
    "runs": "runs [FOLDER]: list the runs and their states",
    "view": "view [RUNS]: web page with curves, rollouts and evaluations",
    "data": "data prepare gsm8k: prepare, show, check and export data sets",
    "serve": "serve MODEL ...: an OpenAI-compatible server",
    "chat": "chat MODEL: talk to a model in the terminal",
    "sandbox": "serve the code sandbox over HTTP",
    "plot": "plot RUN [RUN ...] [FILE.png]: training curves as a picture",
    "export": "export SOURCE OUT: write a Hugging Face model folder",
    "push": "push FOLDER|RUN user/name: upload a model with a model card",
    "import": "import SCRIPT: the command that equals a script of verl or TRL",
    "launch": "launch slurm|kuberay|skypilot|ssh train ...: job files for several nodes",
    "init": "init NAME [--verifier]: start a method or verifier of your own",
}
MODULES = {"import": "import_script"}  # Python reserves the name

# Commands that say what they are doing.
LONG_COMMANDS = ("demo", "train", "doctor", "data", "analyze")

# What an interrupted command says about its next start.
FROM_CHECKPOINT = "; the same command continues from the last checkpoint"
HOW_TO_CONTINUE = {
    "train": FROM_CHECKPOINT,
    "demo": FROM_CHECKPOINT,
    "eval": "; the same command continues",
    "generate": "; the same command continues",
}


def usage() -> str:
    """Return the help text of `postgrad` itself."""
    commands = [f"  {name:<13}{help_line}" for name, help_line in COMMANDS.items()]
    lines = [
        f"postgrad {__version__}: RL post-training for language models",
        "",
        "usage: postgrad COMMAND ...",
        "       postgrad COMMAND ... [--quiet | --debug]",
        "",
        *commands,
        "",
        "postgrad COMMAND --help shows the arguments of a command.",
        "--quiet prints notes and the result only; --debug adds times, library messages and",
        "tracebacks. POSTGRAD_LOG=quiet|normal|debug does the same.",
        "Settings are written key=value; postgrad recipes grpo --all lists them.",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    Without `argv` this is the program itself: it reads sys.argv, and SIGTERM acts as Ctrl-C.
    """
    if argv is not None:
        return run(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run(sys.argv[1:], ends_process=True)
    _ignore_signals()
    return code


def _ignore_signals() -> None:
    """Ignore a second Ctrl-C, which would print a traceback while the interpreter shuts down."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def run(argv: list[str], ends_process: bool = False) -> int:
    """Find the command and run it; an error becomes one line and an exit code.

    `ends_process` says that the process ends after this call.
    """
    argv = take_option(argv)
    if len(argv) == 2 and argv[0] == "help" and argv[1] in COMMANDS:
        argv = [argv[1], "--help"]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(__version__)
        return 0
    # oneDNN caches almost 1 MB of code per tensor shape, for 1024 shapes by default.
    # It reads this variable when torch is imported.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    try:
        if argv[0] not in COMMANDS:
            raise UnknownName(
                f"unknown command {argv[0]}; {_suggest_command(argv[0])}", at="command"
            )
        set_up_logging()
        with shown_by(_phase_lines(argv)):
            return _run_command(argv[0], argv[1:])
    except HelpPrinted:
        return 0
    except ConfigError as error:
        _print_error(error)
        return 2
    except RunError as error:
        _print_error(error)
        return 1
    except BrokenPipeError:
        return 1
    except BaseException as error:
        if not _is_interrupt(error):
            return _report_user_error(error)
        if ends_process:
            _ignore_signals()
        print(f"postgrad: stopped{HOW_TO_CONTINUE.get(argv[0], '')}", file=sys.stderr)
        return 130


def _run_command(name: str, argv: list[str]) -> int:
    module_name = MODULES.get(name, name)
    module = importlib.import_module(f"postgrad.cli.{module_name}")
    if hasattr(module, "run"):
        return module.run(argv)
    return Parser(getattr(module, module_name), name).call(argv)


def _phase_lines(argv: list[str]) -> Show | None:
    """Return what shows the phases of a command that may take minutes; None for a program."""
    if argv[0] not in LONG_COMMANDS or "--json" in argv or log_level() == QUIET:
        return None
    lines = PhaseLines()
    lines.is_patient = argv[0] == "data"  # its output is a table for programs, too
    return lines.show


# Commands of other programs -> the one that does this here.
OTHER_NAMES = {
    "evaluate": "eval",
    "infer": "generate",
    "merge": "export",
    "resume": "train",
    "sample": "generate",
}


def _suggest_command(name: str) -> str:
    """Return a hint for a command that does not exist: it may be a recipe, as in `trl grpo`."""
    from postgrad.config.compose import recipe_names

    if name in OTHER_NAMES:
        return f"use postgrad {COMMANDS[OTHER_NAMES[name]]}"
    if name in recipe_names():
        return f"it is a recipe: postgrad train {name} key=value ..."
    return did_you_mean(name, COMMANDS)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused the error.

    The cleanup of a library may fail in the middle of its work and hide it.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _report_user_error(error: BaseException) -> int:
    """Print an error of the user's own Python code as one line; raise any other error."""
    from postgrad.user_code import user_error

    text = user_error(error) if isinstance(error, Exception) else ""
    if not text:
        raise error
    _print_error(error, text)
    return 1


def _print_error(error: BaseException, text: str = "") -> None:
    """Print an error as one line; at log level debug, with its traceback before it."""
    if os.environ.get(VARIABLE) == DEBUG:
        import traceback

        traceback.print_exception(error)
    print(f"postgrad: {text or error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

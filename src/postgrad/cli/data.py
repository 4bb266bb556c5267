"""`postgrad data prepare|show|check|add-uid|export|from-rollouts ...`"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from postgrad.cli.arguments import Parser, positive_number, true_or_false, whole_number
from postgrad.cli.from_rollouts import from_rollouts_command
from postgrad.errors import ConfigError, did_you_mean

HELP = """usage: postgrad data COMMAND ...

  prepare NAME [from=hub|FOLDER|FILE,...] [out=FILE.parquet] [key=value ...]
          convert a data set to Postgrad's schema and count the dropped rows by reason;
          without NAME: list the data sets
  show FILE [n=3] [uid=UID] [model=MODEL] [style=STYLE]
          print problems; with a model, the prompt it sees
  check FILE ... [against=TEST] [verifier=NAME]
          score gold answers and near misses with the verifier, find duplicates and overlap with a
          test set; exit code 1 if the verifier is wrong on one of them, 2 if none is known
  add-uid FILE [out=FILE]
          add a column with the uid that follows each problem through a run
  export FILE out=FILE.csv|.jsonl|.parquet [columns=a,b]
          convert between file formats
  from-rollouts RUN [where='reward>0.9'] [per_problem=0] [out=FILE.jsonl]
          trajectories of a run as conversations for SFT: rejection sampling

postgrad data COMMAND --help shows the settings of a command."""

PREPARE_DESCRIPTION = (
    """Converts a data set to Postgrad's schema. The same input gives the same bytes."""
)


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    name = argv[0]
    if name not in COMMANDS:
        raise ConfigError(f"unknown command data {name}; {did_you_mean(name, COMMANDS)}")
    return COMMANDS[name](argv[1:])


def _data_sets() -> str:
    """Returns the list of data sets with their splits, prompt styles and options."""
    from postgrad.data.prepare.catalog import SETS

    lines = ["data sets (splits; prompt style):"]
    for name, entry in SETS.items():
        lines.append(f"  {name:<22}{entry.help} ({', '.join(entry.splits)}; {entry.style})")
        for key, option in entry.options.items():
            lines.append(f"  {'':<22}  {key}={option.default}: {option.help}")
    return "\n".join(lines)


def _common_options() -> str:
    """Returns the options that all data sets have."""
    from postgrad.data.prepare.catalog import COMMON

    lines = [f"  {key + '=':<12}{option.help}" for key, option in COMMON.items()]
    return "\n".join(["options of all data sets:", *lines])


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal; yields the function that advances it by a count."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


def _prepare_parser(epilog: str) -> Parser:
    parser = Parser(
        "data prepare NAME [from=hub|FOLDER|FILE,...] [out=FILE.parquet] [key=value ...]",
        PREPARE_DESCRIPTION,
        epilog,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="the data set")
    parser.add_overrides("options of the data set, see below")
    parser.add_setting(
        "from",
        dest="source",
        default="hub",
        metavar="hub|FOLDER|FILE,...",
        help="hub (default) downloads the files or takes them from the cache; or your own files",
    )
    parser.add_setting("out", metavar="FILE.parquet", help="default: NAME-SPLIT.parquet")
    parser.add_setting(
        "overwrite",
        type=true_or_false,
        default=False,
        metavar="true|false",
        help="replace a file that has other content",
    )
    parser.add_setting("repo", help="another repository on the hub")
    parser.add_setting("files", default="", metavar="PATTERNS", help="other files in it")
    parser.add_setting("revision", metavar="COMMIT", help="a commit of the repository")
    parser.add_setting(
        "tokenizer", metavar="MODEL", help="counts tokens for data sets that limit them"
    )
    return parser


def prepare_command(argv: list[str]) -> int:
    asks_help = "-h" in argv or "--help" in argv
    parser = _prepare_parser(f"{_common_options()}\n\n{_data_sets()}" if asks_help else "")
    arguments = parser.parse(argv)
    if not argv:
        print(_data_sets())
        return 0
    options = _data_set_options(arguments)
    from postgrad.data.prepare.output import describe
    from postgrad.data.prepare.request import find_files, parse_request, source_columns
    from postgrad.data.prepare.run import prepare
    from postgrad.data.rows.files import count_rows

    count_tokens = _token_counter(arguments.tokenizer) if arguments.tokenizer else None
    source, columns = source_columns(arguments.source)
    request = replace(parse_request(arguments.name, options, count_tokens), columns=columns)
    if "max_tokens" in options and count_tokens is None:
        raise ConfigError("max_tokens= needs a tokenizer; add tokenizer=MODEL")
    other_source = {
        key: getattr(arguments, key) for key in ("repo", "revision") if getattr(arguments, key)
    }
    files, commit = find_files(request, source, arguments.files, **other_source)
    out = Path(arguments.out or f"{request.name}-{request.split}.parquet").expanduser()
    total = _sum_if_known([count_rows(path) for _, path in files])
    with progress(f"reading {request.name}", total) as advance:
        prepared = prepare(request, files, commit, out, arguments.overwrite, advance)
    print("\n".join(describe(prepared)))
    if request.data_set.note:
        print(f"note: {request.data_set.note}")
    if "max_tokens" in request.options and count_tokens is None:
        print("note: generations of any length were kept; tokenizer=MODEL limits them")
    if request.style.text:
        print(
            "note: the prompts are complete texts; train with data.template=plain, "
            "or prepare with style=bare and train with data.prompt_style"
        )
    return 0


def _data_set_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the options of the data set, from `key=value` arguments. Raises ConfigError."""
    if arguments.name is None or "=" in arguments.name:
        raise ConfigError(
            "the data set is missing; write postgrad data prepare NAME ...; "
            "postgrad data prepare lists the names"
        )
    options: dict[str, str] = {}
    for word in arguments.overrides:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(
                f"unexpected argument {word}; prepare one data set at a time, "
                "and give files as from=FILE"
            )
        if not value:
            raise ConfigError(f"{key}= has no value; write {key}=VALUE")
        options[key] = value
    return options


def _sum_if_known(counts: Sequence[int | None]) -> int | None:
    """Returns the sum of the counts, None if one of them is unknown."""
    known = [count for count in counts if count]
    return sum(known) if len(known) == len(counts) else None


def _token_counter(model: str) -> Callable[[str], int]:
    tokenizer = _load_tokenizer(model)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _load_tokenizer(model: str) -> Any:
    from postgrad.config.schema import ModelConfig
    from postgrad.model.load.load import load_tokenizer

    return load_tokenizer(ModelConfig(path=model), 0)


def show_command(argv: list[str]) -> int:
    parser = Parser(
        "data show FILE [n=3] [skip=0] [uid=UID] [model=MODEL] [style=STYLE] [template=auto]",
        "Prints problems of a file; with a model, the prompt it sees.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="any problem file")
    parser.add_setting("n", type=whole_number(0), default=3, metavar="3", help="problems to print")
    parser.add_setting(
        "skip", type=whole_number(0), default=0, metavar="0", help="problems to skip first"
    )
    parser.add_setting("uid", help="print only the problem with this uid")
    parser.add_setting("model", help="print the prompt that this model sees")
    parser.add_setting("style", help="prompt style, as data.prompt_style; needs model=")
    parser.add_setting("template", help="as data.template; needs model=")
    arguments = parser.parse(argv)
    from postgrad.data.prepare.output import read_provenance
    from postgrad.data.problems import load_problems
    from postgrad.data.show import describe_problem, describe_provenance

    path = arguments.file.expanduser()
    notes: list[str] = []
    problems = load_problems(str(path), notes.append)
    chosen = list(enumerate(problems, 1))
    if arguments.uid:
        chosen = [(row, problem) for row, problem in chosen if problem.uid == arguments.uid]
        if not chosen:
            raise ConfigError(f"{path} has no problem with uid {arguments.uid}")
    prompts = _prompts(arguments)
    lines = [*describe_provenance(read_provenance(path) if path.is_file() else {}), *notes]
    for row, problem in chosen[arguments.skip : arguments.skip + arguments.n]:
        lines += ["", *describe_problem(problem, f"{path.name}: row {row}", prompts)]
    print("\n".join(lines).strip("\n"))
    print(f"\n{len(problems)} problems in {path}")
    return 0


def _prompts(arguments: argparse.Namespace) -> Any:
    """Returns the object that renders prompts for `model=`, None without a model."""
    if not arguments.model:
        for key in ("style", "template"):
            if getattr(arguments, key):
                raise ConfigError(f"{key}= needs a model to render prompts for; add model=MODEL")
        return None
    from postgrad.data.encode.encoder import Encoder

    return Encoder(
        _load_tokenizer(arguments.model),
        arguments.template or "auto",
        style=arguments.style or "own",
    )


def check_command(argv: list[str]) -> int:
    parser = Parser(
        "data check FILE ... [against=TEST] [verifier=auto] [timeout_s=10] [show=10]",
        "Scores gold answers and near misses with the verifier, and finds duplicates and overlap "
        "with a test set.\nExit code 1 if the verifier rejects a gold answer or accepts a near "
        "miss, 2 if no verifier is known.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="any problem file")
    parser.add_setting("against", metavar="TEST", help="test set that must not overlap")
    parser.add_setting("verifier", default="auto", help="as reward.verifier (default auto)")
    parser.add_setting(
        "timeout_s",
        type=positive_number,
        default=10.0,
        metavar="10",
        help="time limit per answer, in seconds",
    )
    parser.add_setting(
        "show", type=whole_number(0), default=10, metavar="10", help="rows to print per finding"
    )
    arguments = parser.parse(argv)
    from postgrad.data.problems import load_problems, load_problems_with_locations
    from postgrad.evaluation.data_check import check_data
    from postgrad.verifiers.scorer import Scorer
    from postgrad.verifiers.table import VERIFIERS

    problems, locations = load_problems_with_locations(",".join(arguments.files))
    against = load_problems(arguments.against) if arguments.against else []
    with (
        Scorer(arguments.verifier, arguments.timeout_s) as scorer,
        progress("scoring gold answers", len(problems)) as advance,
    ):
        report = check_data(problems, locations, scorer, against, advance)
    _print_report(report, arguments.against, arguments.show)
    if report.num_unknown and not report.num_checked:
        raise ConfigError(
            "nothing was scored, because no verifier is known for these rows; "
            f"add verifier=NAME, one of {', '.join(VERIFIERS)}, or verifier=FILE.py:FUNCTION"
        )
    return 1 if report.rejected_golds or report.accepted_near_misses else 0


def _print_report(report: Any, against: str | None, limit: int) -> None:
    print(f"{report.num_problems} problems, {report.num_checked} gold answers scored")
    for reason, count in report.unchecked.items():
        print(f"  not scored {count}: {reason}")
    for note in report.notes:
        print(note)
    if report.num_checked:
        _print_rows("gold answers that the verifier rejects", report.rejected_golds, limit)
        _print_rows(
            f"wrong answers that the verifier accepts, of {report.num_near_misses} near misses",
            report.accepted_near_misses,
            limit,
        )
        _print_rows(
            "demonstrations that the verifier rejects", report.rejected_demonstrations, limit
        )
    _print_rows("duplicate questions", report.duplicates, limit)
    if against:
        _print_rows(f"questions that are also in {against}", report.in_test_set, limit)


def _print_rows(heading: str, rows: Sequence[Any], limit: int) -> None:
    print(f"{heading}: {len(rows) or 'none'}")
    for row in rows[:limit]:
        print(f"  {row.location} (uid {row.uid}): {row.reason}")
    if len(rows) > limit:
        print(f"  ... and {len(rows) - limit} more; show={len(rows)} lists all")


def add_uid_command(argv: list[str]) -> int:
    parser = Parser(
        "data add-uid FILE [out=FILE]",
        "Adds a column with the uid that follows each problem through a run.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="any problem file")
    parser.add_setting("out", type=Path, metavar="FILE", help="default: NAME.uid.SUFFIX")
    arguments = parser.parse(argv)
    from postgrad.data.rows.files import extension
    from postgrad.data.tables import add_uids

    path = arguments.file.expanduser()
    out = arguments.out
    if out is None:
        suffix = extension(path)
        stem = path.name[: -len(suffix)]
        new_suffix = suffix if suffix in (".parquet", ".jsonl") else ".parquet"
        out = path.with_name(f"{stem}.uid{new_suffix}")
    out = out.expanduser()
    print(f"{add_uids(path, out)} rows with uids: {out}")
    return 0


def export_command(argv: list[str]) -> int:
    parser = Parser(
        "data export FILE out=FILE.csv|.jsonl|.parquet [columns=a,b]",
        "Converts a problem file to another format, by the suffix of out=.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="any problem file")
    parser.add_setting("out", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_setting("columns", metavar="a,b", help="columns to write; default: all")
    arguments = parser.parse(argv)
    from postgrad.data.tables import export

    columns = None
    if arguments.columns:
        columns = [name.strip() for name in arguments.columns.split(",")]
    out = arguments.out.expanduser()
    print(f"{export(arguments.file.expanduser(), out, columns)} rows: {out}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "prepare": prepare_command,
    "show": show_command,
    "check": check_command,
    "add-uid": add_uid_command,
    "export": export_command,
    "from-rollouts": from_rollouts_command,
}

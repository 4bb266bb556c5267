"""`postgrad data prepare|show|check|add-uid|export ...`"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError, did_you_mean

HELP = """usage: postgrad data COMMAND ...

  prepare NAME [from=hub|FOLDER|FILE,...] [out=FILE.parquet] [key=value ...]
          a data set in one schema, with what was dropped and why; without NAME: the sets there are
  show FILE [n=3] [uid=UID] [model=MODEL] [style=STYLE]
          rows as a person reads them; with a model, as it sees them
  check FILE ... [against=TEST] [verifier=NAME]
          gold answers and near misses through the verifier, duplicates, overlap with a test set; exit code 1 when the verifier errs
  add-uid FILE [out=FILE]         a column with the uid that follows each problem through a run
  export FILE out=FILE.csv|.jsonl|.parquet [columns=a,b]

postgrad data COMMAND --help tells more."""

PREPARE_HELP = """usage: postgrad data prepare NAME [from=hub|FOLDER|FILE,...] [out=FILE.parquet] [key=value ...]

  from=       hub (the default): downloads the set's files, or takes them from the cache; or a folder or files that you have
  out=        NAME-SPLIT.parquet unless given; the same input gives the same bytes
  overwrite=true   replace a file with other content
  repo= files= revision=   another repository, other files in it (patterns), a commit
  tokenizer=MODEL          counts tokens for sets that limit them
{common}
"""


def run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise ConfigError(f"data has no command {name}; {did_you_mean(name, COMMANDS)}")
    if any(word in ("-h", "--help") for word in rest):
        print(_help(name))
        return 0
    return COMMANDS[name](rest)


def _help(name: str) -> str:
    if name != "prepare":
        return HELP
    from postgrad.data.prepare.catalog import COMMON

    return (
        PREPARE_HELP.format(
            common="\n".join(f"  {key + '=':<12}{option.help}" for key, option in COMMON.items())
        )
        + "\n"
        + _sets()
    )


def _sets() -> str:
    from postgrad.data.prepare.catalog import SETS

    lines = ["data sets (splits; prompt style):"]
    for name, entry in SETS.items():
        lines.append(f"  {name:<22}{entry.help} ({', '.join(entry.splits)}; {entry.style})")
        lines += [
            f"  {'':<22}  {key}={option.default}: {option.help}"
            for key, option in entry.options.items()
        ]
    return "\n".join(lines)


def _split(words: list[str], known: set[str] | None) -> tuple[list[str], dict[str, str]]:
    """Words without = are files, the others options. `known` None lets any key pass."""
    files: list[str] = []
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or "/" in key:
            files.append(word)
        elif known is not None and key not in known:
            raise ConfigError(f"unknown word {word!r}; {did_you_mean(key, known)}")
        elif not value:
            raise ConfigError(f"{key}= has no value")
        else:
            options[key] = value
    return files, options


def _one_file(files: list[str], command: str) -> Path:
    if len(files) != 1:
        raise ConfigError(
            f"which file? postgrad data {command} FILE ...{f'; got {len(files)} files' if files else ''}"
        )
    return Path(files[0]).expanduser()


def _number(options: dict[str, str], key: str, default: int) -> int:
    value = options.get(key, str(default))
    if not value.isdigit():
        raise ConfigError(f"{key}={value} is not a whole number from 0")
    return int(value)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere; gives the function that is told of progress."""
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


def prepare_command(words: list[str]) -> int:
    names, options = _split(words, None)
    if not names:
        if options:
            raise ConfigError(
                "which data set? postgrad data prepare NAME ...; postgrad data prepare lists them"
            )
        print(_sets())
        return 0
    if len(names) > 1:
        raise ConfigError(
            f"one data set at a time; got {', '.join(names)} (files are given as from=FILE)"
        )
    from postgrad.data.prepare.output import describe
    from postgrad.data.prepare.request import find_files, parse_request
    from postgrad.data.prepare.run import prepare
    from postgrad.data.readers import count_rows

    place, out = options.pop("from", "hub"), options.pop("out", "")
    elsewhere = {key: options.pop(key) for key in ("repo", "revision") if key in options}
    patterns, overwrite, tokenizer = (
        options.pop("files", ""),
        options.pop("overwrite", "false"),
        options.pop("tokenizer", ""),
    )
    if overwrite not in ("true", "false"):
        raise ConfigError(f"overwrite={overwrite} must be true or false")
    request = parse_request(names[0], options, _counter(tokenizer) if tokenizer else None)
    if "max_tokens" in options and not tokenizer:
        raise ConfigError("max_tokens= needs a tokenizer to count with; add tokenizer=MODEL")
    files, commit = find_files(request, place, patterns, **elsewhere)
    sizes = [count_rows(path) for _, path in files]
    total = sum(size for size in sizes if size) if all(sizes) else None
    path = Path(out or f"{request.name}-{request.split}.parquet").expanduser()
    with progress(f"reading {request.name}", total) as told:
        prepared = prepare(request, files, commit, path, overwrite == "true", told)
    print("\n".join(describe(prepared)))
    if request.data_set.note:
        print(f"note: {request.data_set.note}")
    if "max_tokens" in request.options and not tokenizer:
        print("note: the length of generations was not limited; give tokenizer=MODEL for that")
    if request.style.text:
        print(
            "note: the prompts are whole texts; train with data.template=plain, or give style=bare here and data.prompt_style there"
        )
    return 0


def _counter(model: str) -> Callable[[str], int]:
    tokenizer = _tokenizer(model)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokenizer(model: str) -> Any:
    from postgrad.config.schema import ModelConfig
    from postgrad.model.load import load_tokenizer

    return load_tokenizer(ModelConfig(path=model), 0)


def show_command(words: list[str]) -> int:
    files, options = _split(words, {"n", "uid", "model", "style", "template", "skip"})
    path = _one_file(files, "show")
    from postgrad.data.prepare.output import read_provenance
    from postgrad.data.problems import load_problems
    from postgrad.data.show import describe_problem, describe_provenance

    problems = load_problems(str(path))
    chosen = list(enumerate(problems, 1))
    if "uid" in options:
        chosen = [(row, problem) for row, problem in chosen if problem.uid == options["uid"]]
        if not chosen:
            raise ConfigError(f"{path} has no problem with uid {options['uid']}")
    skip = _number(options, "skip", 0)
    prompts = _prompts(options)
    lines = describe_provenance(read_provenance(path) if path.is_file() else {})
    for row, problem in chosen[skip : skip + _number(options, "n", 3)]:
        lines += ["", *describe_problem(problem, f"{path.name}: row {row}", prompts)]
    print("\n".join(lines).strip("\n"))
    print(f"\n{len(problems)} problems in {path}")
    return 0


def _prompts(options: dict[str, str]) -> Any:
    """What turns problems into the text a model sees; None where no model was named."""
    if "model" not in options:
        if wrong := [key for key in ("style", "template") if key in options]:
            raise ConfigError(f"{wrong[0]}= shows the text that a model sees; add model=MODEL")
        return None
    from postgrad.data.render import Prompts

    return Prompts(
        _tokenizer(options["model"]),
        options.get("template", "auto"),
        style=options.get("style", "own"),
    )


def check_command(words: list[str]) -> int:
    files, options = _split(words, {"against", "verifier", "timeout_s", "show"})
    if not files:
        raise ConfigError("which file? postgrad data check FILE ... [against=TEST]")
    from postgrad.data.problems import load_problems, load_problems_with_locations
    from postgrad.evaluation.data_check import check_data
    from postgrad.verifiers.scorer import Scorer

    problems, places = load_problems_with_locations(",".join(files))
    against = load_problems(options["against"]) if "against" in options else []
    limit = options.get("timeout_s", "10")
    if not limit.replace(".", "", 1).isdigit():
        raise ConfigError(f"timeout_s={limit} is not a number of seconds")
    with (
        Scorer(options.get("verifier", "auto"), float(limit)) as scorer,
        progress("judging gold answers", len(problems)) as told,
    ):
        report = check_data(problems, places, scorer, against, told)
    shown = _number(options, "show", 10)
    print(f"{report.num_problems} problems, {report.num_checked} gold answers judged")
    for why, count in report.unchecked.items():
        print(f"  not judged {count}: {why}")
    _print_rows("gold answers that the verifier does not accept", report.rejected_golds, shown)
    _print_rows(
        f"wrong answers that the verifier accepts, of {report.num_near_misses} near misses",
        report.accepted_near_misses,
        shown,
    )
    _print_rows(
        "demonstrations that the verifier does not accept", report.rejected_demonstrations, shown
    )
    _print_rows("questions that are asked more than once", report.duplicates, shown)
    if "against" in options:
        _print_rows(f"questions that are also in {options['against']}", report.in_test_set, shown)
    return 1 if report.rejected_golds or report.accepted_near_misses else 0


def _print_rows(heading: str, rows: "list[Any]", shown: int) -> None:
    print(f"{heading}: {len(rows) or 'none'}")
    for row in rows[:shown]:
        print(f"  {row.location} (uid {row.uid}): {row.reason}")
    if len(rows) > shown:
        print(f"  ... and {len(rows) - shown} more; show={len(rows)} lists all")


def add_uid_command(words: list[str]) -> int:
    files, options = _split(words, {"out"})
    path = _one_file(files, "add-uid")
    from postgrad.data.readers import extension
    from postgrad.data.tables import add_uids

    kind = extension(path) if extension(path) in (".parquet", ".jsonl") else ".parquet"
    out = Path(
        options.get("out") or path.with_name(path.name[: -len(extension(path))] + f".uid{kind}")
    ).expanduser()
    print(f"{add_uids(path, out)} rows with uids: {out}")
    return 0


def export_command(words: list[str]) -> int:
    files, options = _split(words, {"out", "columns"})
    path = _one_file(files, "export")
    if "out" not in options:
        raise ConfigError(
            f"where to? postgrad data export {path} out=FILE.csv (or .jsonl, .parquet)"
        )
    from postgrad.data.tables import export

    columns = (
        [name.strip() for name in options["columns"].split(",")] if "columns" in options else None
    )
    out = Path(options["out"]).expanduser()
    print(f"{export(path, out, columns)} rows: {out}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "prepare": prepare_command,
    "show": show_command,
    "check": check_command,
    "add-uid": add_uid_command,
    "export": export_command,
}

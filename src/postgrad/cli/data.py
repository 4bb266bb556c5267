"""`postgrad data prepare|show|check|add-uid|export|from-rollouts ...`"""

import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from postgrad.cli.arguments import Count, Parser, Positive, run_subcommand
from postgrad.errors import Missing, UnknownName, WrongValue


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if argv[0] == "prepare" and ("-h" in argv or "--help" in argv):
        return Parser(prepare, "data prepare", _data_sets()).call(["--help"])
    return run_subcommand("data", COMMANDS, argv)


def _overview() -> str:
    """Return the usage of each command, and what it does."""
    lines = ["usage: postgrad data COMMAND ..."]
    for name, function in COMMANDS.items():
        parser = Parser(function, f"data {name}")
        lines += ["", textwrap.indent(str(parser.usage), "  ")]
        lines.append(textwrap.indent(str(parser.description), " " * 6))
    return "\n".join([*lines, "", "postgrad data COMMAND --help shows the settings of a command."])


def _data_sets() -> str:
    """Return the options of all data sets, and the list of data sets with their own."""
    from postgrad.data.prepare.catalog import COMMON, SETS

    lines = ["options of all data sets:"]
    lines += [f"  {key + '=':<12}{option.help}" for key, option in COMMON.items()]
    lines += ["", "data sets (splits; prompt style):"]
    for name, entry in SETS.items():
        lines.append(f"  {name:<22}{entry.help} ({', '.join(entry.splits)}; {entry.style})")
        for key, option in entry.options.items():
            lines.append(f"  {'':<22}  {key}={option.default}: {option.help}")
    return "\n".join(lines)


def prepare(
    name: str | None = None,
    *options: str,
    from_: str = "hub",
    out: str = "",
    overwrite: bool = False,
    repo: str = "",
    files: str = "",
    revision: str = "",
    tokenizer: str = "",
) -> int:
    """Convert a data set to Postgrad's schema and count the dropped rows by reason. The same input
    gives the same bytes. Without NAME: list the data sets.

    Args:
        name: the data set
        options: options of the data set, see below
        from [hub|FOLDER|FILE,...]: hub downloads the files or takes them from the cache; or your
            own files
        out [FILE.parquet]: default: NAME-SPLIT.parquet
        overwrite: replace a file that has other content
        repo: another repository on the hub
        files [PATTERNS]: other files in it
        revision [COMMIT]: a commit of the repository
        tokenizer [MODEL]: counts tokens for data sets that limit them
    """
    if name is None and from_ == "hub":
        print(_data_sets())
        return 0
    given = _data_set_options(name, options)
    from postgrad.data.prepare.output import describe
    from postgrad.data.prepare.request import find_files, parse_request, source_columns
    from postgrad.data.prepare.run import prepare as write_prepared

    count_tokens = _token_counter(tokenizer) if tokenizer else None
    source, columns = source_columns(from_)
    request = replace(parse_request(str(name), given, count_tokens), columns=columns)
    if "max_tokens" in given and count_tokens is None:
        raise Missing("max_tokens= needs a tokenizer; add tokenizer=MODEL", at="tokenizer")
    paths, commit = find_files(request, source, files, repo, revision)
    file = Path(out or f"{request.name}-{request.split}.parquet").expanduser()
    prepared = write_prepared(request, paths, commit, file, overwrite)
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


def _data_set_options(name: str | None, words: Sequence[str]) -> dict[str, str]:
    """Return the options of the data set, from `key=value` arguments. Raises ConfigError."""
    if name is None or "=" in name:
        raise Missing(
            "the data set is missing; write postgrad data prepare NAME ...; "
            "postgrad data prepare lists the names",
            at="NAME",
        )
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UnknownName(
                f"unexpected argument {word}; prepare one data set at a time, "
                "and give files as from=FILE",
                at=word,
            )
        if not value:
            raise WrongValue(f"{key}= has no value; write {key}=VALUE")
        options[key] = value
    return options


def _token_counter(model: str) -> Callable[[str], int]:
    tokenizer = _load_tokenizer(model)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _load_tokenizer(model: str) -> Any:
    from postgrad.config.schema import ModelConfig
    from postgrad.model.load.load import load_tokenizer

    return load_tokenizer(ModelConfig(path=model), 0)


def show(
    file: Path,
    *,
    n: Count = 3,
    skip: Count = 0,
    uid: str = "",
    model: str = "",
    style: str = "",
    template: str = "",
) -> int:
    """Print problems of a file; with a model, the prompt it sees.

    Args:
        file: any problem file
        n: problems to print
        skip: problems to skip first
        uid: print only the problem with this uid
        model: print the prompt that this model sees
        style: prompt style, as data.prompt_style; needs model=
        template: as data.template; needs model=
    """
    from postgrad.data.prepare.output import read_provenance
    from postgrad.data.problems import load_problems
    from postgrad.data.show import describe_pictures, describe_problem, describe_provenance

    path = file.expanduser()
    notes: list[str] = []
    problems = load_problems(str(path), notes.append)
    chosen = list(enumerate(problems, 1))
    if uid:
        chosen = [(row, problem) for row, problem in chosen if problem.uid == uid]
        if not chosen:
            raise UnknownName(f"{path} has no problem with uid {uid}", at="uid")
    encoder = _encoder(model, style, template)
    lines = [*describe_provenance(read_provenance(path) if path.is_file() else {}), *notes]
    for row, problem in chosen[skip : skip + n]:
        lines += ["", *describe_problem(problem, f"{path.name}: row {row}", encoder)]
    print("\n".join(lines).strip("\n"))
    print("\n".join(["", f"{len(problems)} problems in {path}", *describe_pictures(problems)]))
    return 0


def _encoder(model: str, style: str, template: str) -> Any:
    """Return the object that renders prompts for `model=`, None without a model."""
    if not model:
        for key, value in (("style", style), ("template", template)):
            if value:
                raise Missing(
                    f"{key}= needs a model to render prompts for; add model=MODEL", at="model"
                )
        return None
    from postgrad.data.encode.encoder import Encoder

    return Encoder(_load_tokenizer(model), template or "auto", style=style or "own")


def check(
    files: list[str],
    *,
    against: str = "",
    model: str = "",
    verifier: str = "auto",
    timeout_s: Positive = 10.0,
    show: Count = 10,
) -> int:
    """Score gold answers and near misses with the verifier, and find duplicates and overlap with a
    test set. Exit code 1 if the verifier rejects a gold answer or accepts a near miss, 2 if no
    verifier is known.

    Args:
        files [FILE]: any problem files
        against [TEST]: test set that must not overlap
        model: count the tokens of pictures as this model reads them
        verifier: as reward.verifier
        timeout_s: time limit per answer, in seconds
        show: rows to print per finding
    """
    from postgrad.data.problems import load_problems, load_problems_with_locations
    from postgrad.data.show import describe_pictures
    from postgrad.evaluation.data_check import check_data
    from postgrad.verifiers.scorer import Scorer
    from postgrad.verifiers.table import VERIFIERS

    problems, locations = load_problems_with_locations(",".join(files))
    pictures = describe_pictures(problems, _encoder(model, "", ""))
    test_set = load_problems(against) if against else []
    with Scorer(verifier, timeout_s) as scorer:
        report = check_data(problems, locations, scorer, test_set)
    print("\n".join(pictures), end="\n" if pictures else "")
    _print_report(report, against, show)
    if report.num_unknown and not report.num_checked:
        raise Missing(
            "nothing was scored, because no verifier is known for these rows; "
            f"add verifier=NAME, one of {', '.join(VERIFIERS)}, or verifier=FILE.py:FUNCTION",
            at="verifier",
        )
    return 1 if report.rejected_golds or report.accepted_near_misses else 0


def _print_report(report: Any, against: str, limit: int) -> None:
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


def add_uid(file: Path, *, out: Path | None = None) -> int:
    """Add a column with the uid that follows each problem through a run.

    Args:
        file: any problem file
        out [FILE]: default: NAME.uid.SUFFIX
    """
    from postgrad.data.rows.files import extension
    from postgrad.data.tables import add_uids

    path = file.expanduser()
    if out is None:
        suffix = extension(path)
        stem = path.name[: -len(suffix)]
        new_suffix = suffix if suffix in (".parquet", ".jsonl") else ".parquet"
        out = path.with_name(f"{stem}.uid{new_suffix}")
    out = out.expanduser()
    print(f"{add_uids(path, out)} rows with uids: {out}")
    return 0


def export(file: Path, *, out: Path, columns: str = "") -> int:
    """Convert a problem file to another format, by the suffix of out=.

    Args:
        file: any problem file
        out [FILE.csv|.jsonl|.parquet]: file to write
        columns [a,b]: columns to write; default: all
    """
    from postgrad.data.tables import export as write_table

    chosen = [name.strip() for name in columns.split(",")] if columns else None
    out = out.expanduser()
    print(f"{write_table(file.expanduser(), out, chosen)} rows: {out}")
    return 0


def from_rollouts(
    run: Path, *, where: str = "reward>0", per_problem: Count = 0, out: Path | None = None
) -> int:
    """Write trajectories of a run as conversations for SFT: rejection sampling. Conditions compare
    columns of the rollouts: where='reward>0.9 and finish=stop'. Further columns: step, length
    (tokens), reward/PART.

    Args:
        run: folder of a run
        where: what to keep
        per_problem: most trajectories per problem; 0: all
        out [FILE.jsonl]: default: RUN/rollouts-sft.jsonl
    """
    from postgrad.data.from_rollouts import parse_where, select_rollouts
    from postgrad.data.tables import write_rows

    run = run.expanduser()
    out = out or run / "rollouts-sft.jsonl"
    conditions = parse_where(where)
    rows = list(select_rollouts(run, conditions, per_problem, _print_note))
    if not rows:
        raise Missing(f"no trajectory of {run} fulfills where={where!r}; relax it", at="where")
    write_rows(out, rows)
    problems = len({row["uid"].rpartition("/")[0].rpartition("/")[0] for row in rows})
    print(f"{len(rows)} conversations of {problems} problems: {out}")
    print(f"postgrad train sft model.path=MODEL data.train={out}")
    return 0


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


COMMANDS: dict[str, Callable[..., int]] = {
    "prepare": prepare,
    "show": show,
    "check": check,
    "add-uid": add_uid,
    "export": export,
    "from-rollouts": from_rollouts,
}

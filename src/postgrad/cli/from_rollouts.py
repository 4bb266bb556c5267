"""`postgrad data from-rollouts RUN where=...`: rollouts of a run as SFT data."""

import sys
from pathlib import Path

from postgrad.cli.arguments import Parser, whole_number
from postgrad.errors import ConfigError


def from_rollouts_command(argv: list[str]) -> int:
    """Writes the chosen trajectories of a run as conversations; returns the exit code."""
    parser = Parser(
        "data from-rollouts RUN [where=CONDITIONS] [per_problem=0] [out=FILE.jsonl]",
        "Writes trajectories of a run as conversations for SFT: rejection sampling.\n"
        "Conditions compare columns of the rollouts: where='reward>0.9 and finish=stop'. Further "
        "columns: step, length (tokens), reward/PART.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_setting("where", default="reward>0", metavar="'reward>0.9'", help="what to keep")
    parser.add_setting(
        "per_problem",
        type=whole_number(0),
        default=0,
        metavar="0",
        help="most trajectories per problem; 0: all",
    )
    parser.add_setting(
        "out", type=Path, metavar="FILE.jsonl", help="default: RUN/rollouts-sft.jsonl"
    )
    arguments = parser.parse(argv)
    from postgrad.data.from_rollouts import parse_where, select_rollouts
    from postgrad.data.tables import write_rows

    run = arguments.run.expanduser()
    out = arguments.out or run / "rollouts-sft.jsonl"
    conditions = parse_where(arguments.where)
    rows = list(select_rollouts(run, conditions, arguments.per_problem, _print_note))
    if not rows:
        raise ConfigError(f"no trajectory of {run} fulfills where={arguments.where!r}; relax it")
    write_rows(out, rows)
    problems = len({row["uid"].rpartition("/")[0].rpartition("/")[0] for row in rows})
    print(f"{len(rows)} conversations of {problems} problems: {out}")
    print(f"postgrad train sft model.path=MODEL data.train={out}")
    return 0


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)

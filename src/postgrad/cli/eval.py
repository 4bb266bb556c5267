"""`postgrad eval MODEL data=SET[,SET...] key=value ...` and `postgrad eval compare A B`"""

from pathlib import Path

from postgrad.cli.arguments import Parser
from postgrad.errors import ConfigError

DESCRIPTION = """\
Samples answers of a model to problems and scores them with a verifier. The same command continues
an evaluation that was stopped, and gives the same files.
postgrad eval compare A B [out=FILE.json] compares two results.
postgrad eval table FOLDER ... [out=FILE] shows many results, models by sets."""

EPILOG = """settings:
  data=SET[,SET ...]  problem files in any format that training reads, one set per file;
                      NAME=FILE gives a set a name
  n=16                samples per problem; reports avg@16, pass@1 2 4 8 16 and maj@2 4 8 16;
                      without n, decoding is greedy
  temperature=0.6 top_p=0.95 max_response_tokens=2048 limit=40 verifier=math template=chat seed=1
  dtype=float32 engine=native out=FOLDER
                      the keys of training (rollout.temperature ...) work without their section
  verifier=llm_judge reward.judge.model=URL#NAME reward.judge.template=pairwise
                      a language model compares each answer with the row's own answer:
                      win rate, raw and length-controlled (AlpacaEval; docs/rewards.md)

Results: SET.jsonl (one line per response), summary.json and report.md,
in RUN/eval/ for a run, otherwise in eval/."""

TABLE_DESCRIPTION = """Shows many evaluations in one table, models by sets, or as bars."""
COMPARE_DESCRIPTION = (
    """Prints the paired difference of two evaluations, set by set, with its confidence interval."""
)


def make_parser() -> Parser:
    parser = Parser("eval MODEL data=SET[,SET ...] [n=16] [key=value ...]", DESCRIPTION, EPILOG)
    parser.add_model()
    parser.add_overrides("settings, see below")
    return parser


def run(argv: list[str]) -> int:
    if argv and argv[0] == "compare":
        return _compare(argv[1:])
    if argv and argv[0] == "table":
        return _table(argv[1:])
    arguments = make_parser().parse(argv, help_if_empty=True)
    if "=" in arguments.model and not Path(arguments.model).exists():
        raise ConfigError(
            f"the model is missing before {arguments.model}; "
            "write postgrad eval MODEL data=FILE ..."
        )
    from postgrad.evaluation.model import find_model
    from postgrad.evaluation.plan import make_plan
    from postgrad.evaluation.progress import make_progress
    from postgrad.evaluation.report import table, warnings
    from postgrad.evaluation.run import evaluate
    from postgrad.evaluation.settings import read_settings

    target = find_model(arguments.model)
    settings = read_settings(target.path, arguments.overrides, target.config)
    plan = make_plan(settings, target)
    summary = evaluate(plan, make_progress())
    problems = [problem for problems in plan.sets.values() for problem in problems]
    print("\n".join([table(summary), *warnings(summary), *plan.scorer.notes(problems)]))
    speed = summary["speed"]
    if speed.get("tokens_per_second"):
        print(f"{speed['tokens']} tokens, {speed['tokens_per_second']:g} tokens per second")
    sets = ", ".join(f"{name}.jsonl" for name in plan.sets)
    print(f"results: {plan.folder}/report.md, summary.json and {sets}")
    return 0


def _table(argv: list[str]) -> int:
    from postgrad.evaluation.pivot import (
        METRICS,
        as_text,
        make_pivot,
        read_summaries,
        write_pivot,
    )

    parser = Parser("eval table FOLDER [FOLDER ...] [metric=avg] [out=FILE]", TABLE_DESCRIPTION)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="evaluations, or their parent")
    parser.add_setting(
        "metric",
        default="avg",
        choices=METRICS,
        help="avg@k, pass@k (best), maj@k, a part of the score, the score, or tokens",
    )
    parser.add_setting("out", metavar="FILE", help="also write FILE.md, .csv, .png, .pdf or .svg")
    arguments = parser.parse(argv, help_if_empty=True)
    summaries = read_summaries([Path(folder).expanduser() for folder in arguments.folders])
    pivot = make_pivot(summaries, arguments.metric)
    if arguments.out:
        write_pivot(pivot, arguments.metric, Path(arguments.out).expanduser())
    print(as_text(pivot, arguments.metric))
    return 0


def _compare(argv: list[str]) -> int:
    parser = Parser("eval compare A B [out=FILE.json]", COMPARE_DESCRIPTION)
    parser.add_argument("first", metavar="A", help="folder of an evaluation")
    parser.add_argument("second", metavar="B", help="folder of another evaluation")
    parser.add_setting("out", metavar="FILE.json", help="also write the result to this file")
    arguments = parser.parse(argv)
    import json

    from postgrad.evaluation.compare import compare, table
    from postgrad.evaluation.folder import write

    result = compare(Path(arguments.first).expanduser(), Path(arguments.second).expanduser())
    if arguments.out:
        write(Path(arguments.out).expanduser(), json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0

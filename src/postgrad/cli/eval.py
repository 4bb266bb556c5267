"""`postgrad eval MODEL data=SET[,SET...] key=value ...`, `eval table ...` and `eval compare A B`"""

import json
from pathlib import Path

from postgrad.cli.arguments import Parser, run_subcommand
from postgrad.errors import Missing, UnknownName


def run(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        return run_subcommand("eval", COMMANDS, argv)
    return Parser(evaluate_model, "eval").call(argv)


def evaluate_model(model: str, *overrides: str) -> int:
    """Sample answers of a model to problems and score them with a verifier. The same command
    continues an evaluation that was stopped, and gives the same files.
    postgrad eval compare A B [out=FILE.json] compares two results.
    postgrad eval table FOLDER ... [out=FILE] shows many results, models by sets.

    Args:
        model: run folder (its newest checkpoint), checkpoint, model folder, GGUF file, hub id,
            smollm2 or tiny
        overrides: settings, see below

    settings:
      data=SET[,SET ...]  problem files in any format that training reads, one set per file;
                          NAME=FILE gives a set a name
      n=16                samples per problem; reports avg@16, pass@1 2 4 8 16 and maj@2 4 8 16;
                          without n, decoding is greedy
      temperature=0.6 top_p=0.95 max_response_tokens=2048 limit=40 verifier=math template=chat
      seed=1 dtype=float32 engine=native out=FOLDER
                          the keys of training (rollout.temperature ...) work without their section
      verifier=llm_judge reward.judge.model=URL#NAME reward.judge.template=pairwise
                          a language model compares each answer with the row's own answer:
                          win rate, raw and length-controlled (AlpacaEval; docs/rewards.md)

    Results: SET.jsonl (one line per response), summary.json and report.md,
    in RUN/eval/ for a run, otherwise in eval/.
    """
    if "=" in model and not Path(model).exists():
        raise Missing(
            f"the model is missing before {model}; write postgrad eval MODEL data=FILE ...",
            at="MODEL",
        )
    from postgrad.evaluation.model import find_model
    from postgrad.evaluation.plan import make_plan
    from postgrad.evaluation.progress import Progress
    from postgrad.evaluation.report import table, warnings
    from postgrad.evaluation.run import evaluate
    from postgrad.evaluation.settings import read_settings

    target = find_model(model)
    settings = read_settings(target.path, list(overrides), target.config)
    plan = make_plan(settings, target)
    summary = evaluate(plan, Progress())
    problems = [problem for problems in plan.sets.values() for problem in problems]
    print("\n".join([table(summary), *warnings(summary), *plan.scorer.notes(problems)]))
    speed = summary["speed"]
    if speed.get("tokens_per_second"):
        print(f"{speed['tokens']} tokens, {speed['tokens_per_second']:g} tokens per second")
    sets = ", ".join(f"{name}.jsonl" for name in plan.sets)
    print(f"results: {plan.folder}/report.md, summary.json and {sets}")
    return 0


def table(folders: list[Path], *, metric: str = "avg", out: Path | None = None) -> int:
    """Show many evaluations in one table, models by sets, or as bars.

    Args:
        folders [FOLDER]: evaluations, or their parent
        metric: avg@k, pass@k (best), maj@k, a part of the score (format, answer), the score, or
            tokens (length)
        out [FILE]: also write FILE.md, .csv, .png, .pdf or .svg
    """
    from postgrad.evaluation.pivot import METRICS, as_text, make_pivot, read_summaries, write_pivot

    if metric not in METRICS:
        raise UnknownName(f"metric={metric} is unknown; use one of {', '.join(METRICS)}")
    pivot = make_pivot(read_summaries([folder.expanduser() for folder in folders]), metric)
    if out:
        write_pivot(pivot, metric, out.expanduser())
    print(as_text(pivot, metric))
    return 0


def compare(first: Path, second: Path, *, out: Path | None = None) -> int:
    """Print the paired difference of two evaluations, set by set, with its confidence interval.

    Args:
        first [A]: folder of an evaluation
        second [B]: folder of another evaluation
        out [FILE.json]: also write the result to this file
    """
    from postgrad.evaluation.compare import compare, table
    from postgrad.evaluation.folder import write

    result = compare(first.expanduser(), second.expanduser())
    if out:
        write(out.expanduser(), json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


COMMANDS = {"compare": compare, "table": table}

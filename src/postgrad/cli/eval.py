"""`postgrad eval MODEL data=SET[,SET...] key=value ...` and `postgrad eval compare A B`"""

from pathlib import Path

from postgrad.errors import ConfigError

HELP = """usage: postgrad eval MODEL data=SET[,SET ...] [n=16] [key=value ...]
       postgrad eval compare A B [out=FILE.json]

Lets a model answer problems and judges the answers. The same command continues an evaluation that was stopped, and gives the same files.

  MODEL       a run folder (its newest checkpoint), a checkpoint, a model folder, a GGUF file, a hub id, smollm2 or tiny
  data=       problem files in any form training reads, each a set of its own; NAME=FILE names one
  n=16        samples for each problem: gives avg@16, pass@1 2 4 8 16 and maj@2 4 8 16
  temperature=0.6 top_p=0.95 max_response_tokens=2048 limit=40 verifier=math template=chat seed=1 dtype=float32 engine=native out=FOLDER
              greedy without n; training's keys (rollout.temperature ...) can be written without their section
  verifier=llm_judge reward.judge.model=URL#NAME reward.judge.template=pairwise
              a judge compares each answer with the row's own: win rate, raw and length-controlled (AlpacaEval; docs/verifiers.md)

compare gives the paired difference of two such results (their folders), set by set, with its interval.

Results: SET.jsonl (one line a response), summary.json, report.md; in RUN/eval/ for a run, else in eval/."""


def run(overrides: list[str]) -> int:
    if not overrides or "--help" in overrides or "-h" in overrides:
        print(HELP)
        return 0
    if overrides[0] == "compare":
        return _compare(overrides[1:])
    if "=" in overrides[0] and not Path(overrides[0]).exists():
        raise ConfigError(
            f"which model? postgrad eval MODEL data=FILE ...; the first word was {overrides[0]}"
        )
    from postgrad.evaluation.model import find_model
    from postgrad.evaluation.plan import make_plan
    from postgrad.evaluation.progress import make_progress
    from postgrad.evaluation.report import table, warnings
    from postgrad.evaluation.run import evaluate
    from postgrad.evaluation.settings import read_settings

    target = find_model(overrides[0])
    plan = make_plan(read_settings(target.path, overrides[1:], target.config), target)
    summary = evaluate(plan, make_progress())
    print("\n".join([table(summary), *warnings(summary)]))
    if summary["speed"].get("tokens_per_second"):
        print(
            f"{summary['speed']['tokens']} tokens, {summary['speed']['tokens_per_second']:g} a second"
        )
    print(
        f"results: {plan.folder}/report.md, summary.json and {', '.join(f'{name}.jsonl' for name in plan.sets)}"
    )
    return 0


def _compare(overrides: list[str]) -> int:
    folders = [word for word in overrides if "=" not in word or Path(word).exists()]
    others = [word for word in overrides if word not in folders]
    if len(folders) != 2 or any(not word.startswith("out=") for word in others) or len(others) > 1:
        raise ConfigError(
            f"compare wants two folders of evaluations, and out=FILE.json if you like; it got {' '.join(overrides) or 'nothing'}"
        )
    import json

    from postgrad.evaluation.compare import compare, table
    from postgrad.evaluation.folder import write

    result = compare(*(Path(folder).expanduser() for folder in folders))
    if others:
        write(
            Path(others[0].removeprefix("out=")).expanduser(), json.dumps(result, indent=1) + "\n"
        )
    print(table(result))
    return 0

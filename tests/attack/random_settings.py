"""Random combinations of settings: each trains two steps, or is refused with exit code 2.

python tests/attack/random_settings.py --count 1000 --jobs 16 --seed 0

A seed gives a recipe and one to nine settings. If they are refused, the setting that the refusal
names is removed and the rest is tried again, so each seed ends with a run: settings that are tried
together with a wrong one are not lost. `--only SEED` repeats a seed. Each runs in a fork of a
process that has imported everything, so a hang or a crash is one result.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

TESTS = Path(__file__).resolve().parent.parent
CPU_LIMIT_S = 120  # of one seed; a run of a second takes long on a busy machine
TIME_LIMIT_S = 1800
TRACEBACK = 70  # exit code of a combination that raised
TRAINED, REFUSED = "trained", "refused"

# Settings that every combination has; those of `settings_of` follow them and win.
BASE = (
    "model.device=cpu",
    "model.dtype=float32",
    "model.threads=1",
    "data.template=plain",
    "training.steps=2",
    "training.problems_per_step=4",
    "rollout.samples=4",
    "rollout.max_response_tokens=6",
    "reward.workers=1",
    "reward.timeout_s=60",
    "optimizer.lr=1e-3",
    "name=run",
)
# Not drawn: the run's place, what the machine decides, time limits, and Ray, which has its own
# tests (tests/cluster).
FIXED = {
    "name",
    "runs",
    "track",
    "model.path",
    "model.device",
    "model.threads",
    "training.steps",
    "reward.timeout_s",
    "reward.judge.timeout_s",
    "rollout.tool_timeout_s",
    "environment.timeout_s",
    "cluster.wait_s",
    "method.name",
}
# Texts of settings without a list of choices.
TEXTS = {
    "data.train": ("arithmetic:1", "arithmetic:2:boxed", "{pairs}", "{demos}", "{labels}", "no"),
    "data.validation": ("", "arithmetic:1:digits:test", "{demos}", "a={demos},b={demos}", "no"),
    "data.prompt_style": ("own", "boxed", "r1_zero", "no"),
    "rollout.engine": ("native", "native", "hf", "http", "vllm", "no"),
    "rollout.url": ("", "http://127.0.0.1:9/v1#m", "no"),
    "rollout.stop": ("null", "[]", "['1']", "['=','7']", "['']"),
    "rollout.tools": ("[]", "[calculator]", "[no]"),
    "environment.name": ("", "", "{guess}", "no"),
    "environment.options": ("{{}}", "{{high:9}}", "{{no:1}}"),
    "environment.weights": ("{{}}", "{{guess:1}}"),
    "reward.verifier": (
        "{graded}:graded", "{graded}:graded", "{graded}:missing", "exact", "boxed", "length",
        "math", "exact+0.5*length", "{graded}:graded + exact", "llm_judge", "code", "exact + code",
        "no",
    ),
    "reward.judge.model": ("", "{model}", "http://127.0.0.1:9/v1#m", "no"),
    "reward.judge.monitor": ("", "{model}", "no"),
    "data.template_options": ("{{}}", "{{a:1}}", "{{a:{{b:[1]}}}}"),
    "model.lora.targets": ("all-linear", "q_proj,v_proj", "no"),
    "cluster.backend": ("local", "local", "local", "local", "process", "no"),
    "cluster.address": ("", "127.0.0.1:9"),
    "cluster.pools": ("{{}}", "{{critic:1}}"),
    "warmup.recipe": ("", "", "sft", "no"),
    "warmup.overrides": ("[]", "[training.steps=1]", "[no=1]"),
    "training.keep_best": ("", "mean", "test", "no"),
    "training.profile_steps": ("[]", "[1]", "[9]", "[0]"),
    "training.epochs": ("0", "0.08", "0.1"),
    "optimizer.betas": ("[0.9,0.95]", "[0.9]", "[0,0]", "[1,1]", "[0.5,2]", "[]"),
    "method.teacher": ("", "{model}", "{other}", "no"),
    "method.critic_path": ("", "{model}", "no"),
    "method.classmates": ("[]", "['{model}']", "['{other}']", "[policy:live]", "[no]"),
    "method.classmate_shares": ("[]", "[1]", "[0.5,0.5]", "[-1]"),
    "method.classmate_cot_start": ("[]", "['(']", "['']"),
    "method.classmate_cot_end": ("[]", "[')']", "['']"),
    "method.cot_start": ("''", "(", "1"),
    "method.cot_end": ("''", ")", "1"),
    "method.keep": ("1", "0.5", "0", "first-2-tokens", "last-2-tokens", "first-0-tokens", "no"),
    "method.reward_weights": (
        "{{}}", "{{answer:1,format:1}}", "{{answer:0}}", "{{answer:nan}}", "{{no:1}}",
    ),
    "method.loss_options": (
        "{{}}", "{{beta:0.5}}", "{{beta:nan}}", "{{no:1}}", "{{temperature_negative:1.1}}",
    ),
    "method.rejection": ("{{}}", "{{token_k1:'0.5_2.0'}}", "{{seq_mean_k1:'0.5_2'}}", "{{no:'1'}}"),
    "method.off_options": ("{{}}", "{{gamma:0.3}}", "{{max_value:2}}", "{{exponent:-1}}"),
    "method.on_options": ("{{}}", "{{gamma:0.3}}", "{{gamma:0}}", "{{gamma:inf}}", "{{weight:1}}"),
    "method.correction_bound": ("2.0", "'0.5_2.0'", "0", "'2_1'", "no"),
    "method.refill_by": ("score", "reward", "answer", "no"),
    "method.demonstration_probs": ("", "probs", "no"),
    "method.hint_template": ("{{question}} {{hint}}", "no"),
}  # fmt: skip
# More than these would only take long.
LARGEST = {
    "training.updates_per_step": 9,
    "training.ppo_epochs": 3,
    "training.problems_per_step": 9,
    "rollout.samples": 6,
    "rollout.max_response_tokens": 9,
    "training.validation_samples": 3,
    "method.max_refills": 3,
}
NEEDED = {  # settings without which a recipe's own defaults do not fit two steps of a tiny model
    "distill": ["method.teacher={model}"],
    "gkd": ["method.teacher={model}"],
    "dapo": ["method.overlong_buffer=3"],
    "verl_dapo": ["method.overlong_buffer=3", "training.updates_per_step=2"],
    "cs336_grpo": ["data.prompt_style=own"],
    "cs336_no_baseline": ["data.prompt_style=own"],
    "cs336_dpo": ["data.prompt_style=own"],
}
NO_MARKERS = ["method.cot_start=''", "method.cot_end=''"]
ONE_WARMUP_STEP = "warmup.overrides=[training.steps=1]"
VERIFIERS = """
def graded(response, problem):
    answer = sum(map(ord, response)) % 11 / 10
    return {"score": answer, "answer": answer, "format": len(response) % 3 / 2}
"""


def draw(seed: int, places: dict[str, str]) -> tuple[list[str], list[str]]:
    """Returns the recipe with the settings it needs, and the random settings of a seed."""
    random_state = random.Random(seed)
    recipes, settings = _schema()
    recipe = random_state.choice(recipes)
    places = {**places, "model": places[random_state.choice(("tiny", "tiny", "untied"))]}
    places["other"] = places[random_state.choice(("tiny", "untied"))]
    keys = [key for key in settings[recipe] if key not in FIXED]
    own_keys = [key for key in keys if key.startswith("method.")]
    drawn = {}
    for _ in range(random_state.choice((1, 2, 2, 3, 3, 4, 6, 9))):
        key = random_state.choice(random_state.choice((keys, own_keys)))
        drawn[key] = _value(key, settings[recipe][key], random_state).format(**places)
    base = [
        recipe,
        f"model.path={places['model']}",
        f"data.train={_data(recipe).format(**places)}",
        f"reward.verifier={places['graded']}:graded",
        *BASE,
        *(override.format(**places) for override in _needed(recipe)),
    ]
    return base, [f"{key}={value}" for key, value in drawn.items()]


def without_refused(drawn: list[str], line: str) -> list[str]:
    """Returns the settings without the first that the refusal names, or without the last."""
    named = [(line.find(item.partition("=")[0]), item) for item in drawn]
    found = sorted((at, item) for at, item in named if at >= 0)
    refused = found[0][1] if found else drawn[-1]
    return [item for item in drawn if item != refused]


def _needed(recipe: str) -> list[str]:
    if recipe.startswith("bupo"):
        without = ("bupo_grpo", "bupo_layerwise_lr", "bupo_frozen_below")
        return ["method.num_blocks=1", *([] if recipe in without else ["method.phase_one_steps=1"])]
    if recipe.startswith("classmate_warmup"):
        return [*NO_MARKERS, ONE_WARMUP_STEP]
    if recipe.startswith("classmate"):
        return NO_MARKERS
    if recipe.startswith("luffy_sft_rl"):
        return [ONE_WARMUP_STEP]
    return NEEDED.get(recipe, [])


def _data(recipe: str) -> str:
    """Returns the data that a recipe trains on."""
    if recipe == "kto":
        return "{labels}"
    if recipe in ("online_dpo", "gdpo", "classmate_gdpo"):
        return "arithmetic:1"
    pairs = (
        "dpo",
        "dpo_norm",
        "dpo_sft",
        "cs336_dpo",
        "ipo",
        "orpo",
        "simpo",
        "reward_model",
    )
    return "{pairs}" if recipe in pairs else "arithmetic:1"


_SCHEMA: list[Any] = []


def _schema() -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Returns the recipes, and for each its settings: key -> dataclass field."""
    if not _SCHEMA:
        from postgrad.config.compose import compose, recipe_names
        from postgrad.config.schema import Config
        from postgrad.methods import find_method

        recipes = [n for n in recipe_names() if not n.startswith("demo_")]
        shared = dict(_fields(Config, ""))
        settings = {}
        for recipe in recipes:
            config = compose(recipe, [], lambda name: find_method(name).Settings, complete=False)
            settings[recipe] = {**shared, **dict(_fields(type(config.method), "method."))}
        _SCHEMA.extend((recipes, settings))
    return _SCHEMA[0], _SCHEMA[1]


def _fields(schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(field.type):
            yield from _fields(field.type, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        elif prefix or field.name != "method":
            yield f"{prefix}{field.name}", field


def _value(key: str, field: Any, random_state: random.Random) -> str:
    """Returns a value of a setting, seldom one of another type or out of its bounds."""
    limits = field.metadata
    kinds = typing.get_args(field.type) or (field.type,)
    if random_state.random() < 0.03:
        return random_state.choice(("word", "null", "[]", "''", "-1", "1.5", "nan", "true"))
    if key in TEXTS:
        return random_state.choice(TEXTS[key])
    if limits.get("choices"):
        choices = [choice for choice in limits["choices"] if choice != "ray"]
        return str(random_state.choice(choices)) or "''"
    if type(None) in kinds and random_state.random() < 0.2:
        return "null"
    if bool in kinds:
        return random_state.choice(("true", "false"))
    if int in kinds or float in kinds:
        return _number(key, limits, int in kinds, random_state)
    return random_state.choice(("''", "word", "1"))


def _number(key: str, limits: Any, whole: bool, random_state: random.Random) -> str:
    """Returns a number at, near or between the bounds of a setting."""
    numbers: list[float] = [1, 2, 3, 4] if whole else [0.1, 0.25, 0.5, 1, 2]
    for bound in ("at_least", "above", "at_most"):
        if limits.get(bound) is not None:
            edge = limits[bound]
            numbers += [edge, edge + 1 if whole else edge + 0.01, edge - 1 if whole else edge - 0.1]
    if key in LARGEST:
        numbers.append(LARGEST[key])
    if not whole and random_state.random() < 0.1:
        return random_state.choice(("inf", "nan", "1e-30", "1e6", "1e30"))
    return f"{random_state.choice(numbers):g}"


# ---- running


def make_places(folder: Path) -> dict[str, str]:
    """Writes models, data and verifiers that the combinations use; returns their paths."""
    from postgrad.model.load.tiny import make_tiny

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(VERIFIERS)
    sums = [(a, b) for a in range(6) for b in range(6)]
    rows = {
        "pairs": [
            {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
            for a, b in sums
        ],
        "demos": [
            {
                "prompt": f"{a}+{b}=",
                "target": str(a + b),
                "ground_truth": str(a + b),
                "data_source": "arithmetic/digits",
            }
            for a, b in sums
        ],
        "labels": [
            {"prompt": f"{a}+{b}=", "completion": str(a + b), "label": bool(a % 2)} for a, b in sums
        ],
    }
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return {
        "tiny": str(make_tiny(folder / "tiny", seed=0, layers=2, width=32)),
        "untied": str(make_tiny(folder / "untied", seed=1, layers=3, width=32, tied=False)),
        "graded": str(folder / "mine.py"),
        "guess": f"{EXAMPLES / 'guess.py'}:Guess",
        **{name: str(folder / f"{name}.jsonl") for name in rows},
    }


def import_everything() -> None:
    """Imports what runs need, so that a fork starts at once."""
    import pyarrow.compute  # noqa: F401
    import torch.profiler  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import postgrad.cli.train
    import postgrad.training.display
    import postgrad.training.warmup  # noqa: F401

    with contextlib.suppress(ImportError):
        importlib.import_module("pandas")  # pyarrow imports it when it is installed
    _schema()
    gc.freeze()  # forks then copy fewer pages


def start_fork(seed: int, places: dict[str, str], folder: Path, once: bool) -> int:
    """Starts the combinations of a seed in a fork with its own process group; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    code = TRACEBACK
    try:
        os.setsid()
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        code = run_seed(seed, places, folder, once)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_seed(seed: int, places: dict[str, str], folder: Path, once: bool) -> int:
    """Tries a seed's settings, and the rest again after each refusal; returns the last code."""
    from postgrad.cli.main import run

    base, drawn = draw(seed, places)
    for attempt in range(len(drawn) + 1):
        (folder / f"{attempt}.json").write_text(json.dumps([base[0], *drawn]))
        output = os.open(f"{attempt}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            code = run(["train", *base, *drawn, f"runs={folder}/runs"])
        except BaseException:
            traceback.print_exc()
            code = TRACEBACK
        sys.stdout.flush()
        sys.stderr.flush()
        if once or code != 2 or not drawn or (folder / "runs" / "run").exists():
            break
        drawn = without_refused(drawn, (folder / f"{attempt}.txt").read_text(errors="replace"))
    return code


@dataclasses.dataclass
class Tried:
    """One combination: what happened, and why that is wrong; the reason is empty if it is right."""

    seed: int
    arguments: list[str]
    outcome: str
    reason: str
    text: str

    def described(self) -> str:
        head = f"seed {self.seed}: {self.outcome}: postgrad train {' '.join(self.arguments)}"
        return f"{head}\n    {self.reason}\n    {self.text[-3000 if self.reason else -300 :]}"


def combinations_of(seed: int, code: int, folder: Path) -> list[Tried]:
    """Returns the combinations of a seed that a fork has tried."""
    numbers = sorted(int(path.stem) for path in folder.glob("*.json"))
    tried = []
    for number in numbers:
        arguments = json.loads((folder / f"{number}.json").read_text())
        file = folder / f"{number}.txt"
        text = file.read_text(errors="replace").strip() if file.exists() else ""
        last_code = code if number == numbers[-1] else 2
        outcome, reason = verdict(last_code, text, folder, parts_are_known(arguments))
        if outcome == REFUSED and len(arguments) == 1:
            reason = "the recipe alone is refused"
        tried.append(Tried(seed, arguments, outcome, reason, text))
    return tried


def parts_are_known(arguments: list[str]) -> bool:
    """Returns whether the reward is a built-in verifier's, whose parts are known before a run."""
    chosen = [item for item in arguments if item.startswith("reward.verifier=")]
    own = not chosen or ":" in chosen[-1] or "llm_judge" in chosen[-1]
    return not own and not any(item.startswith("environment.") for item in arguments)


def verdict(code: int, text: str, folder: Path, parts_known: bool) -> tuple[str, str]:
    """Returns (what happened, why it is wrong); the reason is empty if it is right."""
    lines = [line for line in text.splitlines() if line.startswith("postgrad: ")]
    if code < 0:
        limits = f"limits: {CPU_LIMIT_S} s of CPU, {TIME_LIMIT_S} s"
        return "killed", f"ended by {signal.Signals(-code).name}; {limits}"
    if code == TRACEBACK or "Traceback (most recent call last)" in text:
        return "traceback", "a traceback"
    if code == 2:
        return REFUSED, "" if len(lines) == 1 else "the refusal is not one line"
    if code == 0:
        file = folder / "runs" / "run" / "metrics.jsonl"
        steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
        reached = "reached training.stop_at" in text
        return TRAINED, "" if reached or max(steps, default=0) == 2 else "not two steps"
    if len(lines) == 1 and "no learning signal" in lines[0]:
        return "stopped by training.max_flat_steps", ""
    if len(lines) == 1 and "reports no such part" in lines[0] and not parts_known:
        return "stopped at a part that the user's verifier does not report", ""
    return f"exit code {code}", "neither trained nor refused"


def run_all(
    seeds: list[int], jobs: int, work: Path, verbose: bool = False, once: bool = False
) -> list[Tried]:
    """Runs the combinations of all seeds, `jobs` seeds at a time; prints those that are wrong."""
    places = make_places(work / "places")
    os.environ["POSTGRAD_CACHE"] = str(work / "cache")
    import_everything()
    results: list[Tried] = []
    running: dict[int, tuple[int, float]] = {}
    waiting = list(reversed(seeds))
    while waiting or running:
        while waiting and len(running) < jobs:
            seed = waiting.pop()
            folder = work / f"seed-{seed}"
            folder.mkdir()
            running[start_fork(seed, places, folder, once)] = (seed, time.monotonic())
        time.sleep(0.01)
        for pid, (seed, started) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                if time.monotonic() - started > TIME_LIMIT_S:
                    os.killpg(pid, signal.SIGKILL)
                continue
            del running[pid]
            folder = work / f"seed-{seed}"
            for tried in combinations_of(seed, os.waitstatus_to_exitcode(status), folder):
                results.append(tried)
                if tried.reason or verbose:
                    print(tried.described(), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    gc.unfreeze()
    return results


def summary(results: list[Tried]) -> str:
    counts = Counter(tried.outcome for tried in results)
    wrong = sorted({tried.seed for tried in results if tried.reason})
    parts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{len(results)} combinations tried: {parts}; {len(wrong)} wrong; seeds {wrong}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="seeds; each has 1 to 10 trials")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="repeat this seed")
    parser.add_argument("--once", action="store_true", help="no second trial after a refusal")
    parser.add_argument("--verbose", action="store_true", help="print every combination")
    options = parser.parse_args()
    seeds = list(range(options.seed, options.seed + options.count))
    if options.only is not None:
        seeds = [options.only]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="random-settings-") as folder:
        verbose = options.verbose or len(seeds) == 1
        results = run_all(seeds, options.jobs, Path(folder), verbose, options.once)
    print(f"seeds {seeds[0]} to {seeds[-1]}, {time.monotonic() - started:.0f} s")
    print(summary(results))
    return 1 if any(tried.reason for tried in results) else 0


if __name__ == "__main__":
    sys.exit(main())

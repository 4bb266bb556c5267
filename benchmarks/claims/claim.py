"""What a claim is: its arms, its data, its table; and the settings that all its runs have."""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from claims.runs import Run

HERE = Path(__file__).resolve().parent
# First word of an arm that another trainer runs, and its script; other arms name a recipe.
TRL = "trl"
VERL = "verl"
SCRIPTS = {TRL: "trl_grpo.py", VERL: "verl_grpo.py"}
Arms = dict[str, list[str]]


@dataclass(frozen=True)
class Column:
    """A column of a claim's table: a metric of each run, at its first or over its last lines.

    Attributes:
        heading: of the column.
        key: name of the metric.
        first: the first `count` lines with the metric; otherwise the last ones after step 0.
        count: number of lines that are averaged.
        where: a metric and the value that it must have in a line.
        alone: only of runs that no other run shared the GPU with.
        within_s: only of lines within these seconds of the run, validations not counted.
        is_share: the metric is the share of right test problems, one greedy response each, so that
            a single seed has a Wilson interval.
    """

    heading: str
    key: str
    first: bool = False
    count: int = 1
    where: tuple[str, float] | None = None
    alone: bool = False
    within_s: float = math.inf
    is_share: bool = False


@dataclass(frozen=True, kw_only=True)
class Report:
    """A question, and the table and the figure that show what runs answered.

    Attributes:
        columns: of the table.
        curves: metrics of the figure, each over the steps.
        axis: also draw the first curve over this metric, such as train_s, of runs that had the
            GPU alone.
    """

    question: str
    columns: Sequence[Column]
    curves: Sequence[str]
    axis: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim(Report):
    """A report, and the runs that look for its answer.

    Attributes:
        arms: returns, by name, a recipe and its settings.
        prepare: writes the data, and what the arms need to know.
        sizes: default values of options, such as steps and jobs.
        validates: whether the runs have validations; then the last one ends a run.
        seconds: ends a run, too.
    """

    arms: Callable[[argparse.Namespace], Arms]
    prepare: Callable[[argparse.Namespace], None]
    sizes: dict[str, object]
    validates: bool = True
    seconds: float = math.inf


def common(options: argparse.Namespace, label: str, seed: int) -> list[str]:
    """Return the settings of every run; what bounds its memory changes no result."""
    settings = [
        f"model.path={options.model}",
        f"seed={seed}",
        f"runs={options.out / 'runs'}",
        f"name={label}",
        f"training.steps={options.steps}",
        "training.checkpoint_every=100000",
        "training.max_flat_steps=100000",
        "data.overlong=drop",
        "model.threads=1",
    ]
    if not options.smoke:
        settings += [
            "optimizer.kind=adamw_fused",
            f"rollout.cache_gib={options.cache_gib}",
            f"training.token_budget={options.token_budget}",
        ]
    return settings


def smoke_settings(recipe: str, own: Sequence[str]) -> list[str]:
    """Return the settings of a run of a tiny model, one token per character, on a CPU.

    Rewards differ between random responses, so that the runs update and record all metrics.
    """
    settings = [
        "model.device=cpu",
        "model.dtype=float32",
        "training.problems_per_step=4",
        "data.max_prompt_tokens=2048",
        "rollout.max_response_tokens=120",
    ]
    if recipe == "sft":
        return settings
    if not any(word.startswith("environment=") for word in own):
        settings.append(f"reward.verifier={HERE / 'rewards.py'}:share_of_digits")
    return [*settings, "rollout.samples=4"]


def validation(options: argparse.Namespace, parts: int, samples: int = 0) -> list[str]:
    """Return the settings of a validation before a run and after each of its `parts`.

    One greedy response per test problem, or `samples` responses at temperature 1.
    """
    settings = [
        f"data.validation={options.out / 'test.jsonl'}",
        f"training.validation_problems={options.test_problems}",
        f"training.validate_every={steps_per_part(options, parts)}",
    ]
    if samples:
        return [
            *settings,
            "training.validation_temperature=1",
            f"training.validation_samples={samples}",
        ]
    return [*settings, "training.validation_temperature=0"]


def steps_per_part(options: argparse.Namespace, parts: int) -> int:
    """Return a number of steps that divides a run into at most `parts` parts."""
    return math.ceil(options.steps / parts)


def sampling(options: argparse.Namespace) -> list[str]:
    """Return the sizes of a step of RL."""
    return [
        f"training.problems_per_step={options.problems}",
        f"rollout.samples={options.samples}",
        f"rollout.max_response_tokens={options.tokens}",
        f"optimizer.lr={options.lr}",
    ]


def lora(options: argparse.Namespace) -> list[str]:
    """Return the settings of LoRA adapters, or none with --lora-rank 0."""
    if not options.lora_rank:
        return []
    return [f"model.lora.rank={options.lora_rank}", f"model.lora.alpha={2 * options.lora_rank}"]


def label_of(claim: str, arm: str, seed: int) -> str:
    return f"{claim}-{re.sub('[^a-z0-9]+', '-', arm.lower()).strip('-')}-{seed}"


def make_runs(name: str, claim: Claim, options: argparse.Namespace) -> list[Run]:
    """Return the runs of all arms and seeds; those of one seed are neighbors."""
    arms = claim.arms(options)
    unknown = set(options.only) - set(arms)
    if unknown:
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: the arms are {', '.join(arms)}")
    runs: list[Run] = []
    for seed in options.seeds:
        for arm, (recipe, *settings) in arms.items():
            if options.only and arm not in options.only:
                continue
            label = label_of(name, arm, seed)
            if recipe in SCRIPTS:
                arguments = [
                    *settings,
                    f"--model={options.model}",
                    f"--seed={seed}",
                    f"--folder={options.out / 'runs' / label}",
                ]
                script = str(HERE / SCRIPTS[recipe])
            else:
                smoke = smoke_settings(recipe, settings) if options.smoke else []
                own = common(options, label, seed)
                arguments = ["train", recipe, *own, *settings, *smoke, *options.overrides]
                script = ""
            run = Run(arm, seed, label, arguments, options.steps, claim.validates, script)
            runs.append(replace(run, seconds=claim.seconds))
    return runs

"""Claim 3: BuPO at the depth that the entropy analysis names, at other depths, and GRPO.

`postgrad analyze entropy` measures the model first (OUT/entropy: figures and entropy.json). Its
boundary layer is the chosen depth, or the last layer but one if even the last FFN raises the
entropy (the authors' depth for Llama). Accuracy is avg@k and pass@k over k responses at temperature
1, k being `--validation-samples`.
"""

import argparse
import json
import subprocess
import sys

from claims.claim import Arms, Claim, Column, sampling, validation
from claims.problems import write_task

MIN_DISTANCE = 3  # blocks between the chosen depth and a wrong one


def prepare(options: argparse.Namespace) -> None:
    write_task(options)
    report = options.out / "entropy" / "entropy.json"
    if options.depths or report.is_file():
        return
    num_rows = 8 if options.smoke else 64
    answers = options.out / "answers"
    sampled = [
        f"data={options.out / 'test.jsonl'}",
        f"limit={num_rows}",
        "temperature=1",
        f"max_response_tokens={24 if options.smoke else options.tokens}",
        f"out={answers}",
    ]
    run_postgrad("eval", str(options.model), *sampled)
    read = [f"data={answers}", f"rows={num_rows}", f"out={report.parent}"]
    run_postgrad("analyze", "entropy", str(options.model), *read)


def run_postgrad(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "postgrad.cli.main", *words], check=True)


def depths(options: argparse.Namespace) -> list[int]:
    """Return the chosen depth, then two wrong ones; --depths replaces them."""
    if options.depths:
        return options.depths
    report = json.loads((options.out / "entropy" / "entropy.json").read_text())
    return choose_depths(report["boundary_layer"], report["num_layers"])


def choose_depths(boundary: int | None, num_layers: int) -> list[int]:
    """Return the boundary layer and two depths that are far from it.

    Without a boundary layer the chosen depth is that of the paper for Qwen3: a sixth of the blocks.
    """
    from postgrad.analysis.entropy import internal_depth

    chosen = internal_depth(boundary or max(1, round(num_layers / 6)), num_layers)
    others = [max(1, num_layers // 6), num_layers // 2, num_layers - 3]
    wrong = [depth for depth in others if abs(depth - chosen) >= MIN_DISTANCE and depth > 0]
    return [chosen, *wrong[-2:]]


def arms(options: argparse.Namespace) -> Arms:
    phase_one = max(1, options.steps // 5)
    shared = [
        f"data.train={options.out / 'train.jsonl'}",
        *validation(options, parts=2, samples=options.validation_samples),
        *sampling(options),
    ]
    chosen, *wrong = depths(options)
    bupo = ["bupo_small", *shared, f"method.phase_one_steps={phase_one}"]
    runs = {
        "GRPO": [
            "bupo_small",
            *shared,
            "method.phase_one_steps=0",
            f"method.num_blocks={chosen}",  # not read, but must be a depth of the model
        ],
        f"BuPO, {chosen} blocks (chosen)": [*bupo, f"method.num_blocks={chosen}"],
    }
    for depth in wrong:
        runs[f"BuPO, {depth} blocks"] = [*bupo, f"method.num_blocks={depth}"]
    return runs


CLAIM = Claim(
    question="Does phase one help, and only at the depth that the entropy analysis names?",
    arms=arms,
    prepare=prepare,
    columns=(
        Column("avg@k before", "validation/accuracy", first=True),
        Column("avg@k after", "validation/accuracy"),
        Column("pass@k before", "validation/best@", first=True),
        Column("pass@k after", "validation/best@"),
        Column("update in phase one, s", "stage/update_s", count=3, where=("phase", 1)),
        Column("update in phase two, s", "stage/update_s", count=3, where=("phase", 2)),
    ),
    curves=("reward/mean", "validation/accuracy", "entropy", "stage/update_s"),
    sizes={
        "steps": 30,
        "jobs": 3,
        "lr": 2e-6,
        "problems": 32,
        "samples": 8,
        "tokens": 256,
        "validation_samples": 8,
        "test_problems": 128,
    },
)

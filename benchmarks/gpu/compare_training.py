"""A GRPO step, and learning to add, with Postgrad and TRL. compare.py calls each in a process."""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compare_common import HERE, INSTRUCTION, length_reward, report, sums

LEARNED = 0.8  # share of right sums
NUM_STEPS = 5  # whose mean is compared with it


def has_learned(accuracies: list[float]) -> bool:
    """Return whether the last steps got LEARNED of the sums right."""
    recent = accuracies[-NUM_STEPS:]
    return len(recent) == NUM_STEPS and statistics.mean(recent) >= LEARNED


def gsm8k_prompts(file: str) -> list[list[dict[str, str]]]:
    """Return the first 2000 questions as conversations."""
    questions = [json.loads(line)["question"] for line in Path(file).read_text().splitlines()]
    return [[{"role": "user", "content": q + INSTRUCTION}] for q in questions[:2000]]


# ---- TRL


def trl_run(folder: str, gsm8k: str, learn: bool) -> None:
    """Run TRL with transformers.generate: seconds per step, or until 80% of sums are right."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    run_start = time.time()
    step_seconds: list[float] = []
    accuracies: list[float] = []

    class Timer(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            torch.cuda.synchronize()
            self.start = time.time()

        def on_step_end(self, args, state, control, **kwargs):
            torch.cuda.synchronize()
            step_seconds.append(time.time() - self.start)
            if learn and has_learned(accuracies):
                control.should_training_stop = True

    def right(completions, truth, **kwargs):
        values = boxed_sum_rewards(completions, truth)
        accuracies.append(statistics.mean(float(v >= 1) for v in values))
        return values

    def by_length(completions, **kwargs):
        return [length_reward(c[0]["content"], None) for c in completions]

    rows = sums() if learn else [{"prompt": prompt} for prompt in gsm8k_prompts(gsm8k)]
    dtype = torch.float32 if learn else torch.bfloat16
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=[right if learn else by_length],
        args=GRPOConfig(**trl_settings(learn)),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Timer()],
    ).train()
    if learn:
        seconds = time.time() - run_start
        num_steps = len(step_seconds)
        report("trl", work="learn", seconds=seconds, steps=num_steps, right=accuracies[-1])
    else:
        peak = torch.cuda.max_memory_allocated() / 2**30
        report("trl", work="step", seconds=statistics.median(step_seconds[1:]), peak_gib=peak)


def boxed_sum_rewards(completions: list[Any], truth: list[str]) -> list[float]:
    """Return 1 for the right sum in the last box, and 0.1 for any box."""
    values = []
    for completion, answer in zip(completions, truth, strict=True):
        boxes = re.findall(r"boxed\{([^}]*)\}", completion[0]["content"])
        boxed = boxes[-1].strip() if boxes else ""
        values.append(float(boxed == answer) + 0.1 * bool(boxed))
    return values


def trl_settings(learn: bool) -> dict[str, Any]:
    """Return the arguments of GRPOConfig."""
    common = {
        "output_dir": tempfile.mkdtemp(),
        "temperature": 1.0,
        "bf16": True,
        "report_to": "none",
        "beta": 0.0,
        "save_strategy": "no",
        "num_generations": 16,
        "gradient_checkpointing": False,
    }
    if learn:
        return common | {
            "per_device_train_batch_size": 256,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 64,
            "max_steps": 90,
            "learning_rate": 2e-5,
            "lr_scheduler_type": "constant",
        }
    return common | {
        "per_device_train_batch_size": 64,
        "gradient_accumulation_steps": 16,
        "max_completion_length": 256,
        "max_steps": 3,
        "learning_rate": 1e-6,
    }


# ---- Postgrad


def train_postgrad(folder: str, gsm8k: str, learn: bool, more: list[str]) -> None:
    """Run `postgrad train` as trl_run runs TRL; `more` are further key=value overrides."""
    runs = tempfile.mkdtemp()
    data = Path(runs) / "questions.jsonl"
    overrides = write_sums(data) if learn else write_gsm8k(data, gsm8k)
    start = time.time()
    command = [sys.executable, "-m", "postgrad.cli.main", "train", "grpo", f"model.path={folder}"]
    command += [f"data.train={data}", "rollout.samples=16", *overrides, *more]
    command += [f"runs={runs}", "name=run"]
    command += ["optimizer.kind=adamw_fused", "training.checkpoint_every=1000"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    file = Path(runs) / "run" / "metrics.jsonl"
    while child.poll() is None:
        time.sleep(0.2)
        accuracies = [line["reward/right"] for line in read_lines(file) if "reward/right" in line]
        if learn and has_learned(accuracies):
            report_learning(start, accuracies)
            child.terminate()
            child.wait()
            return
    lines = read_lines(file)
    if learn:
        report_learning(start, [line.get("reward/right", 0.0) for line in lines])
    else:
        report_steps([line for line in lines if "step_s" in line][2:])


def write_sums(data: Path) -> list[str]:
    """Write the sums to the file; return the settings of the run that learns them."""
    write_rows(data, "sums", [(row["prompt"], row["truth"]) for row in sums()])
    return [
        f"reward.verifier={HERE.parent / 'claims' / 'rewards.py'}:boxed_sum",
        "training.problems_per_step=32",
        "rollout.max_response_tokens=64",
        "optimizer.lr=2e-5",
        "optimizer.weight_decay=0",
        "training.steps=90",
    ]


def write_gsm8k(data: Path, gsm8k: str) -> list[str]:
    """Write questions to the file; return the settings of the run whose steps are timed."""
    write_rows(data, "gsm8k", [(prompt, "0") for prompt in gsm8k_prompts(gsm8k)])
    return [
        f"reward.verifier={HERE / 'compare_common.py'}:length_reward",
        "training.problems_per_step=64",
        "rollout.max_response_tokens=256",
        "optimizer.lr=1e-6",
        "training.steps=6",
    ]


def write_rows(data: Path, source: str, rows: list[tuple[Any, str]]) -> None:
    """Write (prompt, ground truth) pairs as problems."""
    with data.open("w") as file:
        for prompt, truth in rows:
            row = {"prompt": prompt, "reward_model": {"ground_truth": truth}}
            file.write(json.dumps({**row, "data_source": source}) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    written = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in written if line.endswith("}")]


def report_learning(start: float, accuracies: list[float]) -> None:
    seconds = time.time() - start
    num_steps = len(accuracies)
    report("postgrad", work="learn", seconds=seconds, steps=num_steps, right=accuracies[-1])


def report_steps(lines: list[dict[str, Any]]) -> None:
    """Report the medians of the steps."""
    stages = {
        name: round(statistics.median(line[name] for line in lines), 3)
        for name in lines[0]
        if name.startswith("stage/")
    }
    report(
        "postgrad",
        work="step",
        seconds=statistics.median(line["step_s"] for line in lines),
        peak_gib=max(line["memory_gib"] for line in lines),
        gap_max=max(line.get("engine/gap_max", 0.0) for line in lines),
        stages=json.dumps(stages),
    )

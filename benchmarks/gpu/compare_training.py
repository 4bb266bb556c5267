"""A GRPO step, and learning to add, with Postgrad and TRL. compare.py calls each in a process."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compare_common import HERE, INSTRUCTION, length_reward, report, sums


def trl_run(folder: str, gsm8k: str, learn: bool) -> None:
    """Run TRL with transformers.generate: seconds per step, or until 80% of sums are right."""
    import re

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    run_start = time.time()
    state = {"start": 0.0, "steps": [], "right": []}

    class Timer(TrainerCallback):
        def on_step_begin(self, args, state_, control, **kwargs):
            torch.cuda.synchronize()
            state["start"] = time.time()

        def on_step_end(self, args, state_, control, **kwargs):
            torch.cuda.synchronize()
            state["steps"].append(time.time() - state["start"])
            if learn and len(state["right"]) >= 5 and statistics.mean(state["right"][-5:]) >= 0.8:
                control.should_training_stop = True

    def right(completions, truth, **kwargs):
        values = []
        for completion, answer in zip(completions, truth, strict=True):
            boxes = re.findall(r"boxed\{([^}]*)\}", completion[0]["content"])
            boxed = boxes[-1].strip() if boxes else ""
            values.append(float(boxed == answer) + 0.1 * bool(boxed))
        state["right"].append(statistics.mean(float(v >= 1) for v in values))
        return values

    def by_length(completions, **kwargs):
        return [length_reward(c[0]["content"], None) for c in completions]

    common = {
        "output_dir": tempfile.mkdtemp(),
        "temperature": 1.0,
        "bf16": True,
        "report_to": "none",
        "beta": 0.0,
        "save_strategy": "no",
    }
    if learn:
        rows = sums()
        config = GRPOConfig(
            **common,
            per_device_train_batch_size=256,
            gradient_accumulation_steps=2,
            num_generations=16,
            max_completion_length=64,
            max_steps=90,
            learning_rate=2e-5,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
        )
    else:
        lines = Path(gsm8k).read_text().splitlines()[:2000]
        questions = [json.loads(line)["question"] for line in lines]
        rows = [{"prompt": [{"role": "user", "content": q + INSTRUCTION}]} for q in questions]
        config = GRPOConfig(
            **common,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=16,
            num_generations=16,
            max_completion_length=256,
            max_steps=3,
            learning_rate=1e-6,
            gradient_checkpointing=False,
        )
    dtype = torch.float32 if learn else torch.bfloat16
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        reward_funcs=[right if learn else by_length],
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Timer()],
    ).train()
    peak = torch.cuda.max_memory_allocated() / 2**30
    if learn:
        report(
            "trl",
            work="learn",
            seconds=time.time() - run_start,
            steps=len(state["steps"]),
            right=state["right"][-1],
        )
    else:
        report("trl", work="step", seconds=statistics.median(state["steps"][1:]), peak_gib=peak)


def train_postgrad(folder: str, gsm8k: str, learn: bool, more: list[str]) -> None:
    """Run `postgrad train` as trl_run runs TRL; `more` are further key=value overrides."""
    runs = tempfile.mkdtemp()
    data = Path(runs) / "questions.jsonl"
    if learn:
        rows = [
            {"prompt": row["prompt"], "reward_model": {"ground_truth": row["truth"]}}
            for row in sums()
        ]
        data.write_text("".join(json.dumps({**row, "data_source": "sums"}) + "\n" for row in rows))
        overrides = [
            f"data.train={data}",
            f"reward.verifier={HERE.parent / 'claims' / 'rewards.py'}:boxed_sum",
            "rollout.samples=16",
            "training.problems_per_step=32",
            "rollout.max_response_tokens=64",
            "optimizer.lr=2e-5",
            "optimizer.weight_decay=0",
            "training.steps=90",
        ]
    else:
        lines = [json.loads(line) for line in Path(gsm8k).read_text().splitlines()][:2000]
        rows = [
            {
                "prompt": [{"role": "user", "content": line["question"] + INSTRUCTION}],
                "reward_model": {"ground_truth": "0"},
            }
            for line in lines
        ]
        data.write_text("".join(json.dumps({**row, "data_source": "gsm8k"}) + "\n" for row in rows))
        overrides = [
            f"data.train={data}",
            f"reward.verifier={HERE / 'compare_common.py'}:length_reward",
            "rollout.samples=16",
            "training.problems_per_step=64",
            "rollout.max_response_tokens=256",
            "optimizer.lr=1e-6",
            "training.steps=6",
        ]
    run_start = time.time()
    command = [
        sys.executable,
        "-m",
        "postgrad.cli.main",
        "train",
        "grpo",
        f"model.path={folder}",
        *overrides,
        *more,
        f"runs={runs}",
        "name=run",
    ]
    child = subprocess.Popen(
        [*command, "optimizer.kind=adamw_fused", "training.checkpoint_every=1000"],
        stdout=subprocess.DEVNULL,
    )
    file = Path(runs) / "run" / "metrics.jsonl"
    while child.poll() is None:
        time.sleep(0.2)
        written = file.read_text().splitlines() if file.exists() else []
        lines = [json.loads(line) for line in written if line.endswith("}")]
        accuracies = [line["reward/right"] for line in lines if "reward/right" in line]
        if learn and len(accuracies) >= 5 and statistics.mean(accuracies[-5:]) >= 0.8:
            report(
                "postgrad",
                work="learn",
                seconds=time.time() - run_start,
                steps=len(accuracies),
                right=accuracies[-1],
            )
            child.terminate()
            child.wait()
            return
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if learn:
        report(
            "postgrad",
            work="learn",
            seconds=time.time() - run_start,
            steps=len(lines),
            right=lines[-1].get("reward/right", 0.0),
        )
        return
    lines = [line for line in lines if "step_s" in line][2:]
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

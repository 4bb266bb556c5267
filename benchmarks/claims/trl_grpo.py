"""GRPO by TRL on the problems of a JSONL file, with Postgrad's verifier as reward function.

research.py starts it: `trl_grpo.py --model MODEL --train FILE --test FILE --folder RUN ...`.
RUN/metrics.jsonl gets a line per step with the names of Postgrad's metrics, and one per validation,
by `postgrad eval`: one greedy response per test problem, in bfloat16. TRL's settings are those of
Postgrad's recipe grpo: token mean over the batch, no KL, ratio clip 0.2, group's standard
deviation, fused AdamW, constant learning rate; its weights are float32 with bfloat16 passes
(Postgrad's: bfloat16 with float32 copies in the optimizer).
`--engine vllm` samples with vLLM in TRL's process; its log-probs are corrected as TRL does by
default, or not with `--no-correction`. vLLM's KV cache has a fixed size, because vLLM would count
the memory of other runs on the GPU as its own. It does not sleep while TRL trains (TRL's default):
its check of the freed memory fails when another run takes some at that moment.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[reportMissingImports]

from claims.peer import Metrics, parse_options
from claims.runs import STARTED
from postgrad.data.problems import load_problems
from postgrad.problem import Problem, Score
from postgrad.verifiers.scorer import Scorer

MAX_ROWS_PER_PASS = 16
VALIDATION_CACHE_GIB = 8
FREE_SHARE = 0.05  # of the GPU's memory that must be free when vLLM starts


def scores(scorer: Scorer, problems: list[Problem], responses: list[str]) -> list[float]:
    verdicts = scorer.score(problems, responses)
    return [one.value if isinstance(one, Score) else 0.0 for one in verdicts]


class Validation:
    """An evaluation of a model folder by `postgrad eval`, in a process of its own.

    It begins at once, so that the one of the first model runs while TRL and vLLM start.
    """

    def __init__(self, model: str, options: argparse.Namespace, name: str) -> None:
        self.folder = Path(options.folder) / name
        device = ["device=cpu", "dtype=float32"] if options.smoke else ["dtype=bfloat16"]
        arguments = [
            *("eval", model, f"data={options.test}", f"out={self.folder}"),
            *(f"limit={options.test_problems}", f"max_response_tokens={options.tokens}"),
            *("temperature=0", "overlong=drop", f"cache_gib={VALIDATION_CACHE_GIB}"),
            *device,
        ]
        # TRL's process is rank 0 of a group; the evaluation is in none.
        hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        command = [sys.executable, "-m", "postgrad.cli.main", *arguments]
        self.process = subprocess.Popen(command, env=environment)

    def accuracy(self) -> float:
        """Wait for the end; return the mean score over the test problems."""
        if code := self.process.wait():
            raise RuntimeError(f"the validation ended with exit code {code}")
        (one,) = json.loads((self.folder / "summary.json").read_text())["sets"].values()
        return one["score"]


class Report(TrainerCallback):
    """Writes the metrics of each step, and validations before, during and after the run."""

    def __init__(self, options: argparse.Namespace, tokenizer: Any) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.first_validation = (
            None if options.marks else Validation(options.model, options, "eval-0")
        )
        self.metrics = Metrics(Path(options.folder))
        self.start = 0.0
        self.step_s = 0.0
        self.clock_s = 0.0  # since the process was started, without validations

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if self.first_validation:
            self.metrics.write(0, **{"validation/accuracy": self.first_validation.accuracy()})
        self.clock_s = time.time() - float(os.environ[STARTED])

    def on_step_begin(self, args, state, control, **kwargs):
        synchronize()
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        synchronize()
        self.step_s = time.perf_counter() - self.start
        self.clock_s += self.step_s

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if not logs or "reward" not in logs:
            return
        step = state.global_step
        values = {
            "reward/mean": logs["reward"],
            "response/length": logs["completions/mean_length"],
            "response/truncated": logs["completions/clipped_ratio"],
            "grad_norm": logs.get("grad_norm", 0.0),
            "step_s": self.step_s,
        }
        if "entropy" in logs:
            values["entropy"] = logs["entropy"]
        if torch.cuda.is_available():
            values["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.metrics.write(step, **values)
        if self.is_due(step):
            self.metrics.write(step, **{"validation/accuracy": self.validate(model, step)})

    def is_due(self, step: int) -> bool:
        """Return whether to validate now: every few steps, or before a step that passes a mark."""
        marks = self.options.marks
        if not marks:
            return step % self.options.validate_every == 0 or step == self.options.steps
        self.options.marks = [one for one in marks if one >= self.clock_s + self.step_s]
        # A mark never passes: the launcher ends the run at the last one.
        return len(self.options.marks) < len(marks)

    def validate(self, model: Any, step: int) -> float:
        folder = Path(self.options.folder) / "model"
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        accuracy = Validation(str(folder), self.options, f"eval-{step}").accuracy()
        shutil.rmtree(folder)
        return accuracy


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of GRPOConfig that choose what samples."""
    if options.engine == "transformers":
        return {}
    with socket.socket() as one:  # runs that share a machine would all take port 29500
        one.bind(("localhost", 0))
        os.environ.setdefault("MASTER_PORT", str(one.getsockname()[1]))
    from trl.generation import vllm_generation  # type: ignore[reportMissingImports]

    cache = round(options.cache_gib * 2**30)
    vllm_generation.LLM = partial(vllm_generation.LLM, kv_cache_memory_bytes=cache)
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": FREE_SHARE,
        "vllm_max_model_length": options.prompt_tokens + options.tokens,
        "vllm_importance_sampling_correction": not options.no_correction,
    }


def divide_update(rows: int, tokens: int, budget: int) -> int:
    """Return how many rows a pass has: as many as fit, so that all passes are equal.

    The budget bounds memory and does not change the gradient.
    """
    most = max(1, min(MAX_ROWS_PER_PASS, budget // tokens))
    return max(number for number in range(1, most + 1) if rows % number == 0)


def main() -> None:
    options = parse_options(__doc__)
    problems = load_problems(options.train)
    by_uid = {problem.uid: problem for problem in problems}
    scorer = Scorer("auto")
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    rows = options.problems * options.samples
    rows_per_pass = divide_update(rows, options.tokens, options.token_budget)
    on_gpu = torch.cuda.is_available()
    report = Report(options, tokenizer)

    def reward(completions, uid, **kwargs):
        responses = [completion[0]["content"] for completion in completions]
        return scores(scorer, [by_uid[one] for one in uid], responses)

    config = GRPOConfig(
        output_dir=str(Path(options.folder) / "trl"),
        per_device_train_batch_size=rows_per_pass,
        gradient_accumulation_steps=rows // rows_per_pass,
        num_generations=options.samples,
        max_completion_length=options.tokens,
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        seed=options.seed,
        **engine_settings(options),
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": list(one.messages), "uid": one.uid} for one in problems]
        ),
        callbacks=[report],
    )
    trainer.train()
    scorer.close()


if __name__ == "__main__":
    main()

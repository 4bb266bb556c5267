"""Test helpers: configurations of the tiny model, random batches, stock models as reference."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import preloaded
import torch
from torch import Tensor

from postgrad import files
from postgrad.config.compose import compose
from postgrad.config.schema import Config
from postgrad.methods import find_method
from postgrad.training.log import RunLog, is_timing
from postgrad.training.report import Reporter
from postgrad.types import Batch, Trajectory

EXAMPLES = Path(__file__).parents[1] / "examples"
CURRICULUM = f"method={EXAMPLES / 'curriculum.py'}:Curriculum"
SELF_DISTILL = (  # with the recipe distill
    f"method={EXAMPLES / 'self_distill.py'}:SelfDistill",
    "method.divergence=reverse",
    "method.teacher=''",
)
GUESS = f"environment={EXAMPLES / 'guess.py'}:Guess"
NUM_TOKENS = 18  # of the tiny tokenizer; the last is the end
END = 17


def overrides_of(model: Path, *overrides: str) -> list[str]:
    """Returns overrides of a small run on one CPU thread, followed by `overrides`."""
    base = [
        "model.device=cpu",
        "model.dtype=float32",
        "model.threads=1",
        "data.train=arithmetic:1",
        "data.template=plain",
        "name=test",
    ]
    return [f"model.path={model}", *base, *overrides]


def toy_run(
    steps: int = 2, problems: int = 4, samples: int = 4, response_tokens: int = 4
) -> tuple[str, ...]:
    """Settings of a run of a few steps: small groups, short responses, one verifier process."""
    return (
        f"training.steps={steps}",
        f"training.problems_per_step={problems}",
        f"rollout.samples={samples}",
        f"rollout.max_response_tokens={response_tokens}",
        "reward.workers=1",
    )


def config_of(recipe: str, model: Path, *overrides: str) -> Config:
    return compose(recipe, overrides_of(model, *overrides), lambda name: find_method(name).Settings)


def random_batch(
    seed: int, groups: int = 4, samples: int = 3, longest_prompt: int = 6, longest: int = 7
) -> Batch:
    """Returns groups of rows with equal prompts: ragged, with partial loss masks, some zero
    advantages, and old log-probs near those of a new model."""
    draw = random.Random(seed)
    rows: list[Trajectory] = []
    for group in range(groups):
        prompt = [draw.randrange(NUM_TOKENS) for _ in range(draw.randint(1, longest_prompt))]
        for index in range(draw.randint(1, samples)):
            length = draw.randint(1, longest)
            response = [draw.randrange(NUM_TOKENS) for _ in range(length)]
            advantage = draw.choice([0.0, draw.uniform(-2, 2), draw.uniform(-2, 2)])
            columns = {
                "advantages": [
                    advantage + draw.uniform(-0.1, 0.1) * (advantage != 0) for _ in range(length)
                ],
                "old_logprobs": [draw.uniform(-3.2, -2.6) for _ in range(length)],
            }
            mask = [draw.random() < 0.8 for _ in range(length)]
            rows.append(
                Trajectory(
                    f"p{group}", prompt, response, group, index, loss_mask=mask, tokens=columns
                )
            )
    return Batch.of(rows)


def stock_model(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Returns the model as transformers loads it, with eager attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def stock_row(
    model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Returns (tokens,) log-probs and entropy of one response from the stock model's logits.

    One row at a time: the slow reference.
    """
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[
        :, 0
    ], distribution.entropy()


def rows_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    return [
        (p.tolist(), r.tolist())
        for p, r in zip(batch.prompt.split(), batch.response.split(), strict=True)
    ]


def stock_outputs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns (tokens,) log-probs and entropy of all rows, computed row by row."""
    pairs = [stock_row(model, prompt, response, temperature) for prompt, response in rows_of(batch)]
    return torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs])


def same_completions(one: Any, other: Any, tolerance: float = 1e-4) -> bool:
    """Returns whether two engines gave equal tokens, and log-probs within the tolerance."""
    flat = [[c for group in done for c in group] for done in (one, other)]
    return (
        [len(group) for group in one] == [len(group) for group in other]
        and [(c.tokens, c.finish) for c in flat[0]] == [(c.tokens, c.finish) for c in flat[1]]
        and all(
            abs(p - q) <= tolerance
            for c, d in zip(*flat, strict=True)
            for p, q in zip(c.logprobs, d.logprobs, strict=True)
        )
    )


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def metrics_without_timing(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what measures time or memory."""
    return [
        {name: value for name, value in line.items() if not is_timing(name)}
        for line in metrics_of(folder)
    ]


def postgrad(
    *overrides: str, cwd: Path | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Runs the command in its own process."""
    return preloaded.run(preloaded.COMMAND, *overrides, cwd=cwd, **options)


def tree(folder: Path) -> dict[str, bytes]:
    """Returns every file below a folder with its bytes, to show that nothing was written."""
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def forkserver() -> ForkServerContext:
    """Returns a context whose processes start in a fraction of a second: torch is loaded.

    There is one server per test process, so all tests share the list of modules.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "tiny_runs",
            "postgrad.training.driver",
            "postgrad.evaluation.run",
            "postgrad.cluster.host",
            "postgrad.cli.train",
            "transformers.models.qwen3.modeling_qwen3",
            "pandas",
            "peft",
        ]
    )
    return context


def run_words(overrides: list[str], output: str, slow_sync: bool = False) -> None:
    """Runs the command in a forked process with its own process group; output goes to a file.

    `slow_sync` simulates a slow disk: writing a checkpoint then takes long enough for a test to
    kill the process in the middle.
    """
    os.setsid()
    with open(output, "a") as file:  # noqa: PTH123
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from postgrad.cli.main import main

    if slow_sync:
        fsync_path = files.fsync_path
        files.fsync_path = lambda path: time.sleep(0.02) or fsync_path(path)
    code = main(overrides)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def hold_at_step(number: int, file: Path) -> None:
    """Makes runs of this process wait, while the file exists, before they log a step.

    A test can then act during a run without a race against its end.
    """
    write = RunLog.write

    def wait_and_write(self: RunLog, step: int, metrics: dict[str, float]) -> dict[str, float]:
        while step == number and file.exists():
            time.sleep(0.01)
        return write(self, step, metrics)

    RunLog.write = wait_and_write  # type: ignore[method-assign]


def sharpened(folder: Path) -> Path:
    """Scales the weights up: a new model is so close to uniform that mistakes hardly show."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(8)
    model.save_pretrained(folder)
    return folder


class NoteReporter(Reporter):
    """Stores the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class CallAtStep(Reporter):
    """Calls a function when a step is reported."""

    def __init__(self, number: int, function: Callable[[], object]) -> None:
        self.number = number
        self.function = function

    def step(self, metrics: Mapping[str, float], batch: Batch) -> None:
        if metrics["step"] == self.number:
            self.function()


def ctrl_c_at(number: int) -> CallAtStep:
    """Return a reporter that presses Ctrl-C during a step."""
    return CallAtStep(number, lambda: signal.raise_signal(signal.SIGINT))

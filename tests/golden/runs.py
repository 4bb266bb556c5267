"""Golden runs: tokens, rewards, gradients and weights of two steps of every method.

`runs.jsonl` has one JSON array per line:

    ["step", CASE, NUMBER, [LOSS, GRAD_NORM], [[RESPONSE, REWARD, ADVANTAGES, LOGPROBS], ...]]
    ["gradient", CASE, OPTIMIZER, [[SHAPE, NORM, SUM, FIRST, LAST], ...]]    of its first update
    ["weights", CASE, MODEL, {NAME: [NORM, SUM, FIRST, LAST]}]    the change in two steps

RESPONSE are the token ids; ADVANTAGES and LOGPROBS are sums over the response. The model's weights
are scaled up (`sharpened`), and AdamW's epsilon is 1, so that the update is smooth in the gradient:
numbers then agree to 1e-5 between machines. A sampled token may differ there only if its
random number is within about 1e-6 of a boundary.
"""

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
from method_runs import VERIFIERS, run
from safetensors.torch import load_file
from tiny_runs import sharpened
from torch.optim.optimizer import register_optimizer_step_pre_hook

from postgrad.model.load.tiny import make_tiny

GOLDEN = Path(__file__).parent / "runs.jsonl"
TOLERANCE = 1e-5
SETTINGS = (
    "optimizer.lr=0.05",
    "optimizer.eps=1.0",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.max_grad_norm=0",
)
PAIRS = "data.train=pairs.jsonl"
# name: recipe, then settings
CASES: dict[str, tuple[str, ...]] = {
    "sft": ("sft",),
    "dft": ("dft",),
    "dpo": ("dpo", PAIRS, "training.updates_per_step=2"),
    "simpo": ("simpo", PAIRS),
    "kto": ("kto", PAIRS),
    "reward_model": ("reward_model", PAIRS),
    "online_dpo": ("online_dpo",),
    "grpo": ("grpo",),
    "grpo_kl": ("grpo", "method.kl=loss", "method.kl_coef=0.1", "training.updates_per_step=2"),
    "grpo_lora": ("grpo", "model.lora.rank=4"),
    "dapo": ("dapo",),
    "gspo": ("gspo",),
    "rloo": ("rloo",),
    "reinforce_pp": ("reinforce_pp",),
    "ppo": ("ppo",),
    "luffy": ("luffy",),
    "luffy_rl_sft": ("luffy_rl_sft",),
    "exgrpo": ("exgrpo",),
    "bupo": ("bupo",),
    "classmate": ("classmate",),
    "classmate_gdpo": ("classmate_gdpo",),
    "distill": ("distill",),
}
Line = list[Any]


def run_case(name: str, model: Path, folder: Path) -> Iterator[Line]:
    """Train two steps of a case and yield its lines. The working directory becomes `folder`."""
    recipe, *settings = CASES[name]
    (folder / "rewards.py").write_text(VERIFIERS)
    pairs = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)}
        for a in range(4)
        for b in range(4)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    reward = [] if PAIRS in settings else [f"reward.verifier={folder}/rewards.py:graded"]
    settings = [one.replace("pairs.jsonl", f"{folder}/pairs.jsonl") for one in settings]
    with GradientRecorder() as recorder:
        steps = run(recipe, model, folder, *SETTINGS, *reward, *settings)
    for metrics in steps:
        number = int(metrics["step"])
        values = [metrics.get("loss"), metrics.get("grad_norm")]
        yield ["step", name, number, values, rows_of(folder, number)]
    for index, gradient in enumerate(recorder.first.values()):
        yield ["gradient", name, index, gradient]
    start = load_file(model / "model.safetensors")
    for file in sorted((folder / "test/checkpoints/step-2").glob("*/model.safetensors")):
        change = {
            key: statistics(weights.float() - start[key].float() if key in start else weights)
            for key, weights in sorted(load_file(file).items())
        }
        yield ["weights", name, file.parent.name, change]


class GradientRecorder:
    """Keeps statistics of each optimizer's first gradient while it is entered."""

    def __init__(self) -> None:
        self.first: dict[int, list[Any]] = {}

    def __enter__(self) -> "GradientRecorder":
        self.hook = register_optimizer_step_pre_hook(self.before_step)
        return self

    def __exit__(self, *error: Any) -> None:
        self.hook.remove()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Record the gradients; they have no names, so the order is that of shapes and norms."""
        if id(optimizer) not in self.first:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            gradients = [one.grad for one in parameters if one.grad is not None]
            found = [[list(one.shape), *statistics(one)] for one in gradients]
            self.first[id(optimizer)] = sorted(found)


def rows_of(folder: Path, number: int) -> list[list[Any]]:
    """Return the rows of a step's rollouts."""
    file = folder / f"test/rollouts/step-{number:06d}.parquet"
    rows: list[list[Any]] = []
    for row in parquet.read_table(file).to_pylist():
        sums = [token_sum(row.get(name)) for name in ("advantages", "behavior_logprobs")]
        rows.append([" ".join(map(str, row["response"])), rounded(row.get("reward")), *sums])
    return rows


def token_sum(values: list[float | None] | None) -> float | None:
    """Return the sum of a token column; None for a row without it."""
    if values is None or all(value is None for value in values):
        return None
    return rounded(sum(value for value in values if value is not None))


def statistics(tensor: torch.Tensor) -> list[float]:
    """Return norm, sum, first and last entry."""
    flat = tensor.detach().double().flatten()
    values = [flat.norm(), flat.sum(), flat[0], flat[-1]]
    return [rounded(float(value)) for value in values]  # type: ignore[misc]


def rounded(value: float | None) -> float | None:
    """Return a number with eight digits, which is enough for 1e-5; None if it is none."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.8g}")


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """Return where two lines differ: numbers by more than the tolerance, everything else at all.

    The tolerance is relative for numbers above 1. For the statistics of a tensor it is relative to
    the norm, plus half of 1e-5 for the rounding of float32 weights and of sums over them.
    """
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        return [one for key in old for one in differences(old[key], new[key], f"{where} {key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        numbers = [value for value in old if isinstance(value, int | float)]
        if len(numbers) == 4:  # statistics of a tensor
            return compare(old, new, where, lambda value: TOLERANCE * (numbers[0] + 0.5))
        pairs = enumerate(zip(old, new, strict=True))
        return [one for i, (a, b) in pairs for one in differences(a, b, f"{where} {i}")]
    return compare([old], [new], where, lambda value: TOLERANCE * max(1.0, abs(value)))


def compare(
    old: list[Any], new: list[Any], where: str, tolerance: Callable[[float], float]
) -> list[str]:
    """Return a line if values differ by more than the tolerance of the old one."""
    for a, b in zip(old, new, strict=True):
        is_near = a == b
        if isinstance(a, float) and isinstance(b, float):
            is_near = abs(a - b) <= tolerance(a)
        if not is_near:
            return [f"{where}: {old} -> {new}"]
    return []


def read(name: str) -> list[Line]:
    """Return the recorded lines of a case."""
    lines = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    return [line for line in lines if line[1] == name]


def write_golden() -> None:
    """Write runs.jsonl."""
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as temporary:
        model = sharpened(make_tiny(Path(temporary) / "tiny", seed=0, layers=2, width=32))
        for name in CASES:
            folder = Path(temporary) / name
            folder.mkdir()
            lines += run_case(name, model, folder)
    GOLDEN.write_text("".join(json.dumps(line) + "\n" for line in lines))

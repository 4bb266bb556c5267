"""Bytes through the driver per step on two Ray workers: columns copied, and columns by reference.

    copied         every column of every call and result goes through the driver
    by reference   columns of 64 KiB or more stay with the workers (cluster/stored.py)

Counted is all that the driver puts into Ray's object store or gets from it, also the responses and
the columns of the file of rollouts. The model is random and tiny; the columns have the sizes of a
run of any model with as many tokens.

    python benchmarks/driver_bytes.py
    python benchmarks/driver_bytes.py --problems 4     a smoke test
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from postgrad.cluster import stored
from postgrad.cluster.ray_connection import import_ray
from postgrad.config.compose import compose
from postgrad.methods import find_method
from postgrad.model.tiny import make_tiny
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch

RUNS = {
    "GRPO, two updates, KL loss": ["grpo", "training.updates_per_step=2", "method.kl=loss"],
    "PPO": ["ppo"],
    "GKD, the teacher's 16 top tokens": ["gkd", "method.top_k=16"],
}
NEVER = 1 << 62


def length_reward(response: str, problem: object) -> float:
    """Return a reward that differs within every group."""
    return len(response) % 7 / 7


class DriverBytes:
    """Counts the bytes of ray.put and ray.get in this process."""

    def __init__(self, ray: Any) -> None:
        self.sent = 0
        self.received = 0
        put, get = ray.put, ray.get

        def counted_put(value: Any) -> Any:
            self.sent += len(value) if isinstance(value, bytes) else 0
            return put(value)

        def counted_get(reference: Any, **options: Any) -> Any:
            value = get(reference, **options)
            self.received += len(value) if isinstance(value, bytes) else 0
            return value

        ray.put, ray.get = counted_put, counted_get


class StepBytes(Reporter):
    """Notes the counts at the end of each step."""

    def __init__(self, counts: DriverBytes) -> None:
        super().__init__()
        self.counts = counts
        self.totals: list[tuple[int, int]] = []
        self.num_tokens = 0

    def step(self, metrics: dict[str, float], batch: Batch) -> None:
        self.num_tokens = batch.num_tokens
        self.totals.append((self.counts.sent, self.counts.received))


def bytes_per_step(
    words: list[str], model: Path, counts: DriverBytes, args: argparse.Namespace
) -> tuple[int, int, int]:
    """Train two steps; return the bytes sent and received in the second, and its tokens."""
    recipe, *settings = words
    if recipe == "gkd":
        settings.append(f"method.teacher={model}")
    with tempfile.TemporaryDirectory() as runs:
        overrides = [
            f"model.path={model}",
            "model.device=cpu",
            "model.dtype=float32",
            "model.threads=1",
            "data.train=arithmetic:1",
            "data.template=plain",
            "training.steps=2",
            f"training.problems_per_step={args.problems}",
            "rollout.samples=32",
            "rollout.max_response_tokens=64",
            f"reward.verifier={Path(__file__).resolve()}:length_reward",
            "reward.workers=1",
            "training.validate_every=0",
            "training.checkpoint_every=1000",
            "cluster=ray",
            "cluster.workers=2",
            f"runs={runs}",
            "name=run",
            *settings,
        ]
        reporter = StepBytes(counts)
        train(compose(recipe, overrides, lambda name: find_method(name).Settings), reporter)
    (sent, received), (last_sent, last_received) = reporter.totals
    return last_sent - sent, last_received - received, reporter.num_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--problems", type=int, default=64)
    args = parser.parse_args()
    counts = DriverBytes(import_ray())
    default = stored.MIN_BYTES
    print("| run | response tokens | columns are | sent by the driver | received | per token |")
    print("|---" * 6 + "|")
    with tempfile.TemporaryDirectory() as root:
        model = make_tiny(Path(root) / "model", seed=0)
        for name, words in RUNS.items():
            for how, min_bytes in (("copied", NEVER), ("by reference", default)):
                stored.MIN_BYTES = min_bytes
                sent, received, num_tokens = bytes_per_step(words, model, counts, args)
                cells = [name, f"{num_tokens:,}", how, f"{sent:,}", f"{received:,}"]
                cells.append(f"{(sent + received) / num_tokens:.0f}")
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

"""Simulated seconds per GRPO step on 1 to 4,096 devices, from stated assumptions.

    python benchmarks/simulate_scale.py                    the table of docs/scale.md
    python benchmarks/simulate_scale.py --shape 70b --rows 4096 --tokens 8192
    python benchmarks/simulate_scale.py --check            one device, beside measured steps

Nothing here was measured on several devices. Seconds and bytes are those of `postgrad doctor --fit
... cluster=ray --device h200` (sizing/mesh_time.py); here, responses have random lengths, devices
are randomly late, and some fail. Each step is simulated many times; the mean is shown.
"""

import argparse
import heapq
import math
import random
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))

from sizes import make_config

from postgrad.cli.train import compose_arguments
from postgrad.sizing.devices import GpuSpec, find_gpu
from postgrad.sizing.gpu_memory import wanted_cache_bytes
from postgrad.sizing.gpu_time import GpuClock
from postgrad.sizing.mesh_memory import MeshSizes, estimate_mesh
from postgrad.sizing.mesh_time import PUBLISH, MeshClock, StepTime, elapsed
from postgrad.sizing.plan import GroupLengths, Plan, Workload, lay_out_step
from postgrad.sizing.traffic import Links

NODE = 8
COPY = 64  # devices over which one copy of the weights is sharded; more devices hold more copies


@dataclass(frozen=True)
class Cluster:
    """Devices, links and what goes wrong. All but the rates of the device are assumptions."""

    gpu: GpuSpec = field(default_factory=lambda: find_gpu("h200"))
    links: Links = field(default_factory=Links)
    jitter: float = 0.03  # standard deviation of a device's time per stage, as a share
    years_between_failures: float = 5.0
    restart_s: float = 300.0  # until a run continues from its checkpoint

    def __str__(self) -> str:
        return (
            f"{self.gpu.name}; {self.links}; jitter {self.jitter:.0%}; a failure per device in "
            f"{self.years_between_failures:g} years, {self.restart_s:g} s to restart"
        )


@dataclass(frozen=True)
class Step:
    """One GRPO step: rows sampled and trained, and how checkpoints are written."""

    rows: int = 1024
    tokens: int = 2048  # longest response
    prompt: int = 200
    group: int = 8
    checkpoint_every: int = 20
    staleness: int = 0  # 1: sample the next step during the update, on half of the devices


# Hidden size, intermediate size, blocks, heads; the others are in gpu/sizes.py.
LARGE_SHAPES = {"32b": (5120, 25_600, 64, 64), "70b": (8192, 28_672, 80, 64)}
SHAPES = ("1.7b", "4b", "8b", *LARGE_SHAPES)
# Measured on one H200 with random weights, so that every response has its full length.
MEASURED = {
    ("4b", Step(256, 1024, 100)): 256 * 1024 / 25_200,
    ("1.7b", Step(1024, 512, 100)): 1024 * 512 / 61_000,
}


def make_model(shape: str) -> Any:
    """Return the transformers configuration of a model of this shape."""
    if shape not in LARGE_SHAPES:
        return make_config(shape)
    hidden, intermediate, blocks, heads = LARGE_SHAPES[shape]
    config = make_config("8b")
    return type(config)(
        **config.to_dict()
        | {
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
            "layer_types": None,
        }
    )


class Simulation:
    """Simulates the steps of one model on clusters of different sizes."""

    def __init__(self, shape: str, cluster: Cluster, step: Step) -> None:
        self.cluster = cluster
        self.step = step
        self.model = make_model(shape)
        self.sizes = MeshSizes()
        plan = self.plan(1, [])
        self.size = self.sizes.measure(plan.config, self.model)

    def engine_devices(self) -> int:
        """Return over how many devices an engine is divided: its weights take a quarter of them."""
        size = 1
        while self.size.weights / size > self.cluster.gpu.memory / 4 and size < NODE:
            size *= 2
        return size

    def fits(self, num_devices: int) -> bool:
        """Return whether trainers and engines fit into the memory of the devices."""
        if num_devices < self.engine_devices() * (1 + self.step.staleness):
            return False
        config = self.plan(num_devices, [], self.engine_devices()).config
        memory = estimate_mesh(config, self.model, sizes=self.sizes)
        return memory.total <= self.cluster.gpu.usable

    def plan(self, num_devices: int, groups: list[GroupLengths], divided: int = 1) -> Plan:
        """Return a step with these groups on a cluster of this size."""
        step = self.step
        trainers = max(1, num_devices // 2) if step.staleness else num_devices
        engines = max(1, (num_devices - trainers) // divided) if step.staleness else 0
        settings = {
            "model.path": "qwen3",
            "data.train": "problems.jsonl",
            "model.device": "cuda",
            "model.dtype": "bfloat16",
            "model.activation_checkpointing": "true",
            "training.token_budget": 16_384,
            "rollout.max_rows": 2048,
            "rollout.max_response_tokens": step.tokens,
            "rollout.tensor_parallel": divided,
            "rollout.staleness": step.staleness,
            "cluster": "ray",
            "cluster.workers": trainers,
            "cluster.shard_workers": COPY if trainers > COPY else 0,
            "cluster.engines": engines,
        }
        config = compose_arguments(["grpo", *(f"{key}={value}" for key, value in settings.items())])
        return Plan(config, self.model, Workload(groups, step.prompt), packed=True)

    def draw_lengths(self, rng: random.Random) -> list[list[int]]:
        """Return the lengths of the responses by group: a long tail up to the limit."""
        step = self.step
        median = math.log(step.tokens / 3)
        lengths = [
            min(step.tokens, max(16, round(rng.lognormvariate(median, 0.7))))
            for _ in range(step.rows)
        ]
        return [lengths[start : start + step.group] for start in range(0, step.rows, step.group)]

    def clock(self, plan: Plan, lengths: list[list[int]]) -> MeshClock:
        """Return the clock of a step whose responses have these lengths."""
        groups = [GroupLengths(self.step.prompt, tuple(own), 0) for own in lengths]
        workload = Workload(groups, self.step.prompt)
        plan = replace(plan, workload=workload)
        return MeshClock(self.cluster.gpu, plan, self.cluster.links, self.sizes)

    def run(self, num_devices: int, num_steps: int = 20) -> dict[str, float]:
        """Return mean seconds by stage, and the share of time lost to failures."""
        rng = random.Random(0)
        base = self.plan(num_devices, [], self.engine_devices())
        samples: dict[str, list[float]] = {"sample": [], "update": [], PUBLISH: []}
        for _ in range(num_steps):
            lengths = self.draw_lengths(rng)
            clock = self.clock(base, lengths)
            late = slowest_of(rng, self.cluster, num_devices)
            layout = lay_out_step(clock.plan, self.step.tokens)
            update = clock.update_parts(clock.policy, layout)
            samples["sample"].append(late * sampling_s(clock, lengths))
            samples["update"].append(late * elapsed(update))
            samples[PUBLISH].append(clock.publish_s())
        means = {name: statistics.mean(values) for name, values in samples.items()}
        step_s = StepTime(means, {}, base.rollouts_overlap).total
        failures = num_devices * step_s / (self.cluster.years_between_failures * 365 * 86_400)
        lost = failures * (self.cluster.restart_s + self.step.checkpoint_every * step_s / 2)
        return means | {"step": step_s + lost, "lost": lost / (step_s + lost)}


def sampling_s(clock: MeshClock, lengths: list[list[int]]) -> float:
    """Return the seconds until the last engine has sampled its groups."""
    num_engines = clock.num_engines
    slowest = 0.0
    for number in range(min(num_engines, len(lengths))):
        slowest = max(slowest, engine_s(clock, lengths[number::num_engines]))
    return slowest


def engine_s(clock: MeshClock, lengths: list[list[int]]) -> float:
    """Return the seconds of one engine; rows start as others end, if its cache holds not all."""
    prompt = clock.plan.workload.longest_prompt
    own = [GroupLengths(prompt, (), len(group)) for group in lengths]
    plan = replace(clock.plan, workload=Workload(own, prompt))
    rows = [length for group in lengths for length in group]
    cache = clock.engine_cache(plan)
    slots = max(1, min(len(rows), plan.max_rows, int(len(rows) * cache / wanted_cache_bytes(plan))))
    engine = clock.engine_clock(plan)
    prefill = engine.generation_s(len(rows), prompt * len(own), len(own), 0, cache)
    num_tokens, decoding = decode_s(engine, rows, slots, prompt * len(own) / len(rows))
    return prefill + decoding + clock.decode_exchange_s(num_tokens, sum(rows) / num_tokens)


def decode_s(engine: GpuClock, rows: list[int], slots: int, shared: float) -> tuple[int, float]:
    """Return the number of decode steps of rows of these lengths, and their seconds.

    Args:
        engine: its clock.
        rows: tokens of each response.
        slots: rows that decode at the same time, at most.
        shared: prompt tokens per row, those of one prompt divided by its rows.
    """
    ends = [0] * slots
    changes: dict[int, int] = {}
    for length in rows:
        start = heapq.heappop(ends)
        heapq.heappush(ends, start + length)
        changes[start] = changes.get(start, 0) + 1
        changes[start + length] = changes.get(start + length, 0) - 1
    mean_position = sum(length**2 / 2 for length in rows) / sum(rows)
    seconds = 0.0
    alive = 0
    previous = 0
    for position in sorted(changes):
        if alive:
            seconds += (position - previous) * engine.decode_step_s(alive, mean_position, shared)
        alive += changes[position]
        previous = position
    return previous, seconds


def slowest_of(rng: random.Random, cluster: Cluster, num_devices: int) -> float:
    """Return the factor by which the slowest of many devices is late."""
    return max(1.0, *(1 + abs(rng.gauss(0, cluster.jitter)) for _ in range(num_devices)))


def print_table(shape: str, cluster: Cluster, step: Step) -> None:
    """Print one row per number of devices."""
    simulation = Simulation(shape, cluster, step)
    ahead = Simulation(shape, cluster, replace(step, staleness=1))
    print(f"{shape}: {step.rows} rows of at most {step.tokens} tokens per step; {cluster}\n")
    print("| devices | sampling | update | weights | lost to failures | step | with staleness 1 |")
    print("|---|---|---|---|---|---|---|")
    for power in range(13):
        num_devices = 2**power
        if not simulation.fits(num_devices):
            continue
        now = simulation.run(num_devices)
        stale = f"{ahead.run(num_devices)['step']:.1f} s" if ahead.fits(num_devices) else ""
        stages = " | ".join(f"{now[name]:.1f} s" for name in ("sample", "update", PUBLISH))
        print(f"| {num_devices} | {stages} | {now['lost']:.1%} | {now['step']:.1f} s | {stale} |")


def print_check(cluster: Cluster) -> None:
    """Print simulated beside measured seconds of one device."""
    for (shape, step), measured in MEASURED.items():
        simulation = Simulation(shape, cluster, step)
        lengths = [[step.tokens] * step.group] * (step.rows // step.group)
        simulated = sampling_s(simulation.clock(simulation.plan(1, []), lengths), lengths)
        ratio = simulated / measured
        print(
            f"{shape} sampling: simulated {simulated:.1f} s, measured {measured:.1f} s "
            f"({ratio:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--check", action="store_true", help="one device beside measured figures")
    args = parser.parse_args()
    if args.check:
        print_check(Cluster())
    else:
        print_table(args.shape, Cluster(), Step(args.rows, args.tokens))


if __name__ == "__main__":
    main()

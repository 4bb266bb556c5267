"""Simulated seconds per GRPO step on 1 to 4,096 devices, from stated assumptions.

    python benchmarks/simulate_scale.py                    the table of docs/scale.md
    python benchmarks/simulate_scale.py --shape 70b --rows 4096 --tokens 8192
    python benchmarks/simulate_scale.py --check            one device, beside measured steps

Nothing here was measured on several devices. The rates of one device are those measured on an H200
(docs/results.md); links, jitter and failures are assumptions, printed with the table. Each step is
simulated with random response lengths and random delays of devices; the mean of many steps is
shown.
"""

import argparse
import math
import random
import statistics
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """What one device and its links do. Rates are reached ones, not those of a data sheet."""

    train_flops: float = 394e12  # 4B update on an H200: 6 x parameters x tokens / seconds
    decode_bandwidth: float = 3.1e12  # 4B rollout on an H200: bytes read per second
    memory: float = 141e9
    node_link: float = 350e9  # bytes per second and device within a node of NODE devices
    network: float = 40e9  # bytes per second and device between nodes
    latency_s: float = 20e-6  # per collective and doubling of the number of devices
    jitter: float = 0.03  # standard deviation of a device's time per pass, as a share
    years_between_failures: float = 5.0
    restart_s: float = 300.0  # until a run continues from its checkpoint


@dataclass(frozen=True)
class Shape:
    """A model."""

    parameters: float
    blocks: int
    cache_bytes: float  # of keys and values, per token


@dataclass(frozen=True)
class Work:
    """One GRPO step: rows sampled and trained, and how checkpoints are written."""

    rows: int = 1024
    tokens: int = 2048  # longest response
    prompt: int = 200
    group: int = 8
    checkpoint_every: int = 20
    staleness: int = 0  # 1: sample the next step during the update, on half of the devices


NODE = 8
SHAPES = {
    "1.7b": Shape(1.7e9, 28, 114_688),
    "4b": Shape(4.0e9, 36, 147_456),
    "8b": Shape(8.2e9, 36, 147_456),
    "32b": Shape(32.8e9, 64, 262_144),
    "70b": Shape(70.6e9, 80, 327_680),
}
# Measured on one H200 with random weights, so that every response has its full length.
MEASURED = {
    ("4b", Work(256, 1024, 100), "sampling"): 256 * 1024 / 25_200,
    ("1.7b", Work(1024, 512, 100), "sampling"): 1024 * 512 / 61_000,
}


def link_speed(device: Device, size: int) -> float:
    """Return the bytes per second and device of a collective over `size` devices."""
    return device.node_link if size <= NODE else device.network


def collective_s(device: Device, size: int, num_bytes: float) -> float:
    """Return the seconds to gather or reduce `num_bytes` over `size` devices in a ring."""
    if size == 1:
        return 0.0
    latency = device.latency_s * math.ceil(math.log2(size))
    return latency + num_bytes * (size - 1) / size / link_speed(device, size)


def tensor_parallel(shape: Shape, device: Device) -> int:
    """Return over how many devices an engine divides the model: weights take half the memory."""
    size = 1
    while 2 * shape.parameters / size > device.memory / 2 and size < NODE:
        size *= 2
    return size


def sampling_s(shape: Shape, device: Device, work: Work, devices: int, lengths: list[int]) -> float:
    """Return the seconds until the last response is complete."""
    tensor = tensor_parallel(shape, device)
    engines = max(1, devices // tensor)
    by_engine: list[list[int]] = [[] for _ in range(engines)]
    for index in range(0, len(lengths), work.group):
        by_engine[(index // work.group) % engines] += lengths[index : index + work.group]
    bandwidth = device.decode_bandwidth * tensor
    room = 0.9 * device.memory * tensor - 2 * shape.parameters
    slowest = 0.0
    for rows in by_engine:
        # Every decode step reads the weights once, and the cache of every row that is left.
        cache = sum(n * (work.prompt + n / 2) for n in rows) * shape.cache_bytes
        held = sum(work.prompt + n for n in rows) * shape.cache_bytes
        waves = max(1.0, held / room)
        steps = waves * max(rows, default=0)
        exchange = 2 * shape.blocks * collective_s(device, tensor, 0) * steps
        seconds = (steps * 2 * shape.parameters + cache) / bandwidth + exchange
        slowest = max(slowest, seconds)
    return slowest


def update_s(shape: Shape, device: Device, work: Work, devices: int, lengths: list[int]) -> float:
    """Return the seconds of forward, backward and optimizer with weights sharded over devices.

    Weights are gathered twice and gradients reduced once per pass, beside the computation.
    """
    tokens = sum(lengths) + len(lengths) / work.group * work.prompt
    share = tokens / devices
    passes = max(1, math.ceil(share / 16_384))
    compute = 6 * shape.parameters * share / device.train_flops / passes
    shard_group = min(devices, 64)  # hybrid sharding: copies over more devices
    gather = 2 * collective_s(device, shard_group, 2 * shape.parameters)
    reduce = collective_s(device, shard_group, 4 * shape.parameters)
    between = 0.0
    if devices > shard_group:
        copies = devices // shard_group
        between = collective_s(device, copies, 4 * shape.parameters / shard_group)
    return passes * max(compute, gather + reduce) + between


def weights_s(shape: Shape, device: Device, devices: int) -> float:
    """Return the seconds to bring new weights to the engines, every device its share."""
    return collective_s(device, devices, 2 * shape.parameters / tensor_parallel(shape, device))


def slowest_of(rng: random.Random, device: Device, devices: int) -> float:
    """Return the factor by which the slowest of many devices is late."""
    return max(1.0, *(1 + abs(rng.gauss(0, device.jitter)) for _ in range(devices)))


def simulate(shape: Shape, device: Device, work: Work, devices: int, steps: int = 20) -> dict:
    """Return mean seconds by stage, and the share of time lost to failures."""
    rng = random.Random(0)
    samples: dict[str, list[float]] = {"sampling": [], "update": [], "weights": []}
    for _ in range(steps):
        # Lengths of reasoning responses: a long tail up to the limit.
        lengths = [
            min(work.tokens, max(16, round(rng.lognormvariate(math.log(work.tokens / 3), 0.7))))
            for _ in range(work.rows)
        ]
        trainers = devices if not work.staleness else max(1, devices // 2)
        samplers = devices if not work.staleness else max(1, devices - trainers)
        late = slowest_of(rng, device, devices)
        samples["sampling"].append(late * sampling_s(shape, device, work, samplers, lengths))
        samples["update"].append(late * update_s(shape, device, work, trainers, lengths))
        samples["weights"].append(weights_s(shape, device, devices))
    means = {name: statistics.mean(values) for name, values in samples.items()}
    both = max if work.staleness else lambda a, b: a + b
    step = both(means["sampling"], means["update"]) + means["weights"]
    failures = devices * step / (device.years_between_failures * 365 * 86400)
    lost = failures * (device.restart_s + work.checkpoint_every * step / 2)
    return means | {"step": step + lost, "lost": lost / (step + lost)}


def print_table(shape_name: str, device: Device, work: Work) -> None:
    """Print one row per number of devices."""
    shape = SHAPES[shape_name]
    print(f"{shape_name}: {work.rows} rows of at most {work.tokens} tokens per step; {device}\n")
    print("| devices | sampling | update | weights | lost to failures | step | with staleness 1 |")
    print("|---|---|---|---|---|---|---|")
    for power in range(13):
        devices = 2**power
        if 16 * shape.parameters / devices > 0.8 * device.memory:
            continue  # weights, gradients and Adam state do not fit
        now = simulate(shape, device, work, devices)
        ahead = simulate(shape, device, replace(work, staleness=1), devices)
        stale = f"{ahead['step']:.1f} s" if devices > 1 else ""
        stages = " | ".join(f"{now[name]:.1f} s" for name in ("sampling", "update", "weights"))
        print(f"| {devices} | {stages} | {now['lost']:.1%} | {now['step']:.1f} s | {stale} |")


def print_check(device: Device) -> None:
    """Print simulated beside measured seconds of one device."""
    for (shape, work, stage), measured in MEASURED.items():
        lengths = [work.tokens] * work.rows
        simulated = sampling_s(SHAPES[shape], device, work, 1, lengths)
        ratio = simulated / measured
        print(
            f"{shape} {stage}: simulated {simulated:.1f} s, measured {measured:.1f} s ({ratio:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--check", action="store_true", help="one device beside measured figures")
    args = parser.parse_args()
    if args.check:
        print_check(Device())
    else:
        print_table(args.shape, Device(), Work(args.rows, args.tokens))


if __name__ == "__main__":
    main()

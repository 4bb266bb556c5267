"""Short measurements on this machine for `postgrad doctor --fit`: the trainer's and the engine's own code on a cut-down model.

A model of one block with the real vocabulary gives the fixed cost; models of one and of three blocks with a small vocabulary give
the cost of a block. Random weights: nothing is loaded, nothing is written.
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch

from postgrad.config.schema import RolloutConfig
from postgrad.doctor.fit import Layout, Plan, Rates, lay_out
from postgrad.doctor.simulate import NO_OBJECTIVE, Size, build
from postgrad.model.device import (
    DTYPES,
    choose_device,
    matmul_flops,
    peak_memory_bytes,
    set_threads,
    synchronize,
)
from postgrad.model.loaded import Loaded
from postgrad.model.passes.layout import MicroBatch
from postgrad.model.policy import LocalPolicy
from postgrad.model.views import FULL
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine

SMALL_VOCABULARY = 256
NO_STOP = 1 << 40  # an id that is never sampled, so that probed rows run on
PASS_S = 0.8  # aimed-at length of one probed pass
REPEAT_S = 1.0  # no piece of work is repeated beyond this
DECODE_STEPS = 8


class Seconds(NamedTuple):
    """Of one cut-down model: a forward pass, forward and backward, a decode step, an optimizer step."""

    forward: float
    train: float
    decode: float
    optimizer: float


def measure_rates(plan: Plan, size: Size) -> Rates:
    """Seconds a token, a decode step and a parameter take the whole model here. About ten seconds."""
    config = plan.config
    set_threads(config.model.threads)
    micro = _probe_layout(plan, size).biggest
    cuts = ((1, None), (1, SMALL_VOCABULARY), (3, SMALL_VOCABULARY))
    fixed, one, three = (_probe(plan, micro, blocks, vocabulary) for blocks, vocabulary in cuts)
    # The fixed cost holds one block; the difference is two. Noise must not make a block free.
    more = (size.blocks - 1) / 2
    whole = Seconds(
        *(f + more * max(c - b, 0.2 * b) for f, b, c in zip(fixed, one, three, strict=True))
    )
    with torch.device("meta"):
        parameters = sum(
            p.numel() for p in build(config, plan.model, 3, SMALL_VOCABULARY).parameters()
        )
    return Rates(
        forward_token_s=whole.forward / micro.num_tokens,
        train_token_s=whole.train / micro.num_tokens,
        decode_s=whole.decode,
        decode_rows=max(1, plan.decode_rows),
        parameter_s=three.optimizer / parameters,
    )


def _probe_layout(plan: Plan, size: Size) -> Layout:
    """The run's own rows in a smaller pass, of about PASS_S for three blocks."""
    config, tokens = plan.config, plan.budget
    if config.model.device == "cpu":
        block = max(1, (size.parameters - size.vocabulary * plan.width) // size.blocks)
        tokens = min(
            tokens, max(128, int(PASS_S * matmul_flops(config.model.dtype) / (2 * 6 * 3 * block)))
        )
    small = dataclasses.replace(
        config, training=dataclasses.replace(config.training, token_budget=tokens)
    )
    return lay_out(dataclasses.replace(plan, config=small), config.rollout.max_response_tokens)


def _probe(plan: Plan, micro: MicroBatch, blocks: int, vocabulary: int | None) -> Seconds:
    config = plan.config
    device = choose_device(config.model.device)
    with device:
        model = build(config, plan.model, blocks, vocabulary)
    model.generation_config.eos_token_id = None
    loaded = Loaded(model, SimpleNamespace(eos_token_id=NO_STOP))
    policy = LocalPolicy(config, loaded, NO_OBJECTIVE)
    micro = micro.to(device)
    micro = MicroBatch(
        micro.rows, torch.zeros_like(micro.ids), micro.positions, micro.mask, micro.gather
    )
    targets = torch.zeros_like(micro.gather)

    def forward() -> None:
        with torch.no_grad():
            policy.forward(micro, targets, FULL)

    def train() -> None:
        policy.forward(micro, targets, FULL).logprobs.sum().backward()

    def step() -> None:
        for master in policy.optimizer.masters.values():
            master.grad = torch.zeros_like(master)
        policy.optimizer.step(0.0)

    decode = _decode_seconds(plan, loaded, device)
    return Seconds(
        seconds_of(forward, device), seconds_of(train, device), decode, seconds_of(step, device)
    )


def _decode_seconds(plan: Plan, loaded: Loaded, device: torch.device) -> float:
    """One decode step at the full number of rows and the mean length of the context; 0 where nothing is sampled."""
    config, rows, groups = plan.config, plan.decode_rows, plan.load.groups
    if not rows:
        return 0.0
    steps = min(DECODE_STEPS, config.rollout.max_response_tokens)
    prompt = sum(group.prompt for group in groups) // len(groups)
    request = Request(
        [0] * (prompt + (config.rollout.max_response_tokens - steps) // 2), list(range(rows))
    )
    engine = NativeEngine(loaded, RolloutConfig(max_rows=rows))

    def generate(tokens: int) -> Callable[[], object]:
        return lambda: engine.generate([request], Sampling(config.rollout.temperature, tokens))

    first = seconds_of(generate(1), device)
    return max(0.0, seconds_of(generate(1 + steps), device) - first) / steps


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median seconds of a piece of work after one run to warm up; fewer repeats where it takes long."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= repeats and sum(times) < REPEAT_S):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def matmul_rate(dtype: str, device: torch.device) -> float:
    """Floating-point operations a second of a square matrix product, on any device."""
    if device.type == "cpu":
        return matmul_flops(dtype)
    n = 4096
    a = torch.ones(n, n, dtype=DTYPES[dtype], device=device)
    return 2 * n**3 / seconds_of(lambda: a @ a, device, repeats=5)


def kernel_bytes(dtype: str) -> int:
    """Bytes of memory that a matrix product of a new shape leaves behind on the CPU.

    bfloat16 on CPUs with matrix tiles: oneDNN writes and keeps code for every shape, up to a MiB; float32: nothing.
    """
    rows, weight, out = (
        torch.zeros(shape, dtype=DTYPES[dtype])
        for shape in ((1024, 512), (512, 1024), (1024, 1024))
    )
    sizes = []
    for shapes in (
        range(1024, 768, -8),
        range(768, 512, -8),
    ):  # the first half fills what free room the heap has
        for n in shapes:
            torch.mm(rows[:n], weight, out=out[:n])
        sizes.append(resident_bytes())
    return max(0, sizes[1] - sizes[0]) // len(shapes)


def resident_bytes() -> int:
    """Memory this process holds now; where the system does not say, the most it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_bytes(torch.device("cpu"))

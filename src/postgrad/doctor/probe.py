"""Short measurements for `postgrad doctor --fit`: the trainer's and engine's code, a small model.

A model of one block with the real vocabulary gives the fixed cost. Models of one and of three
blocks with a small vocabulary give the cost per block. Their weights are random: nothing is
loaded and nothing is written.
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

from postgrad import phases
from postgrad.config.schema import RolloutConfig
from postgrad.doctor.fit import Rates
from postgrad.model.device import (
    DTYPES,
    choose_device,
    matmul_flops,
    peak_memory_bytes,
    synchronize,
)
from postgrad.model.load.formats import Loaded
from postgrad.model.passes.layout import MicroBatch
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.model.threads import set_threads
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.engine import NativeEngine
from postgrad.sizing.plan import Plan, StepLayout, lay_out_step
from postgrad.sizing.simulate import NO_OBJECTIVE, ModelSize, build_model

SMALL_VOCABULARY = 256
NO_STOP = -1  # the id of no token, so that probed rows do not end
PASS_S = 0.8  # target length of one probed pass
MIN_PASS_TOKENS = 128
REPEAT_S = 1.0  # repeats end after this many seconds
DECODE_STEPS = 8
MATMUL_SIZE = 4096  # rows and columns of the matrices on accelerators


class Seconds(NamedTuple):
    """Measured seconds of one small model."""

    forward: float  # forward pass without gradient
    train: float  # forward and backward pass
    decode: float  # decode step
    optimizer: float  # optimizer step


def measure_rates(plan: Plan, size: ModelSize) -> Rates:
    """Measure the seconds per token, decode step and parameter of the whole model. Takes ~10 s."""
    config = plan.config
    set_threads(config.model.threads)
    micro = _probe_layout(plan, size).largest_pass
    phases.begin("measuring one block with the whole vocabulary (1 of 3)")
    fixed = _probe(plan, micro, 1, None)
    phases.begin("measuring one block (2 of 3)")
    one = _probe(plan, micro, 1, SMALL_VOCABULARY)
    phases.begin("measuring three blocks (3 of 3)")
    three = _probe(plan, micro, 3, SMALL_VOCABULARY)
    with torch.device("meta"):
        model = build_model(config, plan.model, 3, SMALL_VOCABULARY)
        num_parameters = sum(p.numel() for p in model.parameters())

    def extrapolate(fixed_s: float, one_s: float, three_s: float) -> float:
        # The fixed cost includes one block; one and three blocks differ by two.
        # Noise must not make a block cost nothing.
        two_blocks = max(three_s - one_s, 0.2 * one_s)
        return fixed_s + (size.blocks - 1) / 2 * two_blocks

    forward_s = extrapolate(fixed.forward, one.forward, three.forward)
    train_s = extrapolate(fixed.train, one.train, three.train)
    return Rates(
        forward_token_s=forward_s / micro.num_tokens,
        train_token_s=train_s / micro.num_tokens,
        decode_s=extrapolate(fixed.decode, one.decode, three.decode),
        decode_rows=max(1, plan.decode_rows),
        parameter_s=three.optimizer / num_parameters,
    )


def _probe_layout(plan: Plan, size: ModelSize) -> StepLayout:
    """Return the run's own rows in a pass that takes about PASS_S for three blocks."""
    config = plan.config
    tokens = plan.token_budget
    if config.model.device == "cpu":
        num_parameters = size.parameters - size.vocabulary * plan.width
        block_parameters = max(1, num_parameters // size.blocks)
        flops_per_token = 2 * 6 * 3 * block_parameters
        affordable = int(PASS_S * matmul_flops(config.model.dtype) / flops_per_token)
        tokens = min(tokens, max(MIN_PASS_TOKENS, affordable))
    training = dataclasses.replace(config.training, token_budget=tokens)
    small = dataclasses.replace(plan, config=dataclasses.replace(config, training=training))
    return lay_out_step(small, config.rollout.max_response_tokens)


def _probe(plan: Plan, micro: MicroBatch, num_blocks: int, vocabulary: int | None) -> Seconds:
    """Measure a model of `num_blocks` blocks; `vocabulary` None means its own."""
    config = plan.config
    device = choose_device(config.model.device)
    with device:
        model = build_model(config, plan.model, num_blocks, vocabulary)
    model.generation_config.eos_token_id = None
    loaded = Loaded(model, SimpleNamespace(eos_token_id=NO_STOP))
    policy = LocalPolicy(config, loaded, NO_OBJECTIVE)
    micro = micro.to(device)
    zeros = torch.zeros_like(micro.ids)  # ids that the small vocabulary has
    micro = MicroBatch(micro.rows, zeros, micro.positions, micro.mask, micro.gather)
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

    return Seconds(
        decode=_measure_decode(plan, loaded, device),
        forward=measure_seconds(forward, device),
        train=measure_seconds(train, device),
        optimizer=measure_seconds(step, device),
    )


def _measure_decode(plan: Plan, loaded: Loaded, device: torch.device) -> float:
    """Return the seconds of a decode step with all rows at the mean context length.

    Returns 0 if the run samples nothing.
    """
    config = plan.config
    rows = plan.decode_rows
    groups = plan.workload.groups
    if not rows:
        return 0.0
    num_steps = min(DECODE_STEPS, config.rollout.max_response_tokens)
    mean_prompt = sum(group.prompt for group in groups) // len(groups)
    context = mean_prompt + (config.rollout.max_response_tokens - num_steps) // 2
    request = Request([0] * context, list(range(rows)))
    engine = NativeEngine(loaded, RolloutConfig(max_rows=rows))

    def generate(num_tokens: int) -> Callable[[], object]:
        sampling = Sampling(config.rollout.temperature, num_tokens)
        return lambda: engine.generate([request], sampling)

    first = measure_seconds(generate(1), device)
    all_steps = measure_seconds(generate(1 + num_steps), device)
    return max(0.0, all_steps - first) / num_steps


def measure_seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds of `work` after one warm-up; repeats end after REPEAT_S."""
    times: list[float] = []
    while len(times) < 2 or (len(times) <= repeats and sum(times) < REPEAT_S):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def matmul_rate(dtype: str, device: torch.device) -> float:
    """Return the floating-point operations per second of a square matrix product."""
    if device.type == "cpu":
        return matmul_flops(dtype)
    matrix = torch.ones(MATMUL_SIZE, MATMUL_SIZE, dtype=DTYPES[dtype], device=device)
    return 2 * MATMUL_SIZE**3 / measure_seconds(lambda: matrix @ matrix, device, repeats=5)


def kernel_bytes(dtype: str) -> int:
    """Return the bytes that a matrix product of a new shape keeps on the CPU.

    In bfloat16 on CPUs with matrix tiles oneDNN keeps code for every shape, up to 1 MiB.
    In float32 it keeps none.
    """
    rows = torch.zeros(1024, 512, dtype=DTYPES[dtype])
    weight = torch.zeros(512, 1024, dtype=DTYPES[dtype])
    result = torch.zeros(1024, 1024, dtype=DTYPES[dtype])

    def multiply(shapes: range) -> None:
        for num_rows in shapes:
            torch.mm(rows[:num_rows], weight, out=result[:num_rows])

    multiply(range(1024, 768, -8))  # fills the free memory of the heap
    before = resident_bytes()
    shapes = range(768, 512, -8)
    multiply(shapes)
    return max(0, resident_bytes() - before) // len(shapes)


def resident_bytes() -> int:
    """Return the memory of this process now, or its peak if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_memory_bytes(torch.device("cpu"))

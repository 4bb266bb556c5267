"""Updates of Postgrad and transformers. compare.py calls each in its own process."""

import time

from compare_common import ARITHMETIC, SAMPLES, peak_gib, random_prompts, report


def make_policy(folder: str, recipe: str, overrides: list[str]):
    """Return the policy of a run with these overrides, in bfloat16."""
    import torch

    from postgrad.config.compose import compose
    from postgrad.config.schema import ModelConfig
    from postgrad.methods import find_method
    from postgrad.model.load.load import load
    from postgrad.model.policy import LocalPolicy

    fixed = [
        "data.train=arithmetic:1",
        "model.device=cuda",
        "model.dtype=bfloat16",
        "optimizer.kind=adamw_fused",
    ]
    config = compose(
        recipe, [f"model.path={folder}", *fixed, *overrides], lambda m: find_method(m).Settings
    )
    loaded = load(ModelConfig(path=folder, dtype="bfloat16"), torch.device("cuda"))
    return LocalPolicy(config, loaded, find_method(recipe)(config).objective)


def update_views(folder: str, more: list[str]) -> None:
    """Time one update of the full policy and of the one after a quarter of its blocks (BuPO)."""
    import random

    import torch

    from postgrad.types import Batch, Trajectory

    random.seed(0)
    prompts = random_prompts()
    rows = [
        Trajectory(str(i), p, [random.randrange(10, 40000) for _ in range(224)], group=i)
        for i, p in enumerate(prompts)
        for _ in range(SAMPLES)
    ]
    batch = Batch.of(rows)
    batch.tokens["advantages"] = torch.randn(batch.num_tokens)
    seconds = {}
    for name, recipe, overrides in (
        ("full", "grpo", []),
        ("quarter", "bupo", ["method.num_blocks=7", "method.phase_one_steps=50"]),
    ):
        policy = make_policy(folder, recipe, [*overrides, *more])
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.time()
            policy.update(batch, 1)
            torch.cuda.synchronize()
            times.append(time.time() - start)
        seconds[name] = min(times)
        num_trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
        report(
            "postgrad",
            work=f"update {name}",
            seconds=seconds[name],
            tokens_per_second=batch.num_tokens / seconds[name],
            share_of_arithmetic=6 * num_trained * batch.num_tokens / seconds[name] / ARITHMETIC,
            peak_gib=peak_gib(),
        )
    report(
        "postgrad",
        work="update quarter against full",
        times_as_fast=seconds["full"] / seconds["quarter"],
    )


def forward_backward_hf(folder: str) -> None:
    """Time forward and backward of 64 x 384 tokens in transformers, with sdpa and full logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model = model.cuda().train()
    ids = torch.randint(10, 40000, (64, 384), device="cuda")
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.time()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30
    report(
        "transformers",
        work="forward and backward",
        tokens_per_second=ids.numel() / min(seconds),
        peak_gib=peak,
    )


def forward_backward_postgrad(folder: str) -> None:
    """Time the same rows in our captured passes, without an optimizer step."""
    import random

    import torch

    from postgrad.model.passes.layout import make_micro_batches
    from postgrad.model.port import FULL
    from postgrad.types import Batch, Trajectory

    random.seed(0)
    policy = make_policy(folder, "grpo", [])
    device = torch.device("cuda")
    model = policy.model
    token_rows = [[random.randrange(10, 40000) for _ in range(385)] for _ in range(64)]
    batch = Batch.of(
        [Trajectory(str(i), row[:1], row[1:], group=i) for i, row in enumerate(token_rows)]
    )
    passes = [
        (m.to(device), batch.select(m.rows).response.values.to(device))
        for m in make_micro_batches(batch, 0, model)
    ]
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.time()
        for m, targets in passes:
            policy.forward(m, targets, FULL).logprobs.mean().backward()
        policy.optimizer.adam.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.time() - start)
    speed = batch.num_tokens / min(seconds)
    share = 6 * sum(p.numel() for p in model.parameters()) * speed / ARITHMETIC
    peak = peak_gib()
    report(
        "postgrad",
        work="forward and backward",
        tokens_per_second=speed,
        share_of_arithmetic=share,
        peak_gib=peak,
    )

"""examples/self_distill.py: the teacher is the policy with a hint in its prompt."""

import math

import pytest
import torch
from jsonl import write_jsonl
from method_runs import bound, run
from tiny_runs import SELF_DISTILL

from postgrad.model.load.tiny import make_tiny

STEPS = (
    "optimizer.lr=5e-3",
    "training.steps=20",
    "training.problems_per_step=8",
    "rollout.samples=4",
    "training.checkpoint_every=1000",
)


def test_self_distillation_shows_the_hint_to_the_teacher_only(tiny, tmp_path):
    rows = [
        {"prompt": f"{i}+1=", "response": "7" * 3, "uid": str(i), "ground_truth": "9"}
        for i in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    write_jsonl(data, *rows)
    template = "method.hint_template='({hint}){question}'"
    for own, hint in (((), "777"), (("method.hint=ground_truth", "method.refresh=true"), "9")):
        world = bound("distill", tiny, *SELF_DISTILL, f"data.train={data}", template, *own)
        batch = world.until("sample")
        seen = world.method.teacher_batch(batch, world.step_done)  # type: ignore[attr-defined]
        decode = world.prompts.decode
        assert decode(batch.prompt.split()[0].tolist()) == "0+1="
        assert decode(seen.prompt.split()[0].tolist()) == f"({hint})0+1="
        assert torch.equal(seen.response.values, batch.response.values)
        is_policy = world.method.teacher() is world.host.policy  # type: ignore[attr-defined]
        assert is_policy == bool(own)
        world.until("publish")
        assert math.isfinite(world.metrics["distill/reverse"])
        assert world.metrics["grad_norm"] > 0


@pytest.mark.slow
def test_the_policy_learns_what_it_says_with_a_hint(tmp_path):
    """The start was fine-tuned on prompts with the hint, so that it differs from its teacher."""
    copying = make_tiny(tmp_path / "copying", seed=0, layers=2, width=32)
    rows = [
        {"prompt": f"{a}{b}{c}=", "response": str(c) * 3, "uid": f"{a}{b}{c}"}
        for a in range(5)
        for b in range(5)
        for c in range(5)
    ]
    data = tmp_path / "rows.jsonl"
    write_jsonl(data, *rows)
    hinted = tmp_path / "hinted.jsonl"
    with_hint = [row | {"prompt": f"{row['response']}({row['prompt']}"} for row in rows]
    write_jsonl(hinted, *with_hint)
    fast = ("optimizer.lr=1e-2", "training.problems_per_step=32", "optimizer.warmup_steps=0")
    run("sft", copying, tmp_path / "sft", f"data.train={hinted}", *fast, "training.steps=60")
    start = tmp_path / "sft" / "test" / "checkpoints" / "step-60" / "policy"
    lines = run(
        "distill",
        start,
        tmp_path / "runs",
        *SELF_DISTILL,
        f"data.train={data}",
        "method.hint_template='{hint}({question}'",
        *STEPS,
        "optimizer.lr=2e-3",
        "training.steps=30",
        "training.problems_per_step=16",
    )
    values = [line["distill/reverse"] for line in lines]
    assert sum(values[-5:]) / 5 < 0.5 * sum(values[:2]) / 2, values

"""Distillation: the student approaches its teacher, top tokens give the exact divergence."""

from pathlib import Path

import pytest
import torch
from method_runs import bound, run
from refused import refused
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from postgrad.algorithms.distillation import divergence, with_rest
from postgrad.model.load.tiny import make_tiny
from postgrad.model.passes.head import token_outputs, top_logprobs

SEVEN = 7  # the token id of the digit


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """(student, teacher): both of random weights; the teacher is wider and prefers sevens."""
    folder = tmp_path_factory.mktemp("models")
    student = make_tiny(folder / "student", seed=0, layers=2, width=32)
    teacher = make_tiny(folder / "teacher", seed=1, layers=2, width=64, tied=False)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        # Blocks that add nothing, and one large entry of every embedding that only 7's row reads.
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
        model.model.embed_tokens.weight[:, 1] = 4.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[SEVEN, 1] = 0.5
    model.save_pretrained(teacher)
    return student, teacher


STEPS = (
    "optimizer.lr=5e-3",
    "training.steps=20",
    "training.problems_per_step=8",
    "rollout.samples=4",
    "training.checkpoint_every=1000",
)


RARE = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("forward", "reverse")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sampled", "jsd", *RARE])
def test_the_student_approaches_the_teacher(kind, models, tmp_path):
    student, teacher = models
    recipe = "distill" if kind == "sampled" else "gkd"
    overrides = [f"method.divergence={kind}", f"method.teacher={teacher}"]
    if kind != "sampled":
        overrides.append("method.top_k=6")
    lines = run(recipe, student, tmp_path, *STEPS, *overrides)
    values = [line[f"distill/{kind}"] for line in lines]
    assert values[0] > 0.05, values
    assert sum(values[-3:]) / 3 < 0.25 * values[0], values


@pytest.mark.slow
def test_a_verifiable_reward_is_added(models, verifiers, tmp_path):
    student, teacher = models
    own = (f"method.teacher={teacher}", "method.reward_coef=10")
    lines = run("distill", student, tmp_path, *STEPS, *own, f"reward.verifier={verifiers}:sevens")
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.3, rewards
    assert "distill/sampled" in lines[0]


def test_all_tokens_give_the_divergence_of_the_whole_vocabulary(models):
    """Against log-softmax of all logits, values and gradients, for each kind."""
    student, teacher = models
    world = bound("gkd", student, f"method.teacher={teacher}", "method.top_k=18")
    batch = world.until("compare")
    table = batch.tokens["teacher_top_logprobs"]
    assert table.shape == (batch.num_tokens, 18)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(18, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    other = log_softmax(torch.randn(5, 18, generator=generator, dtype=torch.float64), -1)
    ids = torch.stack([torch.randperm(18, generator=generator) for _ in range(5)])
    for kind in ("forward", "reverse", "jsd"):
        outputs = token_outputs(hidden, weight, ids, temperature=0.7, chunk=2)
        chosen = with_rest(outputs.logprobs), with_rest(other.gather(1, ids))
        value = divergence(*chosen, kind, 0.3).sum()
        whole = log_softmax(hidden @ weight.T / 0.7, -1)
        expected = divergence(whole, other, kind, 0.3).sum()
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
        grads = torch.autograd.grad(value, (hidden, weight))
        for grad, right in zip(grads, torch.autograd.grad(expected, (hidden, weight)), strict=True):
            torch.testing.assert_close(grad, right, rtol=1e-3, atol=1e-4)


def test_several_targets_have_the_gradient_of_each():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, 1, 3], [0, 8, 2], [4, 5, 4], [7, 6, 0]])
    weights = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    outputs = token_outputs(hidden, weight, targets, 0.8, chunk=3)
    whole = log_softmax(hidden @ weight.T / 0.8, -1)
    torch.testing.assert_close(outputs.logprobs, whole.gather(1, targets))
    entropy = -(whole.exp() * whole).sum(-1)
    mine = torch.autograd.grad(
        (outputs.logprobs * weights).sum() + outputs.entropy.sum(), (hidden, weight)
    )
    right = torch.autograd.grad(
        (whole.gather(1, targets) * weights).sum() + entropy.sum(), (hidden, weight)
    )
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other)
    ids, logprobs = top_logprobs(hidden.detach(), weight.detach(), 3, 7, 0.8)
    best = whole[:, :7].topk(3)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(logprobs.double(), best.values, rtol=0, atol=1e-6)


def test_sampled_advantages_are_the_negative_log_ratio(models):
    student, teacher = models
    world = bound("distill", student, f"method.teacher={teacher}")
    assert "score" not in world.stages()
    batch = world.until("estimate")
    gap = batch.tokens["teacher_logprobs"] - batch.tokens["old_logprobs"]
    torch.testing.assert_close(batch.tokens["advantages"], gap)
    assert world.metrics["distill/sampled"] == pytest.approx(-float(gap.double().mean()))


def test_what_cannot_be_distilled_is_refused(models, tmp_path):
    student, _ = models
    other = make_tiny(tmp_path / "other", seed=2, layers=1, width=32)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["seven"])
    tokenizer.save_pretrained(other)
    with refused("conflict", "method.teacher"):
        run("distill", student, tmp_path / "runs", f"method.teacher={other}")
    with refused("missing", "method.teacher"):
        run("distill", student, tmp_path / "runs", "method.teacher=''")
    assert not (tmp_path / "runs").exists()

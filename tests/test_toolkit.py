"""The CS336 functions on tensors: the assignment's numbers, edge cases, and the code they share."""

import hashlib
import math
import string
from types import SimpleNamespace

import pytest
import torch
from letter_tokenizer import gpt2, letters_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import nn
from transformers import PreTrainedTokenizerFast

from postgrad import toolkit
from postgrad.model.load.tiny import tiny_tokenizer
from postgrad.toolkit import steps, supplement


@pytest.fixture(scope="module")
def letters() -> PreTrainedTokenizerFast:
    return letters_tokenizer()


def draw(function, *shape):
    """Returns a random tensor drawn with seed 42, as in the assignment's fixtures."""
    return function(*shape, generator=torch.Generator().manual_seed(42))


def fixture():
    """Returns log-probs, old log-probs, response mask, raw rewards and advantages of 2 rows."""
    policy = draw(torch.randn, 2, 10)
    rewards = draw(torch.rand, 2, 1)
    mask = draw(torch.rand, 2, 10) > 0.5
    return policy, 2 * policy, mask, rewards, rewards - rewards.mean(0)


# ---- sequences


def test_prompt_and_output_are_encoded_separately_padded_right_and_shifted():
    out = toolkit.tokenize_prompt_and_output(["1+2=", "7"], ["3", "89()"], tiny_tokenizer())
    pad = 16
    assert list(out) == ["input_ids", "labels", "response_mask"]
    assert out["input_ids"].tolist() == [[1, 10, 2, 15], [7, 8, 9, 13]]
    assert out["labels"].tolist() == [[10, 2, 15, 3], [8, 9, 13, 14]]
    assert out["response_mask"].tolist() == [[False, False, False, True], [True, True, True, True]]
    assert out["input_ids"].dtype == out["labels"].dtype == torch.int64
    assert out["response_mask"].dtype == torch.bool
    longer = toolkit.tokenize_prompt_and_output(["1+2=", "7"], ["3456", "8"], tiny_tokenizer())
    assert longer["labels"][1].tolist() == [8] + [pad] * 6  # padding ids, not -100
    assert longer["input_ids"][1].tolist() == [7, 8, pad, pad, pad, pad, pad]
    assert longer["response_mask"].tolist() == [[False] * 3 + [True] * 4, [True] + [False] * 6]


def test_the_prompt_gets_special_tokens_and_the_output_none(letters):
    out = toolkit.tokenize_prompt_and_output(["ab"], ["c"], letters)
    a = string.printable.index("a")
    bos = letters.bos_token_id
    assert out["input_ids"].tolist() == [[bos, a, a + 1]]
    assert out["labels"].tolist() == [[a, a + 1, a + 2]]
    assert out["response_mask"].tolist() == [[False, False, True]]


def test_the_joined_text_is_never_encoded():
    """In the joined text, a and b would merge into one token."""
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "<e>": 3}, [("a", "b")]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    assert fast("ab")["input_ids"] == [2]
    assert toolkit.tokenize_prompt_and_output(["a"], ["b"], fast)["labels"].tolist() == [[1]]


def test_tokenize_edge_cases(letters):
    with pytest.raises(ValueError, match="2 prompts for 1 outputs"):
        toolkit.tokenize_prompt_and_output(["1", "2"], ["3"], tiny_tokenizer())
    with pytest.raises(ValueError, match="no prompts"):
        toolkit.tokenize_prompt_and_output([], [], tiny_tokenizer())
    empty = toolkit.tokenize_prompt_and_output(["12", "1"], ["", "23"], tiny_tokenizer())
    assert empty["response_mask"].tolist() == [[False, False], [True, True]]
    assert letters.pad_token_id is None  # then the end token's id pads
    padded = toolkit.tokenize_prompt_and_output(["a", "abc"], ["b", "d"], letters)
    assert padded["labels"][0, -1] == letters.eos_token_id
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))
    with pytest.raises(ValueError, match=r"tokenizer\.pad_token"):
        toolkit.tokenize_prompt_and_output(["a"], ["a"], bare)


def test_response_log_probs_take_one_forward_pass(letters):
    model = gpt2(0, letters)
    ids = torch.randint(0, len(letters), (2, 9), generator=torch.Generator().manual_seed(0))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    plain = toolkit.get_response_log_probs(model, ids[:, :-1], ids[:, 1:])
    both = toolkit.get_response_log_probs(
        model=model, input_ids=ids[:, :-1], labels=ids[:, 1:], return_token_entropy=True
    )
    assert len(calls) == 2
    assert set(plain) == {"log_probs"}
    assert set(both) == {"log_probs", "token_entropy"}
    expected = torch.distributions.Categorical(logits=model(ids[:, :-1]).logits)
    torch.testing.assert_close(
        both["log_probs"], expected.log_prob(ids[:, 1:]), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(both["token_entropy"], expected.entropy(), rtol=1e-5, atol=1e-5)
    assert both["log_probs"].requires_grad and not both["token_entropy"].requires_grad
    half = toolkit.get_response_log_probs(model.bfloat16(), ids[:, :-1], ids[:, 1:], True)
    assert half["log_probs"].dtype == half["token_entropy"].dtype == torch.float32
    with torch.no_grad():
        detached = toolkit.get_response_log_probs(model, ids[:, :-1], ids[:, 1:])
    assert not detached["log_probs"].requires_grad


# ---- steps


@pytest.mark.parametrize(
    ("constant", "loss", "gradient"), [(1.0, -0.60078, -0.25), (42.0, -0.0143044, -0.00595238)]
)
def test_sft_step_matches_the_assignment(constant, loss, gradient):
    policy, _, mask, _, _ = fixture()
    policy.requires_grad_()
    out, metadata = toolkit.sft_microbatch_train_step(policy, mask, 2, constant)
    assert out.item() == pytest.approx(loss, abs=0.6e-5 if constant == 1 else 0.6e-7)
    assert not out.requires_grad
    assert out.dim() == 0
    assert policy.grad[mask].tolist() == pytest.approx([gradient] * int(mask.sum()), abs=1e-8)
    assert not policy.grad[~mask].any() and metadata["num_response_tokens"] == mask.sum()


def test_gradients_of_ten_steps_accumulate_in_place():
    policy, _, mask, _, _ = fixture()
    policy.requires_grad_()
    grads = []
    for _ in range(10):
        toolkit.sft_microbatch_train_step(policy, mask, gradient_accumulation_steps=2)
        grads.append(policy.grad)
    assert all(grad.data_ptr() == grads[0].data_ptr() for grad in grads)
    assert grads[0][mask].tolist() == pytest.approx([-2.5] * int(mask.sum()))


def test_tokens_outside_the_response_change_neither_loss_nor_gradient():
    policy, old, mask, _, advantages = fixture()
    policy = torch.where(mask, policy, math.nan).requires_grad_()
    loss, _ = toolkit.sft_microbatch_train_step(policy, mask.long(), 1)
    assert loss.isfinite() and not policy.grad[~mask].any()
    policy.grad = None
    loss, _ = toolkit.grpo_microbatch_train_step(
        policy,
        mask,
        1,
        "grpo_clip",
        advantages=advantages,
        old_log_probs=torch.where(mask, old, math.inf),
        cliprange=0.1,
    )
    assert loss.isfinite()
    assert policy.grad.isfinite().all()
    assert not policy.grad[~mask].any()
    assert policy.grad[mask].any()


def sha_reward(response: str, truth: str) -> dict[str, float]:
    """The assignment's reward: a digit of the response's SHA-256, divided by 10."""
    reward = int(hashlib.sha256(response.encode()).hexdigest(), 16) % 10 / 10
    return {"reward": reward, "format_reward": reward / 2, "answer_reward": 1.0}


def normalized(rewards, size, by_std=True, eps=1e-6):
    responses = [str(reward) for reward in rewards]
    return toolkit.compute_group_normalized_rewards(
        lambda response, _: {"reward": float(response)},
        responses,
        ["42"] * len(rewards),
        size,
        eps,
        by_std,
    )


def test_group_normalized_rewards_match_the_assignment():
    responses = [f"hmm I think ths answer is {i}" for i in range(8)]
    out, raw, metadata = toolkit.compute_group_normalized_rewards(
        reward_fn=sha_reward,
        rollout_responses=responses,
        repeated_ground_truths=["42"] * 8,
        group_size=4,
        advantage_eps=1e-6,
        normalize_by_std=True,
    )
    assert raw.tolist() == pytest.approx([0.2, 0.5, 0, 0.4, 0.9, 0.7, 0.2, 0])
    assert raw.dtype == out.dtype == torch.float32
    expected = [-0.33824, 1.01472, -1.24021, 0.56373, 1.07062, 0.59479, -0.59479, -1.07062]
    assert out.tolist() == pytest.approx(expected, abs=0.6e-5)
    centered, _, _ = toolkit.compute_group_normalized_rewards(
        sha_reward, responses, ["42"] * 8, 4, 1e-6, False
    )
    assert centered.tolist() == pytest.approx(
        [-0.075, 0.225, -0.275, 0.125, 0.45, 0.25, -0.25, -0.45], abs=1e-6
    )
    assert metadata["mean"] == pytest.approx(0.3625)
    assert metadata["min"] == 0.0
    assert metadata["max"] == pytest.approx(0.9)
    assert metadata["std"] == pytest.approx(float(torch.std(raw)))
    assert metadata["zero_variance"] == 0.0
    assert metadata["format_reward"] == pytest.approx(0.18125) and metadata["answer_reward"] == 1.0


def test_group_normalized_rewards_edge_cases():
    flat, _, metadata = normalized([0.1] * 3 + [0, 1, 1], 3)
    assert flat[:3].tolist() == [0, 0, 0]
    assert flat[3:].sum().abs() < 1e-6
    assert metadata["zero_variance"] == 0.5
    assert "answer_reward" not in metadata
    for by_std in (True, False):
        alone, raw, metadata = normalized([0.5, 2.0], 1, by_std)
        assert alone.tolist() == [0, 0]
        assert raw.tolist() == [0.5, 2.0]
        assert metadata["zero_variance"] == 1.0
    with_eps, _, _ = normalized([0.0, 1.0], 2, eps=1.0)
    expected = 0.5 / (1 + math.sqrt(0.5))
    assert with_eps.tolist() == pytest.approx([-expected, expected])
    for rewards, size in (([1, 2, 3], 2), ([], 2), ([1, 2], 0)):
        with pytest.raises(ValueError, match="group_size"):
            normalized(rewards, size)
    with pytest.raises(ValueError, match="3 responses for 1 ground truths"):
        toolkit.compute_group_normalized_rewards(sha_reward, ["a"] * 3, ["b"], 3, 1e-6, True)
    for size in (1, 2):
        with pytest.raises(ValueError, match="rewards"):
            normalized(["nan", 1.0], size)


def test_naive_policy_gradient_loss():
    policy, _, _, rewards, _ = fixture()
    loss = toolkit.compute_naive_policy_gradient_loss(rewards, policy)
    assert torch.equal(loss, -rewards * policy)
    square = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"\(3, 1\)"):  # (3,) would broadcast as a row
        toolkit.compute_naive_policy_gradient_loss(torch.ones(3), square)


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "grad", "clipped"),
    [
        (1, 0.5, -0.5, -0.5, False),
        (1, 1.5, -1.2, 0, True),
        (-1, 0.5, 0.8, 0, True),
        (-1, 1.5, 1.5, 1.5, False),
        (1, 1, -1, -1, False),
    ],
)
def test_clip_loss_matches_values_computed_by_hand(advantage, ratio, loss, grad, clipped):
    old = torch.full((1, 3), -2.0, dtype=torch.float64, requires_grad=True)
    new = (old.detach() + math.log(ratio)).requires_grad_()
    values, metadata = toolkit.compute_grpo_clip_loss(
        torch.tensor([[float(advantage)]]).double(), new, old, 0.2
    )
    values.sum().backward()
    assert values.tolist()[0] == pytest.approx([loss] * 3)
    assert new.grad.tolist()[0] == pytest.approx([grad] * 3)
    assert old.grad is None and metadata["clipped"].tolist() == [[clipped] * 3]


def test_loss_types_and_their_required_arguments():
    policy, old, _, rewards, advantages = fixture()
    everything = {
        "raw_rewards": rewards,
        "advantages": advantages,
        "old_log_probs": old,
        "cliprange": 0.5,
    }
    expected = {
        "no_baseline": -rewards * policy,
        "reinforce_with_baseline": -advantages * policy,
        "grpo_clip": toolkit.compute_grpo_clip_loss(advantages, policy, old, 0.5)[0],
        "grpo_no_clip": -advantages * (policy - old).exp(),
    }
    needs = {
        "no_baseline": {"raw_rewards"},
        "reinforce_with_baseline": {"advantages"},
        "grpo_clip": {"advantages", "old_log_probs", "cliprange"},
        "grpo_no_clip": {"advantages", "old_log_probs"},
    }
    for kind, values in expected.items():
        out, metadata = toolkit.compute_policy_gradient_loss(
            policy_log_probs=policy, loss_type=kind, **everything
        )
        torch.testing.assert_close(out, values, rtol=1e-6, atol=1e-7)
        assert set(metadata) == ({"clipped"} if "clip" in kind else set())
        for name in everything:
            missing = {**everything, name: None}
            if name in needs[kind]:
                with pytest.raises(ValueError, match=f"{kind} needs {name}"):
                    toolkit.compute_policy_gradient_loss(policy, kind, **missing)
            else:
                toolkit.compute_policy_gradient_loss(policy, kind, **missing)
    with pytest.raises(ValueError, match=r"loss_type.*grpo_clip"):
        toolkit.compute_policy_gradient_loss(policy, "grpo_clp", **everything)


def test_infinite_clip_range_is_no_clip_and_ratio_one_is_reinforce():
    policy, old, mask, _, advantages = fixture()
    wide = toolkit.compute_policy_gradient_loss(
        policy, "grpo_clip", None, advantages, old, math.inf
    )[0]
    unclipped = toolkit.compute_policy_gradient_loss(policy, "grpo_no_clip", None, advantages, old)[
        0
    ]
    assert torch.equal(wide, unclipped)
    grads = []
    for kind in ("grpo_clip", "reinforce_with_baseline"):
        x = policy.clone().requires_grad_()
        toolkit.grpo_microbatch_train_step(
            x, mask, 1, kind, advantages=advantages, old_log_probs=policy, cliprange=0.2
        )
        grads.append(x.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_grpo_step_matches_the_assignment():
    policy, old, mask, rewards, advantages = fixture()
    policy.requires_grad_()
    loss, metadata = toolkit.grpo_microbatch_train_step(
        policy_log_probs=policy,
        response_mask=mask,
        gradient_accumulation_steps=2,
        loss_type="grpo_clip",
        raw_rewards=rewards,
        advantages=advantages,
        old_log_probs=old,
        cliprange=0.1,
    )
    assert loss.item() == pytest.approx(0.00440072, abs=0.6e-8) and not loss.requires_grad
    assert policy.grad[mask].any() and not policy.grad[~mask].any()
    assert metadata["clip_fraction"] == pytest.approx(
        float(metadata["clipped"][mask].float().mean())
    )


@pytest.mark.parametrize(("constant", "rows"), [(None, (2, 2)), (7, (8 / 7, 2))])
def test_dr_grpo_divides_by_a_constant(constant, rows):
    """The handout's example: lengths 4 and 7 of 7, all values 2.

    The means are (2, 2), the normalized sums (1.1429, 2).
    """
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    log_probs = torch.full((2, 7), 2.0, requires_grad=True)
    loss, _ = toolkit.grpo_microbatch_train_step(
        log_probs,
        mask,
        3,
        "no_baseline",
        raw_rewards=-torch.ones(2, 1),
        constant_normalize_factor=constant,
    )
    assert loss.item() == pytest.approx(sum(rows) / 2 / 3)


@pytest.mark.parametrize("constant", [None, 5.0])
@pytest.mark.parametrize("step", ["sft", "grpo"])
def test_micro_batches_give_the_gradient_of_the_full_batch(step, constant):
    """k micro-batches of B rows give the gradient of one batch of kB; one row has no response."""
    policy = draw(torch.randn, 6, 8).double()
    mask = draw(torch.rand, 6, 8) > 0.5
    mask[3] = False
    advantages = draw(torch.randn, 6, 1).double()

    def run(rows, k):
        x = policy[rows].clone().requires_grad_()
        if step == "sft":
            loss, _ = toolkit.sft_microbatch_train_step(x, mask[rows], k, constant or 1.0)
        else:
            loss, _ = toolkit.grpo_microbatch_train_step(
                x,
                mask[rows],
                k,
                "reinforce_with_baseline",
                advantages=advantages[rows],
                constant_normalize_factor=constant,
            )
        return loss, x.grad

    full_loss, gradient = run(slice(0, 6), 1)
    parts = [run(slice(i, i + 2), 3) for i in (0, 2, 4)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), full_loss)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), gradient)
    assert full_loss.isfinite() and not gradient[3].any() and gradient[2][mask[2]].all()


def test_zero_accumulation_steps_are_refused():
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        toolkit.sft_microbatch_train_step(
            torch.zeros(1, 1, requires_grad=True), torch.ones(1, 1), 0
        )


# ---- shared code


def test_arithmetic_is_the_code_of_training(monkeypatch):
    from postgrad.algorithms import advantages, entropy, losses, masked, preference
    from postgrad.verifiers.grading import answers, choice

    assert toolkit.masked_mean is masked.masked_mean
    assert toolkit.masked_normalize is masked.masked_normalize
    assert (steps.grpo, steps.ppo_clip, steps.policy_gradient) == (
        advantages.grpo,
        losses.ppo_clip,
        losses.policy_gradient,
    )
    assert (supplement.dpo, supplement.choice, supplement.last_number) == (
        preference.dpo,
        choice.choice,
        answers.last_number,
    )
    monkeypatch.setattr(entropy, "entropy", lambda logits: "entropy")
    monkeypatch.setattr(entropy, "selective_log_softmax", lambda *_, chunk: chunk)
    assert toolkit.compute_entropy(torch.zeros(1)) == "entropy"
    assert toolkit.selective_log_softmax(None, None) == 128
    assert toolkit.selective_log_softmax(None, None, chunk=7) == 7


def test_any_module_that_returns_logits_is_accepted():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 5)

        def forward(self, input_ids):
            return SimpleNamespace(logits=self.table(input_ids))

    model = Table()
    ids = torch.tensor([[0, 1, 2]])
    out = toolkit.get_response_log_probs(
        model, ids, torch.tensor([[1, 2, 3]]), return_token_entropy=True
    )
    expected = model.table.weight.log_softmax(-1)[[0, 1, 2], [1, 2, 3]]
    torch.testing.assert_close(out["log_probs"][0], expected)

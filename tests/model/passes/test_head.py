"""The chunked head against plain log_softmax in float64, without the full logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from postgrad.model.passes import head
from postgrad.model.passes.head import token_outputs, top_logprobs
from postgrad.model.passes.support import LogitTransform

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def inputs(dtype=torch.float64, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (
        torch.randn(tokens, width, generator=generator, dtype=torch.float64)
        .mul(2)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden, weight, targets


def plain_outputs(hidden, weight, targets, temperature):
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    return (
        distribution.log_prob(targets),
        distribution.entropy(),
        distribution.probs.square().sum(-1),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100, None])
def test_values_equal_log_softmax_for_any_chunk(chunk, temperature):
    hidden, weight, targets = inputs()
    ours = token_outputs(hidden, weight, targets, temperature, chunk)
    expected = plain_outputs(hidden, weight, targets, temperature)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("uses", ["logprobs", "entropy", "both"])
def test_gradients_equal_those_of_log_softmax_for_any_chunk(chunk, temperature, uses):
    hidden, weight, targets = inputs(seed=1)
    share = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    share = share * torch.tensor([[uses != "entropy"], [uses != "logprobs"]])

    def gradients(logprobs, entropy):
        terms = [share[0] @ logprobs] * (uses != "entropy") + [share[1] @ entropy] * (
            uses != "logprobs"
        )
        return torch.autograd.grad(sum(terms), (hidden, weight))

    ours = token_outputs(hidden, weight, targets, temperature, chunk)
    actual = gradients(ours.logprobs, ours.entropy)
    expected = gradients(*plain_outputs(hidden, weight, targets, temperature)[:2])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    hidden, weight, targets = inputs(tokens=3, width=3, vocabulary=4)
    assert torch.autograd.gradcheck(
        lambda h, w: token_outputs(h, w, targets, 0.8, 2)[:2], (hidden, weight)
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_bias_is_part_of_the_logits(softcap):
    hidden, weight, targets = inputs(seed=3)
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    logits = 0.5 * (hidden @ weight.T + bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = torch.distributions.Categorical(logits=logits / 0.8)
    transform = LogitTransform(0.5, softcap)
    ours = token_outputs(hidden, weight, targets, 0.8, 3, transform, bias=bias)
    torch.testing.assert_close(ours.logprobs, expected.log_prob(targets))
    torch.testing.assert_close(ours.entropy, expected.entropy())
    parts = (hidden, weight, bias)
    actual = torch.autograd.grad((ours.logprobs + 0.3 * ours.entropy).sum(), parts)
    truth = (expected.log_prob(targets) + 0.3 * expected.entropy()).sum()
    for a, b in zip(actual, torch.autograd.grad(truth, parts), strict=True):
        torch.testing.assert_close(a, b)
    ids, logprobs = top_logprobs(hidden, weight, 2, VOCABULARY, 0.8, transform, bias=bias)
    best = expected.logits.topk(2)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(logprobs.double(), best.values, rtol=0, atol=1e-6)


def test_a_frozen_head_or_frozen_states_get_no_gradient():
    hidden, weight, targets = inputs()
    token_outputs(hidden.detach(), weight, targets).logprobs.sum().backward()
    assert hidden.grad is None and weight.grad is not None
    weight.grad = None
    token_outputs(hidden, weight.detach(), targets).entropy.sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_sum_squares_carries_no_gradient():
    assert not token_outputs(*inputs()).sum_squares.requires_grad


def test_no_tokens_give_empty_outputs_and_zero_gradients():
    hidden, weight, targets = inputs(tokens=0)
    ours = token_outputs(hidden, weight, targets)
    assert ours.logprobs.shape == (0,)
    ours.logprobs.sum().backward()
    assert weight.grad is not None and float(weight.grad.abs().sum()) == 0.0


def test_a_token_of_probability_zero_gives_a_finite_entropy():
    hidden = torch.tensor([[1e4, 0.0]], requires_grad=True)
    weight = torch.eye(2).requires_grad_()
    ours = token_outputs(hidden, weight, torch.tensor([0]))
    (ours.logprobs + ours.entropy).sum().backward()
    assert ours.entropy.item() == 0.0
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_bfloat16_states_give_float32_outputs_close_to_float64():
    hidden, weight, targets = inputs(torch.bfloat16)
    ours = token_outputs(hidden, weight, targets)
    truth = plain_outputs(hidden.double(), weight.double(), targets, 1.0)
    assert ours.logprobs.dtype == ours.entropy.dtype == torch.float32
    torch.testing.assert_close(ours.logprobs.double(), truth[0], rtol=0, atol=1e-4)
    ours.logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_float32_gradients_of_logits_are_multiplied_with_bfloat16_states(monkeypatch):
    """As on a GPU, where the gradients of several targets per token are float32."""
    monkeypatch.setattr(head, "has_float32_accumulation", lambda device: True)
    hidden, _, _ = inputs(torch.bfloat16)
    grad_logits = torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(3))
    total = torch.ones(VOCABULARY, WIDTH)
    head._add_product(total, grad_logits, hidden.detach())
    truth = 1 + grad_logits.double().T @ hidden.detach().double()
    torch.testing.assert_close(total.double(), truth, rtol=0.02, atol=0.05)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returned, and the most rows of logits."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.rows = 0
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
                is_logits = tensor.dim() == 2 and tensor.shape[1] == self.vocabulary
                if is_logits and tensor.shape[0] != WIDTH:
                    self.rows = max(self.rows, tensor.shape[0])
        return out


def test_full_logits_never_exist_in_forward_or_backward():
    tokens, vocabulary, chunk = 96, 4001, 8
    hidden, weight, targets = inputs(torch.float32, tokens=tokens, vocabulary=vocabulary)
    with LargestTensor(vocabulary) as chunked:
        ours = token_outputs(hidden, weight, targets, 0.9, chunk)
        (ours.logprobs.sum() + ours.entropy.sum()).backward()
    assert chunked.rows == chunk
    assert chunked.elements == max(chunk * vocabulary, vocabulary * WIDTH)
    with LargestTensor(vocabulary) as plain:  # the mode does see full logits
        plain_outputs(hidden, weight, targets, 0.9)
    assert plain.rows == tokens

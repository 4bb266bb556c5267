"""Replaying what top-p and top-k kept: log-probs, entropy and gradients over the kept ids alone."""

import math

import pytest
import torch

from postgrad.model.passes.head import token_outputs
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.model.passes.support import LogitTransform

PROBS = [0.5, 0.3, 0.1, 0.06, 0.04]
# Of three tokens: ids 0 and 1; the whole vocabulary; id 2 alone.
KEPT = SampledSupport(torch.tensor([2, 0, 1]), torch.tensor([0, 1, 2]))
TARGETS = torch.tensor([1, 1, 2])
# Worked out by hand: 0.3 / 0.8, 0.3 / 1, 0.1 / 0.1.
EXPECTED = [math.log(0.375), math.log(0.3), 0.0]


def outputs(chunk: int = 8, temperature: float = 1.0, transform: LogitTransform | None = None):
    """The outputs of three tokens with the probabilities PROBS at this temperature."""
    hidden = torch.full((3, 1), temperature, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(PROBS, dtype=torch.float64).log()[:, None].requires_grad_()
    options = {} if transform is None else {"transform": transform}
    result = token_outputs(hidden, weight, TARGETS, temperature, chunk, kept=KEPT, **options)
    return result, hidden, weight


@pytest.mark.parametrize(("chunk", "temperature"), [(8, 1.0), (1, 1.0), (2, 0.7)])
def test_log_probs_and_entropy_are_over_the_kept_ids(chunk, temperature):
    result, _, _ = outputs(chunk, temperature)
    assert result.logprobs.tolist() == pytest.approx(EXPECTED, abs=1e-9)
    two = -(0.625 * math.log(0.625) + 0.375 * math.log(0.375))
    full = -sum(p * math.log(p) for p in PROBS)
    assert result.entropy.tolist() == pytest.approx([two, full, 0.0], abs=1e-9)
    squares = [0.625**2 + 0.375**2, sum(p * p for p in PROBS), 1.0]
    assert result.sum_squares.tolist() == pytest.approx(squares, abs=1e-9)


@pytest.mark.parametrize("chunk", [8, 1])
def test_the_gradient_is_zero_at_ids_that_were_not_kept(chunk):
    """d log p / d logit = onehot - p over the kept ids; hidden is 1, so it is the weight's."""
    result, _, weight = outputs(chunk)
    result.logprobs[0].backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([-0.625, 0.625, 0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_equal_those_of_plain_logits(softcap):
    """Log-probs and entropy against autograd over logits with -inf at the excluded ids."""
    transform = LogitTransform(scale=1.0, softcap=softcap)
    result, hidden, weight = outputs(2, transform=transform)
    (result.logprobs.sum() + 0.3 * result.entropy.sum()).backward()
    found = (hidden.grad, weight.grad)
    plain_hidden = hidden.detach().requires_grad_()
    plain_weight = weight.detach().requires_grad_()
    logits = plain_hidden @ plain_weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    kept = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]).bool()
    log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    (log_p.gather(1, TARGETS[:, None]).sum() + 0.3 * entropy.sum()).backward()
    for one, two in zip(found, (plain_hidden.grad, plain_weight.grad), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def test_without_the_mask_the_numbers_differ(monkeypatch):
    monkeypatch.setattr(SampledSupport, "exclude_others", lambda kept, logits: logits)
    result, _, _ = outputs()
    assert abs(result.logprobs.tolist()[0] - EXPECTED[0]) > 0.2

"""The head over slices of the vocabulary gives the numbers of the whole head."""

import pytest
import torch
from ranks import run_on_ranks

from postgrad.model.parallel.groups import Group
from postgrad.model.passes import vocabulary
from postgrad.model.passes.head import token_outputs, top_logprobs
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.model.passes.support import LogitTransform
from postgrad.model.passes.vocabulary import VocabularySlice

NUM_IDS = 18
NUM_TOKENS = 7
KEPT = SampledSupport(
    torch.tensor([2, 0, 3, 1, 1, 2, 4]), torch.tensor([0, 17, 1, 2, 3, 9, 16, *range(6)])
)
CASES = {
    "one target": {},
    "several targets": {"num_targets": 5},
    "kept ids": {"kept": KEPT},
    "capped": {"transform": LogitTransform(0.5, softcap=3.0)},
    "bias": {"has_bias": True},
}


def compute(case, part: VocabularySlice | None = None) -> list[torch.Tensor]:
    """Return log-probs, entropies and sums of squares, then the gradients of states and head."""
    options = dict(case)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, 6, generator=generator).requires_grad_()
    head = (2 * torch.randn(NUM_IDS, 7, generator=generator)).requires_grad_()  # weight, bias
    shape = (NUM_TOKENS, options.pop("num_targets")) if "num_targets" in options else (NUM_TOKENS,)
    targets = torch.randint(NUM_IDS, shape, generator=generator)
    if KEPT is options.get("kept"):
        targets = torch.tensor([17, 5, 1, 9, 16, 0, 2])
    own = head
    if part is not None:
        padding = head.new_ones(-NUM_IDS % part.group.size, 7)  # would be seen if it were read
        rows = torch.cat([head, padding]).chunk(part.group.size)
        own = rows[part.group.rank]
    if options.pop("has_bias", False):
        options["bias"] = own[:, 6]
    outputs = token_outputs(hidden, own[:, :6], targets, 0.7, chunk=3, vocabulary=part, **options)
    scales = torch.arange(1.0, 1 + outputs.logprobs.numel()).view(shape)
    (outputs.logprobs * scales).sum().add((outputs.entropy * outputs.entropy).sum()).backward()
    return [t.detach() for t in (*outputs, hidden.grad, head.grad)]


def compute_top(part: VocabularySlice | None = None) -> list[torch.Tensor]:
    """Return ids and log-probs of the seven most likely of the first 16 ids."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, 6, generator=generator)
    head = torch.randn(NUM_IDS, 7, generator=generator)  # weight, bias
    if part is not None:
        head = torch.cat([head, head.new_full((9, 7), 99.0)])[part.first :]
    return list(top_logprobs(hidden, head[:, :6], 7, 16, vocabulary=part, bias=head[:, 6]))


def compute_slices() -> dict[str, list[torch.Tensor]]:
    """Return the same from this rank's slice; the head's gradient is that of the slice."""
    group = Group(torch.distributed.get_rank(), torch.distributed.get_world_size())
    size = -(-NUM_IDS // group.size)
    first = group.rank * size
    part = VocabularySlice(group, first, min(size, NUM_IDS - first), NUM_IDS)
    results: dict[str, list[torch.Tensor]] = {}
    for name, case in CASES.items():
        *results[name], head_gradient = compute(case, part)
        results[name].append(group.sum(head_gradient))
    results["top"] = compute_top(part)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_slices_give_the_numbers_of_the_whole_head(size):
    for results in run_on_ranks(size, compute_slices):
        for name, case in CASES.items():
            for actual, expected in zip(results[name], compute(case), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        ids, logprobs = compute_top()
        assert torch.equal(results["top"][0], ids)
        torch.testing.assert_close(results["top"][1], logprobs)


def compute_with_doubled_entropies() -> list[torch.Tensor]:
    """Compute with slices whose entropies are twice too large."""
    join = VocabularySlice.join

    def broken(self, targets, logprobs, entropy, sum_squares, lse):
        return join(self, targets, logprobs, 2 * entropy, sum_squares, lse)

    vocabulary.VocabularySlice.join = broken
    return compute_slices()["one target"]


def test_a_wrong_entropy_of_a_slice_is_seen():
    expected = compute({})
    for results in run_on_ranks(2, compute_with_doubled_entropies):
        torch.testing.assert_close(results[0], expected[0])
        assert not torch.allclose(results[1], expected[1], atol=1e-2)

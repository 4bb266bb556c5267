"""The chunked head on a GPU: every kind of target and logits, in float32 and bfloat16."""

import pytest
import torch

from postgrad.model.passes.head import token_outputs
from postgrad.model.passes.sampled_support import SampledSupport
from postgrad.model.passes.support import LogitTransform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOKENS, WIDTH, VOCABULARY = 40, 64, 1000
KINDS = (
    "one target",
    "several targets",
    "kept ids",
    "capped logits",
    "bias",
    "bias, capped logits",
)


def compute(
    kind: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> list[torch.Tensor]:
    """Return the log-probs and entropies, and the gradients of a weighted sum of them."""
    generator = torch.Generator().manual_seed(1)
    shape = (TOKENS, 5) if kind == "several targets" else (TOKENS,)
    targets = torch.randint(VOCABULARY, shape, generator=generator)
    kept = None
    if kind == "kept ids":
        others = torch.randint(VOCABULARY, (TOKENS, 7), generator=generator)
        ids = torch.cat([targets[:, None], others], 1)
        rows = [row.unique() for row in ids]
        counts = torch.tensor([len(row) for row in rows])
        kept = SampledSupport(counts, torch.cat(rows).to(hidden.device))
    softcap = 5.0 if kind.endswith("capped logits") else None
    weights = torch.randn(shape, generator=generator).to(hidden)
    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    options = {}
    if kind.startswith("bias"):
        options["bias"] = bias.clone().requires_grad_()
    out = token_outputs(
        *inputs,
        targets.to(hidden.device),
        temperature=0.8,
        chunk=16,
        transform=LogitTransform(softcap=softcap),
        kept=kept,
        **options,
    )
    total = (out.logprobs * weights).sum() + 0.1 * out.entropy.sum()
    return [out.logprobs, out.entropy, *torch.autograd.grad(total, [*inputs, *options.values()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_float64_on_the_cpu(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) / 4).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype)
    expected = compute(kind, hidden.double(), weight.double(), bias.double())
    actual = compute(kind, hidden.cuda(), weight.cuda(), bias.cuda())
    bound = 2e-5 if dtype == torch.float32 else 0.02
    for ours, truth in zip(actual, expected, strict=True):
        assert torch.isfinite(ours).all()
        error = (ours.double().cpu() - truth).abs().max() / truth.abs().max()
        assert error < bound, float(error)

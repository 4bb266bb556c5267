"""Packed passes and paged decoding of every captured family in Triton's interpreter.

Log-probs, gradients and sampled tokens are those of the stock transformers model, in float32.
The interpreter takes time per token, so blocks and pages have 16 tokens here. test_paged.py has
those of 64 that a GPU uses.
"""

import json
from pathlib import Path

import pytest
from interpreted import run_interpreted

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
from types import SimpleNamespace
import torch
sys.path.insert(0, sys.argv[1])
from postgrad.model.passes import packing
packing.BLOCK_M = packing.BLOCK_N = 16  # also the tokens of a page; the other modules copy it
from postgrad.rollout.native import tables
tables.PREFILL_ROWS = 16
from families import make_family
from postgrad.model.passes.attention import NAME, register_attention
from postgrad.model.kernels.install import install_kernels
from postgrad.model.passes.layout import make_packed_micro_batches
from postgrad.model.passes.support import support_of
from postgrad.model.views import hidden_states
from postgrad.model.port import after
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.decoder import Decoder, unsupported_reason
from postgrad.rollout.native.scheduler import Scheduler
from postgrad.rollout.native.store_pages import PageStore
from postgrad.rollout.native.engine import NativeStream
from postgrad.types import Batch, Trajectory

register_attention()
changes = json.loads(sys.argv[3])
stock, model = (make_family(sys.argv[2], **changes).eval() for _ in range(2))
for one in (stock, model):  # norms with weights that differ, and heads with a bias
    one.lm_head.bias = torch.nn.Parameter(torch.zeros(len(one.lm_head.weight)))
    generator = torch.Generator().manual_seed(0)
    for p in one.parameters():
        if p.dim() == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=generator)
model.set_attn_implementation(NAME)
install_kernels(model)
assert support_of(model).passes == "packed"
assert not unsupported_reason(model), unsupported_reason(model)

# Decoding: prompts and responses cross pages of 16 tokens and the window. The first row takes a
# second turn, which continues in its pages.
decoder = Decoder(model, torch.tensor([17]))
engine = SimpleNamespace(
    model=model, tokenizer=None, max_context=512, weights_version=0, step=Scheduler.step
)
prefilled = []
hook = model.base_model.register_forward_pre_hook(
    lambda module, args, kwargs: prefilled.append(kwargs["input_ids"].numel()), with_kwargs=True
)


def decode():
    requests = {0: Request([i * 7 % 16 for i in range(19)], [1]), 1: Request([3, 5], [4, 5], 2)}
    rows, sampled = [], []
    store = PageStore(decoder, 4, lambda: 8 * decoder.page_bytes(), 512, joins=True)
    with NativeStream(engine, Sampling(0.9, 3), store, store) as stream:
        stream.add(requests[0], [(0, 0)])
        stream.add(requests[1], [(1, 0), (1, 1)])
        while stream.busy:
            for key, done in stream.poll():
                group = 2 if key == (0, 0) and 2 in requests else key[0]
                prompt = requests[group].prompt
                rows.append(Trajectory(f"p{group}", prompt, done.tokens, group, key[1]))
                sampled += done.logprobs
                if group == 0:
                    requests[2] = Request([*prompt, *done.tokens, 5, 9, 2], [7])
                    stream.add(requests[2], [key])
    return rows, sampled


rows, sampled = decode()
assert prefilled == [18 + 1, 3], prefilled
PageStore.prefills_by_rows = True  # as where decode steps are captured
rows_again, sampled_again = decode()
hook.remove()
assert prefilled == [18 + 1, 3], "decode steps compute the prompts"
for again, row in zip(rows_again, rows, strict=True):
    assert list(again.response) == list(row.response)
torch.testing.assert_close(torch.tensor(sampled_again), torch.tensor(sampled), rtol=0, atol=1e-5)
batch = Batch.of(rows)


def stock_outputs(batch):
    columns = []
    for prompt, response in zip(batch.prompt.split(), batch.response.split(), strict=True):
        ids = torch.cat([prompt, response])[None]
        logits = stock(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.9
        columns.append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
    return torch.cat(columns)


expected = stock_outputs(batch)
torch.testing.assert_close(torch.tensor(sampled), expected.detach(), rtol=0, atol=1e-4)
assert len(sampled) >= 5

# The packed pass and its gradient, over the same rows.
weights = torch.arange(1.0, 1 + len(expected)) / len(expected)
(expected * weights).sum().backward()
(micro,) = make_packed_micro_batches(batch, 4096)
where = batch.response.positions(torch.tensor(micro.rows))
targets = batch.response.values[where]
view = after(model.config.num_hidden_layers)  # block by block, as captured passes run
states = hidden_states(model, micro.ids, micro.positions, None, view, micro.packing)
logits = model.lm_head(states[0][micro.gather]) / 0.9
logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
torch.testing.assert_close(logprobs, expected[where], rtol=0, atol=1e-4)
(logprobs * weights[where]).sum().backward()
largest = max(float(p.grad.abs().max()) for p in stock.parameters())
for (name, p), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
    torch.testing.assert_close(
        p.grad, theirs.grad, rtol=1e-3, atol=1e-4 * largest, msg=lambda text: name + text
    )
print("same")
"""

FAMILIES = {
    "mistral": {"sliding_window": 18},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "gemma3_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 20,
        "sliding_window": 4,
    },
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_decoding_and_packed_passes_are_those_of_the_stock_model(model_type):
    tests = str(Path(__file__).parents[1])
    arguments = [tests, model_type, json.dumps(FAMILIES[model_type])]
    run_interpreted(PROGRAM, *arguments)

"""Captured passes without a GPU: Triton's interpreter runs the kernels, replaying calls the passes.

tests/gpu/test_graphs.py checks that a CUDA graph gives the same results.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import save_family
from interpreted import run_interpreted
from tiny_runs import config_of, random_batch

from postgrad.cluster.host import build_host
from postgrad.model.passes.captured import MAX_BLOCK_OPERATIONS, padded_size
from postgrad.model.passes.layout import make_packed_micro_batches
from postgrad.model.passes.packing import num_tiles, padding_tiles

PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[2])
from tiny_runs import config_of, random_batch
from postgrad.config.schema import ModelConfig
from postgrad.methods import find_method
from postgrad.model.load.load import load
from postgrad.model.passes import captured
from postgrad.model.kernels.install import install_kernels
from postgrad.model.passes.layout import make_packed_micro_batches
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL, after

class FakeGraph:
    def __init__(self, step):
        self.step = step
    def replay(self):
        with torch.enable_grad():
            self.step()
    def pool(self):
        return None

def capture_graphs(steps, pool):
    for step in steps:  # the warm-up run
        step()
    return [FakeGraph(step) for step in steps]

captured.capture_graphs = capture_graphs
captured.padded_size = lambda tokens: -(-tokens // 8) * 8  # little padding: the interpreter is slow
results = []
for use_graphs in (False, True):
    loaded = load(ModelConfig(path=sys.argv[1], dtype="float32"), torch.device("cpu"))
    install_kernels(loaded.model)
    config = config_of("grpo", sys.argv[1])
    policy = LocalPolicy(config, loaded, find_method("grpo")(config).objective)
    if use_graphs:
        captured.supports_capture = lambda model: True
        masters = policy.optimizer.masters_by_id()
        policy.graph_cache = captured.GraphCache(policy.model, masters)
    tensors = []
    for view, seed in ((FULL, 1), (after(1), 3), (FULL, 1)):
        policy._freeze_unused(view)
        batch = random_batch(seed, groups=2, samples=2, longest_prompt=3, longest=4)
        for micro in make_packed_micro_batches(batch, 12):
            assert policy.graph_cache.accepts(micro) == use_graphs
            targets = batch.response.values[batch.response.positions(torch.tensor(micro.rows))]
            if len(tensors) == 0:
                with torch.no_grad():
                    tensors.append(policy.forward(micro, targets, view).logprobs)
            outputs = policy.forward(micro, targets, view)
            (outputs.logprobs * torch.arange(1.0, 1 + len(targets))).sum().backward()
        grads = {name: m.grad for name, m in policy.optimizer.masters.items()}
        tensors += [grads[name].clone() for name in sorted(grads) if grads[name] is not None]
        assert any(g is None for g in grads.values()) == (view != FULL)
        policy.optimizer.adam.zero_grad(set_to_none=True)
    results.append(tensors)
    if use_graphs:
        assert len(policy.graph_cache.captured) >= 3
assert len(results[0]) == len(results[1])
for a, b in zip(*results, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
assert max(float(a.abs().max()) for a in results[0]) > 1e-2
print("same")
"""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_captured_passes_give_the_gradients_of_eager_passes(tiny, tmp_path, model_type):
    """Llama, and Gemma 3 with a window and two kinds of rotary positions."""
    tests = str(Path(__file__).parents[2])
    if model_type != "llama":
        layer_types = ["sliding_attention", "full_attention"]
        tiny = save_family(
            tmp_path, model_type, num_hidden_layers=2, sliding_window=2, layer_types=layer_types
        )
    run_interpreted(PROGRAM, tiny, tests)


def test_padding_tiles_cover_each_token_once_and_attend_to_their_own_tile():
    packing = padding_tiles(100, 300, 6, torch.device("cpu"))
    query_tiles = packing.query_tiles.tolist()
    covered = [token for start, end, *_ in query_tiles for token in range(start, end)]
    assert covered == list(range(100, 300))
    for start, end, own_start, shared_start, shared_end in query_tiles:
        assert own_start == start
        assert shared_start == shared_end
        assert end - start <= 64
    assert packing.key_tiles.tolist() == [[start, end, end, end] for start, end, *_ in query_tiles]


def test_padded_sizes_are_few_and_add_little_padding():
    sizes = [padded_size(tokens) for tokens in range(1, 20_000)]
    for tokens, size in enumerate(sizes, 1):
        max_padding = max(256, tokens) if tokens <= 4096 else tokens // 4
        assert 0 <= size - tokens < max_padding
    assert padded_size(8192) == 8192
    assert padded_size(16384) == 16384
    assert len(set(sizes[:8192])) == 9
    assert all(size % 64 == 0 for size in sizes)
    assert [num_tiles(tokens) for tokens in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_short_passes_beside_long_ones_are_not_captured(tiny):
    """They would hold memory during rollouts, to save launches of one pass."""
    host = build_host(config_of("grpo", tiny))
    cache = host.policy.graph_cache
    cache.enabled = True
    cache.block_size = 10**9
    limit = int(MAX_BLOCK_OPERATIONS / (6 * cache.block_size))
    batch = random_batch(1, groups=2, samples=2)
    (short,) = make_packed_micro_batches(batch, 10**6)[:1]
    long = replace(short, ids=torch.zeros(1, limit + 1, dtype=torch.int64))
    assert short.num_tokens <= limit < long.num_tokens
    assert cache.plan_passes([short]) == [short] and cache.accepts(short)
    assert cache.plan_passes([long, short]) == [long, short]
    assert not cache.accepts(short) and not cache.accepts(long)
    assert cache.plan_passes([]) == [] and cache.accepts(short)
    micros = host.policy.micro_batches(batch)
    assert cache.largest_pass == max(micro.num_tokens for micro in micros)

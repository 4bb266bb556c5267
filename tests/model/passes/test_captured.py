"""Recorded passes without a GPU: Triton's interpreter runs the kernels, and a recording is played by calling what it recorded.

What is left to tests/gpu/test_graphs.py is whether a CUDA graph plays the same.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from postgrad.model.passes.captured import padded_size
from postgrad.model.passes.packing import num_tiles, padding_tiles

PROGRAM = """
import sys
import torch
sys.path.insert(0, sys.argv[2])
from world import config_of, random_batch
from postgrad.config.schema import ModelConfig
from postgrad.model.passes import captured as recorded
from postgrad.model.passes.kernels.install import install_kernels
from postgrad.model.passes.layout import make_packed_micro_batches
from postgrad.model.load import load
from postgrad.model.policy import LocalPolicy
from postgrad.model.views import FULL, after

class Played:
    def __init__(self, work):
        self.work = work
    def replay(self):
        with torch.enable_grad():
            self.work()
    def pool(self):
        return None

def capture_graphs(works, pool):
    for work in works:  # the trial run
        work()
    return [Played(work) for work in works]

recorded.capture_graphs = capture_graphs
recorded.padded_size = lambda tokens: -(-tokens // 8) * 8  # little padding: the interpreter is slow
from postgrad.methods import find_method
found = []
for played in (False, True):
    loaded = load(ModelConfig(path=sys.argv[1], dtype="float32"), torch.device("cpu"))
    install_kernels(loaded.model)
    config = config_of("grpo", sys.argv[1])
    policy = LocalPolicy(config, loaded, find_method("grpo")(config))
    graph_cache = policy.graph_cache
    if played:
        recorded.supports_capture = lambda model: True
        graph_cache = policy.graph_cache = recorded.GraphCache(policy.model, policy.optimizer.masters_by_id())
    numbers = []
    for view, seed in ((FULL, 1), (after(1), 3), (FULL, 1)):
        policy._freeze_unused(view)
        batch = random_batch(seed, groups=2, samples=2, longest_prompt=3, longest=4)
        for micro in make_packed_micro_batches(batch, 12):
            assert graph_cache.accepts(micro) == played
            targets = batch.response.values[batch.response.positions(torch.tensor(micro.rows))]
            if len(numbers) == 0:
                with torch.no_grad():
                    numbers.append(policy.forward(micro, targets, view).logprobs)
            told = policy.forward(micro, targets, view)
            (told.logprobs * torch.arange(1.0, 1 + len(targets))).sum().backward()
        grads = {name: m.grad for name, m in policy.optimizer.masters.items()}
        numbers += [grads[name].clone() for name in sorted(grads) if grads[name] is not None]
        assert any(g is None for g in grads.values()) == (view != FULL)
        policy.optimizer.adam.zero_grad(set_to_none=True)
    found.append(numbers)
    if played:
        assert len(graph_cache.captured) >= 3
assert len(found[0]) == len(found[1])
for a, b in zip(*found, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
assert max(float(a.abs().max()) for a in found[0]) > 1e-2
print("same")
"""


@pytest.mark.slow
def test_played_passes_give_the_gradients_of_plain_ones(tiny):
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tiny), tests],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=600,
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]


def test_padding_is_covered_once_and_sees_only_its_own_tile():
    packing = padding_tiles(100, 300, 6, torch.device("cpu"))
    covered = [at for first, end, *_ in packing.query_tiles.tolist() for at in range(first, end)]
    assert covered == list(range(100, 300))
    for first, end, own, shared, shared_end in packing.query_tiles.tolist():
        assert own == first and shared == shared_end and end - first <= 64
    assert packing.key_tiles.tolist() == [
        [first, end, end] for first, end, *_ in packing.query_tiles.tolist()
    ]


def test_sizes_leave_little_padding_and_are_few():
    sizes = [padded_size(n) for n in range(1, 20_000)]
    assert all(
        n <= size and size - n < (max(256, n) if n <= 4096 else n // 4)
        for n, size in enumerate(sizes, 1)
    )
    assert padded_size(8192) == 8192 and padded_size(16384) == 16384
    assert len(set(sizes[:8192])) == 9 and all(size % 64 == 0 for size in sizes)
    assert [num_tiles(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]

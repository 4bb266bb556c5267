"""Real vLLM on Ray: beside the trainers, on devices of its own, and divided over workers.

`make test-vllm` runs these tests. They start up to seven processes with vLLM's CPU build.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiny_runs import (
    config_of,
    metrics_of,
    random_batch,
    same_completions,
    sharpened,
    toy_run,
)

from postgrad.cluster.backends import open_models
from postgrad.cluster.engine_pool import MAX_RESTARTS
from postgrad.model.load.tiny import make_tiny
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.training.driver import train
from postgrad.training.report import Reporter
from postgrad.types import Batch, Trajectory

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray"),
]
SMALL = (
    *toy_run(steps=2),
    "rollout.engine=vllm",
    "rollout.max_rows=16",
    "rollout.cache_gib=0.25",
    "optimizer.lr=1e-2",
    "cluster.wait_s=240",
)
REQUESTS = [Request([1 + i, 2, 3], [10 * i, 10 * i + 1]) for i in range(4)]
SAMPLING = Sampling(1.0, 8)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Starts one Ray for the module; it has more CPUs than the machine, so workers share cores."""
    from postgrad.cluster.ray_connection import import_ray, start_local

    before = dict(os.environ)
    ray = import_ray()
    start_local(ray, num_cpus=6)
    yield ray
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Four heads and two key-value heads, so that two workers can divide them."""
    return sharpened(make_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0))


def run(model: Path, folder: Path, name: str, *overrides: str) -> Path:
    """Return the folder of a run whose reward differs within every group."""
    (folder / "mine.py").write_text(
        "def varied(response, problem):\n    return sum(map(ord, response)) % 7 / 7\n"
    )
    verifier = f"reward.verifier={folder / 'mine.py'}:varied"
    own = (*SMALL, "cluster=ray", f"runs={folder}", f"name={name}", verifier, *overrides)
    return train(config_of("grpo", model, *own), Reporter()).folder


def rollouts_of(folder: Path, step: int) -> tuple[list[int], list[float]]:
    """Return the tokens of a step and the log-probs that they were sampled with."""
    table = pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet").to_pydict()
    tokens = [token for row in table["response"] for token in row]
    return tokens, [logprob for row in table["behavior_logprobs"] for logprob in row]


def gap(policy: Any, completions: Sequence[Sequence[Completion]]) -> float:
    """Return the largest distance of the engine's log-probs from the trainer's."""
    rows: list[Trajectory] = []
    for i, group in enumerate(completions):
        for j, one in enumerate(group):
            prompt = REQUESTS[i].prompt
            row = Trajectory(str(i), prompt, one.tokens, i, j, behavior_logprobs=one.logprobs)
            rows.append(row)
    batch = Batch.of(rows)
    distance = batch.tokens["behavior_logprobs"] - policy.logprobs(batch)["logprobs"]
    return float(distance.abs().max())


def shared_memory_names() -> set[str]:
    """Return the names of shared memory of vLLM's ranks, which a killed process would leave."""
    names = [path.name for path in Path("/dev/shm").iterdir()]
    return {name for name in names if "cpushm" in name or name.startswith("psm_")}


def slice_sizes(actor: Any) -> list[tuple[int, int]]:
    """Return the rows of the embedding and of a block's queries, keys and values that vLLM has."""
    llm = actor.ports["engine"][1].llm
    return llm.apply_model(
        lambda model: (
            len(model.model.embed_tokens.weight),
            model.model.layers[0].self_attn.qkv_proj.output_size_per_partition,
        )
    )


def test_an_engine_in_each_worker_and_one_divided_over_both(model, tmp_path):
    folders: list[Path] = []
    for size in (1, 2):
        overrides = ("cluster.workers=2", f"rollout.tensor_parallel={size}")
        folder = run(model, tmp_path, f"size{size}", *overrides)
        lines = metrics_of(folder)
        assert lines[0]["engine/start_gap_max"] < 1e-4
        steps = [line for line in lines if "loss" in line]
        assert len(steps) == 2 and min(line["grad_norm"] for line in steps) > 0
        assert max(line["engine/gap_max"] for line in steps) < 1e-4, "new weights arrived"
        folders.append(folder)
    # The first step only: Adam's first update turns rounding differences of gradients near 0
    # into differences of the weights.
    (tokens, logprobs), (divided_tokens, divided) = (rollouts_of(f, step=1) for f in folders)
    assert tokens == divided_tokens
    assert divided == pytest.approx(logprobs, abs=1e-5)


def test_separate_engines_of_two_workers_take_weights_and_are_restarted(model, cluster):
    overrides = ("cluster=ray", "cluster.workers=2", "cluster.engines=2")
    config = config_of("grpo", model, *SMALL, *overrides, "rollout.tensor_parallel=2")
    names_before = shared_memory_names()
    with open_models(config) as models:
        assert shared_memory_names() <= names_before
        engines = models.engine.caller
        sizes = [cluster.get(w.handle.__ray_call__.remote(slice_sizes)) for w in engines.workers]
        assert sizes == [[(32, 128)]] * 4, "half of 64 rows, and of 256"
        assert gap(models.policy, models.engine.generate(REQUESTS, SAMPLING)) < 1e-4
        models.policy.update(random_batch(1), 1)
        assert gap(models.policy, models.engine.generate(REQUESTS, SAMPLING)) > 0.01
        models.engine.publish(models.policy.weights())
        sampled = models.engine.generate(REQUESTS, SAMPLING)
        assert gap(models.policy, sampled) < 1e-4
        cluster.kill(engines.workers[1].handle)
        assert same_completions(models.engine.generate(REQUESTS, SAMPLING), sampled)
        assert engines.restarts_left == MAX_RESTARTS - 1

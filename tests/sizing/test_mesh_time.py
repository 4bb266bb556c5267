"""The time of a step on a mesh: what ranks send, what links take, one device as a mesh of one."""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
from families import save_family
from parallel import EXPERT, SEQUENCE, TENSOR, needs_experts, sharded_policy
from ranks import run_on_ranks
from sent_bytes import SentBytes
from tiny_runs import config_of, random_batch
from transformers import Qwen3Config, Qwen3MoeConfig

from postgrad.model.load import model_config
from postgrad.sizing.devices import find_gpu
from postgrad.sizing.gpu_time import GpuClock, Work
from postgrad.sizing.mesh_memory import check_model_mesh, count_parameters, sent_sizes
from postgrad.sizing.mesh_time import PUBLISH, MeshClock, elapsed
from postgrad.sizing.plan import GroupLengths, Plan, Workload, lay_out_step
from postgrad.sizing.traffic import Links, Mesh, count_traffic, expected_owners, traffic_s

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import simulate_scale  # pyright: ignore[reportMissingImports]

RECOMPUTED = "model.activation_checkpointing=true"
MESHES = {
    "fsdp": [],
    "fsdp, recomputed": [RECOMPUTED],
    "hybrid sharding": ["cluster.shard_workers=2"],
    "tensor": [TENSOR],
    "tensor, recomputed": [TENSOR, RECOMPUTED],
    "sequence": [SEQUENCE],
    "tensor and sequence": [TENSOR, SEQUENCE],
    "experts": [EXPERT],
}
H200 = find_gpu("h200")


def measure(folder, meshes) -> list[tuple[float, float, float, float, float]]:
    """Return the bytes that this rank sends in an update and a forward pass, and its work."""
    batch = random_batch(1, groups=8, samples=4, longest_prompt=32, longest=96)
    results: list[tuple[float, float, float, float, float]] = []
    for settings in meshes:
        policy = sharded_policy(folder, ["training.token_budget=1024", *settings])
        micros = policy.micro_batches(batch)
        tokens = sum(micro.ids.numel() for micro in micros)
        predicted = sum(len(micro.gather) for micro in micros)
        with SentBytes() as sent:
            policy.update(batch, 1)
        with SentBytes() as sent_forward:
            policy.logprobs(batch)
        results.append((sent.total, sent_forward.total, tokens, predicted, len(micros)))
    return results


@needs_experts
@pytest.mark.slow
def test_ranks_send_what_the_formula_says(tmp_path):
    folder = save_family(
        tmp_path / "qwen3_moe",
        "qwen3_moe",
        hidden_size=64,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_key_value_heads=4,
    )
    by_rank = run_on_ranks(4, measure, folder, list(MESHES.values()))
    for index, (name, settings) in enumerate(MESHES.items()):
        config = config_of("grpo", folder, "cluster=ray", "cluster.workers=4", *settings)
        model = model_config(config.model)
        mesh = check_model_mesh(config, model, 4)
        sizes = sent_sizes(config, model, count_parameters(config, model))
        columns = [mean(values) for values in zip(*(r[index] for r in by_rank), strict=True)]
        update, forward, tokens, predicted, passes = columns
        work = Work(tokens, predicted, round(passes), 0.0)
        for sent, trains in ((update, True), (forward, False)):
            traffic = count_traffic(mesh, sizes, work, trains, RECOMPUTED in settings)
            expected = sum(part.nbytes for part in traffic.values())
            assert sent == pytest.approx(expected, rel=0.1), (name, trains)


def test_a_token_goes_to_the_workers_of_its_choices():
    """Two of four experts on two workers: one of six pairs needs no other worker."""
    assert expected_owners(4, 2, 2) == pytest.approx(5 / 6)


def test_links_have_latency_and_two_speeds():
    links = Links(node=100.0, network=10.0, node_size=8, latency_s=1.0)
    assert links.ring_s(1, 1, 1000, 5) == 0
    assert links.ring_s(8, 1, 1000, 5) == 10 + 5 * 3
    # 16 neighbors: 8 rings between the nodes, with 10 each; the node's links are faster.
    assert links.ring_s(16, 1, 1000, 5) == 1000 / 80 + 5 * 4
    assert links.ring_s(2, 8, 1000) == 1000 / 10 + 1  # one member per node
    assert links.exchange_s(16, 1, 1000) == 1000 / 10 + 4
    assert links.exchange_s(4, 2, 1000) == 1000 / 100 + 2


def test_hybrid_sharding_keeps_weights_in_a_node():
    sizes = SimpleNamespace(
        parameters=8000, trained=8000, experts=0, blocks=2, hidden=4, heads=6, itemsize=2
    )
    work = Work(100, 50, 1, 0.0)
    links = Links(node=100.0, network=10.0, node_size=8, latency_s=0.0)
    hybrid = Mesh(16, shards=8)
    seconds = traffic_s(hybrid, count_traffic(hybrid, sizes, work, True, False), links)
    # Gathered twice in 2 bytes, reduced in 4; then an all-reduce of a shard over two copies.
    assert seconds["sharding"] == pytest.approx(8 * 8000 * 7 / 8 / 100)
    assert seconds["copies"] == pytest.approx(2 * 4 * 1000 * (1 / 2) / 10)
    assert seconds.keys() == {"sharding", "copies"}


def make_plan(*settings: str, model=None) -> Plan:
    config = config_of(
        "grpo",
        "qwen3",
        "data.train=x.jsonl",
        "model.device=cuda",
        "model.dtype=bfloat16",
        "rollout.max_response_tokens=1024",
        "rollout.max_rows=2048",
        "training.token_budget=16384",
        "cluster=ray",
        *settings,
    )
    model = model or Qwen3Config(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    workload = Workload([GroupLengths(100, (), 8)] * 64, 100)
    return Plan(config, model, workload, packed=True)


STAGES = ("sample", "compute_old_logprobs", "update")


def test_a_mesh_of_one_worker_takes_the_time_of_one_device():
    plan = make_plan("cluster.workers=1", RECOMPUTED)  # recomputed passes are not captured
    plan = replace(plan, roles={"critic": ("critic", plan.model)})
    clock = MeshClock(H200, plan)
    seconds = clock.step(STAGES).stages
    layout = lay_out_step(plan, 1024)
    alone = GpuClock(H200, plan).step(list(STAGES), layout, clock.engine_cache(plan))
    assert seconds.pop(PUBLISH) == 0
    assert seconds == pytest.approx(alone)


def test_workers_divide_the_time():
    """64 prompts x 8 rows: the parts of an update on 1, 8 and 64 workers."""
    one, eight, many = (
        MeshClock(H200, make_plan(f"cluster.workers={n}", RECOMPUTED)).step(STAGES)
        for n in (1, 8, 64)
    )
    assert one.update.keys() == {"computation", "optimizer"}
    assert eight.update["computation"] == pytest.approx(one.update["computation"] / 8, rel=0.05)
    assert eight.update["optimizer"] == pytest.approx(one.update["optimizer"] / 8)
    assert eight.stages["update"] == elapsed(eight.update)
    # A longest response cannot be divided: 64 engines are less than 64 times as fast.
    assert one.stages["sample"] / 16 < many.stages["sample"] < eight.stages["sample"]


@pytest.mark.parametrize(
    ("settings", "part"),
    [([TENSOR], "tensor"), ([SEQUENCE], "sequence"), (["cluster.shard_workers=4"], "copies")],
)
def test_each_kind_of_parallelism_has_its_exchange(settings, part):
    time = MeshClock(H200, make_plan("cluster.workers=8", RECOMPUTED, *settings)).step(STAGES)
    assert time.update.keys() == {"computation", "optimizer", "sharding", part}
    assert time.stages["update"] > time.update["computation"] + time.update[part]


def test_sampling_ahead_hides_the_shorter_of_the_two():
    settings = ["cluster.workers=4", "cluster.engines=4", "rollout.staleness=1"]
    time = MeshClock(H200, make_plan(*settings)).step(("sample", "update"))
    publish = time.stages[PUBLISH]
    assert time.total == max(time.stages["sample"], time.stages["update"]) + publish
    assert publish > 0


def test_a_server_that_samples_is_not_estimated():
    settings = ["rollout.engine=http", "rollout.url=http://host:8000/v1#model"]
    assert MeshClock(H200, make_plan(*settings)).step(STAGES).stages.keys() == {
        "compute_old_logprobs",
        "update",
    }


def test_a_small_pool_shards_one_copy():
    settings = ["cluster.workers=16", "cluster.shard_workers=8", "cluster.pools.critic=2"]
    plan = make_plan(*settings)
    clock = MeshClock(H200, replace(plan, roles={"critic": ("critic", plan.model)}))
    assert clock.place(plan.model, 2, is_pool=True).mesh.shards == 2
    stages = clock.step(STAGES).stages
    assert stages["critic"] > 4 * stages["update"]  # an eighth of the workers; they also predict


def test_experts_that_a_token_does_not_use_cost_no_arithmetic():
    shape = {
        "hidden_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 1000,
        "num_experts_per_tok": 2,
    }
    settings = ["cluster.workers=4", RECOMPUTED]
    few, many = (
        MeshClock(H200, make_plan(*settings, model=Qwen3MoeConfig(num_experts=n, **shape)))
        for n in (8, 64)
    )
    block = many.policy.shape.size.block - few.policy.shape.size.block
    assert block == (64 - 8) * (3 * 512 * 256 + 512)  # and a row of the router
    active = many.policy.shape.size.active_block - few.policy.shape.size.active_block
    assert active == pytest.approx((64 - 8) * 512)


def test_the_simulation_of_equal_responses_is_the_estimate():
    step = simulate_scale.Step(rows=256, tokens=512, prompt=100)
    simulation = simulate_scale.Simulation("1.7b", simulate_scale.Cluster(), step)
    lengths = [[512] * 8] * 32
    groups = [GroupLengths(100, (), 8)] * 32
    plan = simulation.plan(8, groups)
    expected = MeshClock(H200, plan, Links(), simulation.sizes).step(STAGES)
    clock = simulation.clock(plan, lengths)
    update = clock.update_parts(clock.policy, lay_out_step(clock.plan, 512))
    assert update == pytest.approx(expected.update)
    assert simulate_scale.sampling_s(clock, lengths) == pytest.approx(expected.stages["sample"])
    assert clock.publish_s() == expected.stages[PUBLISH]


def test_short_responses_leave_the_engine_to_long_ones():
    """Rows of 4 and 8 tokens: 4 steps of both, then 4 of one; with one slot, 12 of one."""
    engine = SimpleNamespace(decode_step_s=lambda rows, own, shared: 10.0 if rows == 2 else 1.0)
    assert simulate_scale.decode_s(engine, [4, 8], 2, 0.0) == (8, 44.0)
    assert simulate_scale.decode_s(engine, [4, 8], 1, 0.0) == (12, 12.0)

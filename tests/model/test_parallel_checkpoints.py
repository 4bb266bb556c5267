"""Checkpoints that several ranks write together: any mesh and one process continue from them."""

import pytest
import torch
from parallel import (
    BATCH,
    EXPERT,
    LORA,
    SEQUENCE,
    TENSOR,
    folder_maker,
    local_policy,
    needs_experts,
    sharded_policy,
)
from ranks import run_on_ranks
from transformers import AutoModelForCausalLM

from postgrad.errors import RunError
from postgrad.model.checkpoint_files import (
    Layout,
    TensorsFile,
    assign_weights,
    part_path,
    read_tensors,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folder_maker(tmp_path_factory.mktemp("families"))


def save_and_continue(folder, checkpoints, first, second) -> dict[str, torch.Tensor]:
    """Train and save on one mesh; load and save on another. Return this rank's trained weights."""
    policy = sharded_policy(folder, ["optimizer.lr=1e-2", *first])
    policy.update(BATCH, 1)
    policy.save(str(checkpoints[0]))
    weights = policy.weights()
    torch.distributed.barrier()
    policy = sharded_policy(folder, ["optimizer.lr=1e-2", *second])
    policy.load(str(checkpoints[0]))
    policy.save(str(checkpoints[1]))
    return weights


@needs_experts
@pytest.mark.slow
@pytest.mark.parametrize(
    ("second", "num_parts", "adapters"),
    [
        ([SEQUENCE, "cluster.shard_workers=2"], 2, []),
        ([SEQUENCE, "cluster.shard_workers=2"], 2, [LORA]),
        ([EXPERT], 4, []),  # tokens are sent to experts
    ],
)
def test_a_checkpoint_continues_on_another_mesh_and_in_one_process(
    folders, tmp_path, second, num_parts, adapters
):
    folder = folders("qwen3_moe", {})
    checkpoints = [tmp_path / "first", tmp_path / "second"]
    meshes = ([TENSOR, *adapters], [*second, *adapters])
    trained: dict[str, torch.Tensor] = {}
    for own_weights in run_on_ranks(4, save_and_continue, folder, checkpoints, *meshes):
        assert not trained.keys() & own_weights.keys()
        trained |= own_weights
    policy = local_policy(folder, adapters)
    start = {name: value.clone() for name, value in policy.weights().items()}
    assert any(not torch.equal(start[name], trained[name]) for name in start)
    states: list[dict[str, torch.Tensor]] = []
    for checkpoint, num_shards in zip(checkpoints, (4, num_parts), strict=True):
        assert len(list(checkpoint.glob("optimizer-*.safetensors"))) == num_shards
        assert len(list(checkpoint.glob("policy/model-*.safetensors"))) > 2
        policy.load(str(checkpoint))
        states.append({name: t.clone() for name, t in policy.optimizer.tensors().items()})
        stock = AutoModelForCausalLM.from_pretrained(checkpoint / "policy")
        for name, value in trained.items():
            assert torch.equal(policy.weights()[name], value), name
            assert torch.equal(stock.get_parameter(name), value), name
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_missing_part_of_the_optimizer_is_named(tmp_path):
    layout = Layout(0, 2, 0, 1, {})
    path = part_path(tmp_path / "optimizer.safetensors", layout.index, layout.num_files)
    TensorsFile({"step/w": torch.zeros(())}, path, layout.to_metadata()).write()
    with pytest.raises(RunError, match="missing"):
        dict(read_tensors(tmp_path / "optimizer.safetensors"))


def test_writers_get_equal_shares_and_whole_blocks():
    sizes = {"embed": 4, "layers.0.a": 3, "layers.0.b": 3, "layers.1.a": 6, "norm": 1, "head": 4}
    writers = assign_weights(sizes, 3)
    assert list(writers.values()) == [0, 1, 1, 1, 2, 2]
    assert set(assign_weights(sizes, 100).values()) <= set(range(100))

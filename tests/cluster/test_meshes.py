"""The mesh of each group of workers follows from its own models."""

import pytest
import torch
from families import save_family
from parallel import BATCH, CPU, EXPERT, TENSOR, local_policy, needs_experts, sharded_policy
from ranks import run_on_ranks
from refused import refused
from tiny_runs import config_of

from postgrad.cluster.meshes import check_meshes, worker_mesh
from postgrad.methods.ports import Role
from postgrad.model.load.load import load
from postgrad.model.parallel.ranks import Ranks
from postgrad.model.parallel.sharded import ShardedModel
from postgrad.model.policy import FrozenPolicy


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("models") / "qwen3_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def make_config(policy, *settings):
    return config_of("grpo", policy, "cluster=ray", "cluster.workers=2", *settings)


def logprobs_on_ranks(policy_folder, dense_folder, meshes):
    """Return the log-probs of a policy with experts and of a dense model on the same ranks."""
    results = []
    for settings in meshes:
        policy = sharded_policy(policy_folder, settings)
        config = make_config(dense_folder, *settings)
        assert isinstance(policy.ranks, ShardedModel)
        mesh = policy.ranks.mesh
        reference = FrozenPolicy(config, load(config.model, CPU), mesh)
        assert mesh.expert.size == 2
        results.append((policy.logprobs(BATCH)["logprobs"], reference.logprobs(BATCH)["logprobs"]))
    return results


@needs_experts
@pytest.mark.slow
def test_a_dense_model_beside_experts_gives_the_numbers_of_one_process(experts, dense):
    config = make_config(dense)
    expected = (
        local_policy(experts).logprobs(BATCH)["logprobs"],
        FrozenPolicy(config, load(config.model, CPU)).logprobs(BATCH)["logprobs"],
    )
    for of_rank in run_on_ranks(2, logprobs_on_ranks, experts, dense, [[EXPERT]]):
        for actual in of_rank:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def pool_sizes(dense_folder, experts_folder):
    """Return (tensor, shard) sizes of the ranks of three pools of two workers."""
    config = make_config(experts_folder, TENSOR, "cluster.shard_workers=8")
    roles = {
        "critic": Role("critic", str(dense_folder)),
        "reference": Role("frozen"),
        "judge": Role("scores", str(dense_folder)),
    }
    results = []
    for name in roles:
        ranks = Ranks.from_process_group(CPU, worker_mesh(config, roles, [name], 2))
        results.append((ranks.tensor.size, ranks.shard.size))
    return results


def test_the_ranks_of_a_pool_divide_what_its_model_has(experts, dense):
    # The reward model is complete on each worker.
    expected = [(2, 1), (2, 1), (1, 2)]
    assert run_on_ranks(2, pool_sizes, dense, experts) == [expected, expected]


def test_each_pool_is_checked_by_itself(experts, dense):
    config = make_config(experts, EXPERT, "cluster.pools.critic=3", "cluster.pools.judge=1")
    roles = {"critic": Role("critic", str(dense)), "judge": Role("scores", str(dense))}
    check_meshes(config, roles)
    roles["critic"] = Role("critic")  # the policy's model, whose experts 3 workers cannot divide
    with refused("conflict", "cluster.pools.critic", shows="expert_parallel"):
        check_meshes(config, roles)
    config = make_config(experts, TENSOR, "cluster.pools.critic=3")
    with refused("conflict", "cluster.pools.critic", shows="tensor_parallel"):
        check_meshes(config, {"critic": Role("critic", str(dense))})


def test_experts_of_any_model_are_enough(experts, dense):
    config = make_config(dense, EXPERT)
    with refused("no_effect", "cluster.expert_parallel"):
        check_meshes(config, {"reference": Role("frozen")})
    check_meshes(config, {"reference": Role("frozen", str(experts))})
    remote = Role("engine", "http://host:8000/v1#model")
    check_meshes(make_config(experts, EXPERT), {"classmate": remote})

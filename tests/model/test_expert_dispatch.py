"""Tokens that are sent to the ranks of their experts give the numbers of one process."""

import pytest
import torch
from parallel import (
    EXPERT,
    LORA,
    SEQUENCE,
    compute,
    difference,
    folder_maker,
    local_policy,
    needs_experts,
    sharded_policy,
)
from ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from tiny_runs import config_of

from postgrad.errors import ConfigError
from postgrad.model.load.load import load
from postgrad.model.parallel import experts, groups
from postgrad.model.parallel.experts import dispatch_experts, tokens_by_owner

pytestmark = needs_experts

EXPERT_4 = "cluster.expert_parallel=4"
NUM_EXPERTS = 8
CHOSEN = 4  # of the experts of the uneven model: two get nearly all tokens, four get none
# The model and the settings, on four ranks.
CASES = {
    "two groups, recomputed": ("even", [EXPERT, "model.activation_checkpointing=true"]),
    "one group, ranks without tokens": ("uneven", [EXPERT_4]),
    "sequence": ("even", [EXPERT_4, SEQUENCE]),
    "hybrid sharding, adapters": ("uneven", [EXPERT, LORA, "cluster.shard_workers=2"]),
}


def make_uneven(folder) -> None:
    """Let every token choose the experts 0 and 2, or 1 and 3; nobody chooses the others."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    factors = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0])
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            weights[name] = factors[:, None] * (weight[0] + 0.2)
    save_file(weights, path, {"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = folder_maker(tmp_path_factory.mktemp("models"))
    models = {"even": folders("qwen3_moe", {"num_experts": NUM_EXPERTS})}
    models["uneven"] = folders("qwen3_moe", {"num_experts": NUM_EXPERTS, "head_dim": 16})
    make_uneven(models["uneven"])
    return models


def results_on_ranks(cases) -> list[dict[str, torch.Tensor]]:
    return [compute(sharded_policy(folder, settings)) for folder, settings in cases]


@pytest.mark.slow
def test_four_ranks_give_the_numbers_of_one_process(models):
    cases = [(models[model], settings) for model, settings in CASES.values()]
    on_ranks = run_on_ranks(4, results_on_ranks, cases)
    for index, (name, (model, settings)) in enumerate(CASES.items()):
        expected = compute(local_policy(models[model], settings))
        for results in on_ranks:
            assert not difference(expected, results[index]), name


@pytest.mark.nightly
def test_two_ranks_and_experts_that_nobody_chose(models):
    expected = compute(local_policy(models["uneven"]))
    for name, gradient in expected.items():
        if name.endswith("experts.gate_up_proj"):
            is_used = gradient.flatten(1).any(1)
            assert is_used[:CHOSEN].all()
            assert not is_used[CHOSEN:].any()
    for results in run_on_ranks(2, results_on_ranks, [(models["uneven"], [EXPERT])]):
        assert not difference(expected, results[0])


# ---- mutations


def drop_gradients(monkeypatch):
    """Gradients do not go back to the ranks that sent the tokens."""
    back = groups._Exchange.backward

    def broken(ctx, grad):
        own, *rest = back(ctx, grad)
        return torch.zeros_like(own), *rest

    monkeypatch.setattr(groups._Exchange, "backward", staticmethod(broken))


def drop_tokens(monkeypatch):
    """Tokens are not sent to their second owner."""

    def first_owner_only(chosen, num_ranks, num_own):
        is_sent = tokens_by_owner(chosen, num_ranks, num_own)
        return is_sent & (is_sent.cumsum(0) == 1)

    monkeypatch.setattr(experts, "tokens_by_owner", first_owner_only)


@pytest.mark.nightly
@pytest.mark.parametrize(("mutate", "what"), [(drop_gradients, "norm"), (drop_tokens, "logprobs")])
def test_a_broken_exchange_is_seen(models, monkeypatch, mutate, what):
    expected = compute(local_policy(models["even"]))
    mutate(monkeypatch)  # the ranks are forked from this process
    for results in run_on_ranks(2, results_on_ranks, [(models["even"], [EXPERT])]):
        assert difference(expected, results[0]).startswith(what)


def test_a_token_is_sent_to_each_owner_once():
    chosen = torch.tensor([[0, 1], [3, 0], [2, 3]])
    expected = [[True, True, False], [False, True, True], [False, False, False]]
    assert tokens_by_owner(chosen, 3, 2).tolist() == expected


# ---- what is refused


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("qwen3", {}, "no experts"),
        ("qwen3_moe", {"num_experts": 3}, "3 experts"),
        ("qwen3_moe", {"decoder_sparse_step": 5}, "no layer"),
    ],
)
def test_models_whose_experts_cannot_be_divided_are_refused(tmp_path, family, changes, why):
    config = config_of("grpo", folder_maker(tmp_path)(family, changes))
    model = load(config.model, torch.device("cpu")).model
    with pytest.raises(ConfigError, match=why):
        dispatch_experts(model, groups.Group(0, 2))

"""Tensor, expert and sequence parallelism and hybrid sharding give the numbers of one process.

pytest tests/model/test_parallel.py --scale              every model family (minutes)
pytest tests/model/test_parallel.py --scale --write-docs writes the table of docs/machines.md
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, SumOfLogprobs
from parallel import (
    BATCH,
    CPU,
    EXPERT,
    LORA,
    SEQUENCE,
    TENSOR,
    TENSOR_4,
    LogprobsAndEntropy,
    compute,
    difference,
    folder_maker,
    local_policy,
    needs_experts,
    sharded_policy,
)
from ranks import run_on_ranks
from tables import table
from tiny_runs import config_of

from postgrad.cluster.host import load_policy, load_role
from postgrad.cluster.meshes import check_meshes
from postgrad.errors import ConfigError
from postgrad.methods import find_method
from postgrad.model.load.load import load
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.parallel import groups, tensor_parallel
from postgrad.model.parallel.ranks import Ranks, check_mesh
from postgrad.model.policy import LocalPolicy
from postgrad.model.port import FULL
from postgrad.model.scored import LocalCritic
from postgrad.types import Batch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "machines.md"
BEGIN = "<!-- families: written by tests/model/test_parallel.py -->\n"
END_MARK = "<!-- end of families -->"
TIED = {"tie_word_embeddings": True}
PHI = {"num_key_value_heads": 4, "qk_layernorm": True}
# Family, changes of its shape, and settings, on four ranks.
CASES = {
    "fsdp": ("qwen3", {}, []),
    "hybrid sharding": ("qwen3", {}, ["cluster.shard_workers=2"]),
    "tensor": ("qwen3", {}, [TENSOR]),
    "tensor, no sharding": ("qwen3", {}, [TENSOR, "cluster.shard_workers=1"]),
    "tensor x 4, tied": ("qwen3", TIED | {"num_key_value_heads": 4}, [TENSOR_4]),
    "tensor, tied, scaled": ("gemma3_text", {"num_hidden_layers": 2}, [TENSOR]),
    "tensor, biases": ("starcoder2", {}, [TENSOR]),
    "tensor x 4, bias of the head": ("phi", PHI, [TENSOR_4]),
    "sequence": ("qwen3", {}, [SEQUENCE]),
    "sequence, windows": ("gemma3_text", {"num_hidden_layers": 2}, [SEQUENCE]),
    "tensor x sequence": ("qwen3", {"num_key_value_heads": 4}, [TENSOR, SEQUENCE]),
    "sequence, adapters": ("qwen3", {}, [SEQUENCE, LORA]),
    "tensor, adapters": ("qwen3", {}, [TENSOR, LORA]),
    "tensor x 4, adapters": ("starcoder2", {"num_key_value_heads": 4}, [TENSOR_4, LORA]),
    "tensor, recomputed": ("qwen3", {}, [TENSOR, "model.activation_checkpointing=true"]),
    "experts in slices": ("qwen3_moe", {}, [TENSOR]),
    "recurrent layers": ("qwen3_next", {}, [TENSOR]),
}


def results_on_ranks(cases, objective=LogprobsAndEntropy) -> list[dict[str, torch.Tensor] | str]:
    """Return the results of every case on this rank, or the error that refuses it."""
    results: list[dict[str, torch.Tensor] | str] = []
    for folder, settings in cases:
        workers = f"cluster.workers={dist.get_world_size()}"
        try:
            check_meshes(config_of("grpo", folder, "cluster=ray", workers, *settings), {})
            results.append(compute(sharded_policy(folder, settings, objective)))
        except ConfigError as error:
            results.append(str(error))
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return folder_maker(tmp_path_factory.mktemp("families"))


FREQUENT = [
    "hybrid sharding",
    "tensor x 4, tied",
    "sequence, windows",
    "tensor x sequence",
    "tensor, adapters",
    "experts in slices",
]
RARE = [name for name in CASES if name not in FREQUENT]


@pytest.fixture(scope="module")
def on_four_ranks(folders):
    """The results of the frequent or of the rare cases, by rank; their ranks are started once."""

    @cache
    def results(is_frequent: bool) -> Any:
        chosen = [CASES[name] for name in (FREQUENT if is_frequent else RARE)]
        cases = [(folders(family, changes), settings) for family, changes, settings in chosen]
        return run_on_ranks(4, results_on_ranks, cases)

    return results


def case_param(name: str) -> Any:
    marks = [pytest.mark.slow if name in FREQUENT else pytest.mark.nightly]
    return pytest.param(name, marks=[*marks, *[needs_experts] * (EXPERT in CASES[name][2])])


@pytest.mark.parametrize("name", [case_param(name) for name in CASES])
def test_four_ranks_give_the_numbers_of_one_process(name, folders, on_four_ranks):
    family, changes, settings = CASES[name]
    expected = compute(local_policy(folders(family, changes), settings))
    index = (FREQUENT if name in FREQUENT else RARE).index(name)
    for rank, results in enumerate(on_four_ranks(name in FREQUENT)):
        assert not difference(expected, results[index]), f"rank {rank}"


def broken_results(folder) -> dict[str, torch.Tensor]:
    """Compute with slices whose input gradients are not summed over the ranks."""
    groups._SumGradients.backward = staticmethod(lambda ctx, grad: (grad, None))
    return compute(sharded_policy(folder, [TENSOR]))


def count_sums(folder) -> int:
    """Return how often hidden states are summed over the ranks in a forward and backward pass."""
    policy = sharded_policy(folder, [TENSOR])
    shapes: list[int] = []
    add_up = groups.Group.sum
    groups.Group.sum = lambda group, x: shapes.append(x.dim()) or add_up(group, x)  # type: ignore
    num_passes = len(policy.micro_batches(BATCH))
    policy.accumulate(BATCH, FULL, MetricAccumulator())
    return shapes.count(3) // num_passes


@pytest.mark.slow
def test_hidden_states_are_summed_once_per_divided_layer_and_direction(folders):
    """Two blocks of attention and MLP, forward and backward, and the embedding."""
    folder = folders("qwen3", {})
    assert run_on_ranks(2, count_sums, folder) == [9, 9]


@pytest.mark.slow
def test_a_missing_sum_of_gradients_is_seen(folders):
    folder = folders("qwen3", {})
    expected = compute(local_policy(folder))
    for results in run_on_ranks(2, broken_results, folder):
        assert not difference({"logprobs": expected["logprobs"]} | results, results)
        assert difference(expected, results).startswith("norm")


# ---- truncated sampling


def batch_with_kept_ids() -> Batch:
    """Return the batch as if top-k had kept a few ids of each token, and all of every fifth."""
    batch = Batch(BATCH.prompt, BATCH.response, dict(BATCH.tokens), dict(BATCH.rows))
    kept = [[t, *range(t % 4)] if i % 5 else [] for i, t in enumerate(batch.response.values)]
    kept = [sorted({int(id) for id in ids}) for ids in kept]
    batch.tokens["num_kept"] = torch.tensor([len(ids) for ids in kept])
    by_row: list[torch.Tensor] = []
    for length in batch.response.lengths.tolist():
        flat = [id for ids in kept[:length] for id in ids]
        by_row.append(torch.tensor(flat, dtype=torch.int32))
        kept = kept[length:]
    batch.rows["kept_ids"] = by_row
    return batch


def results_with_kept_ids(folder) -> list[dict[str, torch.Tensor]]:
    meshes = [[], [TENSOR], [SEQUENCE]]
    return [compute(sharded_policy(folder, mesh), batch_with_kept_ids()) for mesh in meshes]


@pytest.mark.slow
def test_ranks_replay_what_truncated_sampling_kept(folders):
    folder = folders("qwen3", {})
    expected = compute(local_policy(folder), batch_with_kept_ids())
    assert difference(compute(local_policy(folder)), expected), "some ids were not kept"
    for on_rank in run_on_ranks(2, results_with_kept_ids, folder):
        for results in on_rank:
            assert not difference(expected, results)


# ---- loading


def results_of_meta_models(cases) -> list[dict[str, torch.Tensor]]:
    """Compute with models that only the first rank has read."""
    torch.use_deterministic_algorithms(True)  # new memory then holds NaN
    results: list[dict[str, torch.Tensor]] = []
    for folder, settings in cases:
        config = config_of("grpo", folder, "training.token_budget=60", "cluster=ray", *settings)
        ranks = Ranks.from_process_group(CPU, config.cluster)
        method = find_method("grpo")(config)
        loaded = load_policy(config, method, ranks)
        is_empty = [p.is_meta for p in loaded.model.parameters()]
        assert all(is_empty) if ranks.rank else not any(is_empty)
        results.append(compute(LocalPolicy(config, loaded, LogprobsAndEntropy(), ranks)))
        loaded = load_role(config, "critic", config.model.path, ranks)
        critic = LocalCritic(config, loaded, SumOfLogprobs(), 1e-3, ranks=ranks)
        assert torch.equal(critic.values(BATCH), torch.zeros(BATCH.num_tokens))
    return results


@pytest.mark.slow
def test_only_the_first_rank_reads_the_model(folders):
    meshes = {"qwen3": [], "gemma3_text": [SEQUENCE], "qwen3_moe": [TENSOR]}
    cases = [(folders(family, {}), settings) for family, settings in meshes.items()]
    on_ranks = run_on_ranks(2, results_of_meta_models, cases)
    for index, (folder, _) in enumerate(cases):
        expected = compute(local_policy(folder))
        for results in on_ranks:
            assert not difference(expected, results[index]), folder


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "key"),
    table(__file__, "sizes_that_do_not_fit_are_refused"),
)
def test_sizes_that_do_not_fit_are_refused(tiny, settings, key):
    cluster = config_of("grpo", tiny, "cluster=ray", "cluster.workers=4", *settings).cluster
    with pytest.raises(ConfigError, match=key):
        check_mesh(4, cluster)


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("gpt2", {}, "gpt2"),
        ("qwen3", {"num_key_value_heads": 1}, "key-value heads"),
        ("qwen3", {"intermediate_size": 63}, "63"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(folders, family, changes, why):
    config = config_of("grpo", folders(family, changes))
    model = load(config.model, CPU).model
    with pytest.raises(ConfigError, match=why):
        tensor_parallel.divide_model(model, groups.Group(0, 2))


# ---- every family

COLUMNS = {
    "FSDP2": [],
    "tensor parallel": [TENSOR],
    "expert parallel": [EXPERT],
    "sequence parallel": [SEQUENCE],
}


def families_table(folders) -> str:
    """Return the table of what gives the numbers of one process, on two ranks."""
    working: dict[str, list[str]] = {column: [] for column in COLUMNS}
    for family in sorted(FAMILIES):
        folder = folders(family, {})
        cases = [(folder, settings) for settings in COLUMNS.values()]
        print(family, flush=True)
        # Gradients of entropies are too inexact in float32: sharp Gemma 4 models have large scores.
        results = run_on_ranks(2, results_on_ranks, cases, SumOfLogprobs)[0]
        expected = compute(local_policy(folder, [], SumOfLogprobs))
        for column, result in zip(COLUMNS, results, strict=True):
            if not isinstance(result, str):
                assert not difference(expected, result), (family, column)
                working[column].append(f"`{family}`")
    rows = [f"| {column} | {families_text(names)} |\n" for column, names in working.items()]
    return "".join(["| divided by | model types |\n", "|---|---|\n", *rows])


def families_text(names: list[str]) -> str:
    """Return the names, or that they are all families."""
    return "all of the table above" if len(names) == len(FAMILIES) else ", ".join(names)


@pytest.mark.scale
def test_every_family_on_two_ranks(folders, request):
    head, rest = PAGE.read_text().split(BEGIN)
    written, tail = rest.split(END_MARK, 1)
    table = families_table(folders)
    if request.config.getoption("--write-docs"):
        PAGE.write_text(head + BEGIN + table + END_MARK + tail)
        return
    assert written == table


def test_the_docs_list_the_families_that_can_be_divided():
    table = PAGE.read_text().split(BEGIN)[1].split(END_MARK)[0]
    row = table.split("| tensor parallel | ")[1].split(" |")[0]
    assert [name.strip("`") for name in row.split(", ")] == list(tensor_parallel.FAMILIES)

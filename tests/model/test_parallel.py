"""Tensor, expert and sequence parallelism and hybrid sharding give the numbers of one process.

pytest tests/model/test_parallel.py --scale              every model family (minutes)
pytest tests/model/test_parallel.py --scale --write-docs writes the table of docs/scale.md
"""

import threading
from pathlib import Path

import pytest
import torch
from families import FAMILIES, SumOfLogprobs, save_family
from ranks import run_on_ranks
from tiny_runs import config_of, random_batch
from transformers import AutoModelForCausalLM

from postgrad.cluster.host import load_policy, load_role
from postgrad.errors import ConfigError, RunError
from postgrad.methods import find_method
from postgrad.model import groups, tensor_parallel
from postgrad.model.async_writer import TensorsFile
from postgrad.model.checkpoint_parts import Layout, assign_weights, part_path, read_tensors
from postgrad.model.load import load
from postgrad.model.lora import adapter_parameters, add_adapters
from postgrad.model.metrics import MetricAccumulator
from postgrad.model.policy import LocalPolicy
from postgrad.model.ranks import Ranks, check_mesh
from postgrad.model.sharded import ShardedCritic, ShardedPolicy
from postgrad.model.views import FULL

CPU = torch.device("cpu")
BATCH = random_batch(1, groups=5, samples=4, longest_prompt=9, longest=12)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
BEGIN = "<!-- families: written by tests/model/test_parallel.py -->\n"
END_MARK = "<!-- end of families -->"
TENSOR = "cluster.tensor_parallel=2"
TENSOR_4 = "cluster.tensor_parallel=4"  # pads the vocabulary of 18
TIED = {"tie_word_embeddings": True}
LORA = "model.lora.rank=2"
EXPERT = "cluster.expert_parallel=2"
SEQUENCE = "cluster.sequence_parallel=2"
# Family, changes of its shape, and settings, on four ranks.
CASES = {
    "fsdp": ("qwen3", {}, []),
    "hybrid sharding": ("qwen3", {}, ["cluster.shard_workers=2"]),
    "tensor": ("qwen3", {}, [TENSOR]),
    "tensor, no sharding": ("qwen3", {}, [TENSOR, "cluster.shard_workers=1"]),
    "tensor x 4": ("qwen3", {"num_key_value_heads": 4}, [TENSOR_4]),
    "tensor x 4, tied": ("qwen3", TIED | {"num_key_value_heads": 4}, [TENSOR_4]),
    "tensor, tied, scaled": ("gemma3_text", {"num_hidden_layers": 2}, [TENSOR]),
    "tensor, biases": ("starcoder2", {}, [TENSOR]),
    "sequence": ("qwen3", {}, [SEQUENCE]),
    "sequence, windows": ("gemma3_text", {"num_hidden_layers": 2}, [SEQUENCE]),
    "tensor x sequence": ("qwen3", {"num_key_value_heads": 4}, [TENSOR, SEQUENCE]),
    "sequence, adapters": ("qwen3", {}, [SEQUENCE, LORA]),
    "tensor, adapters": ("qwen3", {}, [TENSOR, LORA]),
    "tensor x 4, adapters": ("starcoder2", {"num_key_value_heads": 4}, [TENSOR_4, LORA]),
    "gathered outputs, adapters": ("phi3", {}, [TENSOR, LORA]),
    "experts in slices, adapters": ("qwen2_moe", {}, [TENSOR, LORA]),
    "tensor, recomputed": ("qwen3", {}, [TENSOR, "model.activation_checkpointing=true"]),
    "experts in slices": ("qwen3_moe", {}, [TENSOR]),
    "whole experts": ("qwen3_moe", {}, [TENSOR, EXPERT]),
    "recurrent layers": ("qwen3_next", {}, [TENSOR]),
}


class LogprobsAndEntropy(SumOfLogprobs):
    """The weighted sum of log-probs and entropies."""

    def loss(self, batch, current, metrics):
        entropy = (current.entropy * batch.tokens["advantages"].abs()).sum()
        return super().loss(batch, current, metrics) + 0.3 * entropy


@torch.no_grad()
def fill_second_matrices(model):
    """Draw the second matrices of adapters: they are zero, and the first have no gradient then."""
    generator = torch.Generator().manual_seed(1)
    for name, p in adapter_parameters(model).items():
        if ".lora_B." in name:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))


def make_policy(folder, settings, make):
    config = config_of("grpo", folder, "training.token_budget=60", *settings)
    loaded = load(config.model, CPU)
    if config.model.lora.rank:
        add_adapters(loaded.model, config.model.lora, seed=0)
        fill_second_matrices(loaded.model)
    return make(config, loaded)


def local_policy(folder, settings=()) -> LocalPolicy:
    shared = [word for word in settings if word.startswith("model.")]
    return make_policy(
        folder, shared, lambda config, loaded: LocalPolicy(config, loaded, LogprobsAndEntropy())
    )


def sharded_policy(folder, settings) -> ShardedPolicy:
    def make(config, loaded):
        ranks = Ranks.from_process_group(CPU, config.cluster)
        return ShardedPolicy(config, loaded, LogprobsAndEntropy(), ranks)

    return make_policy(folder, ["cluster=ray", *settings], make)


def compute(policy) -> dict[str, torch.Tensor]:
    """Return log-probs, gradients by name, and the gradient norm."""
    results = policy.logprobs(BATCH)
    policy.accumulate(BATCH, FULL, MetricAccumulator())
    assert policy.optimizer.has_gradients()
    gradients = {name: m.grad for name, m in policy.optimizer.masters.items()}
    results["norm"] = policy.optimizer.norm(list(gradients.values()))
    for name, gradient in gradients.items():
        full = gradient
        if isinstance(policy, ShardedPolicy):
            full = policy.ranks.full_tensor(gradient, policy.optimizer.sharded_params[name])
        results[f"gradient of {name}"] = full
    return {name: value.detach().clone() for name, value in results.items()}


def results_on_ranks(cases) -> list[dict[str, torch.Tensor] | str]:
    """Return the results of every case on this rank, or the error that refuses it."""
    results: list[dict[str, torch.Tensor] | str] = []
    for folder, settings in cases:
        try:
            results.append(compute(sharded_policy(folder, settings)))
        except ConfigError as error:
            results.append(str(error))
    return results


def difference(expected, actual) -> str:
    """Return where the results differ by more than 1e-5 of their scale; empty if nowhere."""
    largest = max(float(v.abs().max()) for name, v in expected.items() if "gradient" in name)
    for name, value in expected.items():
        scale = largest if "gradient" in name else 1.0
        try:
            torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5 * scale)
        except AssertionError as error:
            return f"{name}: {error}"
    return ""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders by family and changes, each written once."""
    made: dict[str, Path] = {}
    root = tmp_path_factory.mktemp("families")

    def folder(family, changes):
        key = "-".join([family, *map(str, changes.values())])
        if key not in made:
            made[key] = save_family(root / key, family, **changes)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def on_four_ranks(folders):
    """Every case's results, by rank; the ranks are started once."""
    cases = [(folders(family, changes), settings) for family, changes, settings in CASES.values()]
    return run_on_ranks(4, results_on_ranks, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_give_the_numbers_of_one_process(name, folders, on_four_ranks):
    family, changes, settings = CASES[name]
    expected = compute(local_policy(folders(family, changes), settings))
    index = list(CASES).index(name)
    for rank, results in enumerate(on_four_ranks):
        assert not difference(expected, results[index]), f"rank {rank}"


def broken_results(folder) -> dict[str, torch.Tensor]:
    """Compute with slices whose input gradients are not summed over the ranks."""
    groups._SumGradients.backward = staticmethod(lambda ctx, grad: (grad, None))
    return compute(sharded_policy(folder, [TENSOR]))


@pytest.mark.slow
def test_a_missing_sum_of_gradients_is_seen(folders):
    folder = folders("qwen3", {})
    expected = compute(local_policy(folder))
    for results in run_on_ranks(2, broken_results, folder):
        assert not difference({"logprobs": expected["logprobs"]} | results, results)
        assert difference(expected, results).startswith("norm")


# ---- loading


def results_of_meta_models(cases) -> list[dict[str, torch.Tensor]]:
    """Compute with models that only the first rank has read."""
    torch.use_deterministic_algorithms(True)  # new memory then holds NaN
    results: list[dict[str, torch.Tensor]] = []
    for folder, settings in cases:
        config = config_of("grpo", folder, "training.token_budget=60", "cluster=ray", *settings)
        ranks = Ranks.from_process_group(CPU, config.cluster)
        loaded = load_policy(config, find_method("grpo")(config), "cpu", ranks)
        is_empty = [p.is_meta for p in loaded.model.parameters()]
        assert all(is_empty) if ranks.rank else not any(is_empty)
        results.append(compute(ShardedPolicy(config, loaded, LogprobsAndEntropy(), ranks)))
        loaded = load_role(config, "critic", config.model.path, "cpu", ranks)
        critic = ShardedCritic(config, loaded, SumOfLogprobs(), 1e-3, ranks)
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


# ---- checkpoints


def save_and_continue(folder, checkpoints, first, second) -> dict[str, torch.Tensor]:
    """Train and save on one mesh; load and save on another. Return the trained weights."""
    policy = sharded_policy(folder, ["optimizer.lr=1e-2", *first])
    policy.update(BATCH, 1)
    policy.save(str(checkpoints[0]))
    weights = policy.weights()
    torch.distributed.barrier()
    policy = sharded_policy(folder, ["optimizer.lr=1e-2", *second])
    policy.load(str(checkpoints[0]))
    policy.save(str(checkpoints[1]))
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [[], [LORA]])
def test_a_checkpoint_continues_on_another_mesh_and_in_one_process(folders, tmp_path, adapters):
    folder = folders("qwen3_moe", {})
    checkpoints = [tmp_path / "first", tmp_path / "second"]
    meshes = ([TENSOR, EXPERT, *adapters], [SEQUENCE, "cluster.shard_workers=2", *adapters])
    trained = run_on_ranks(4, save_and_continue, folder, checkpoints, *meshes)[0]
    policy = local_policy(folder, adapters)
    start = {name: value.clone() for name, value in policy.weights().items()}
    assert any(not torch.equal(start[name], trained[name]) for name in start)
    states: list[dict[str, torch.Tensor]] = []
    for checkpoint, num_shards in zip(checkpoints, (4, 2), strict=True):
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


def save_with_a_slow_rank(folder, checkpoint) -> list[bool]:
    """Return whether the checkpoint counts as written before and after the last rank wrote."""
    policy = sharded_policy(folder, [])
    may_write = threading.Event()
    write = TensorsFile.write

    def wait_and_write(file):
        may_write.wait()
        write(file)

    if policy.ranks.rank == 1:
        TensorsFile.write = wait_and_write
    policy.begin_save(str(checkpoint))
    if policy.ranks.rank == 0:
        policy.writer.done(wait=True)
    results = [policy.saved(wait=False)]
    may_write.set()
    return [*results, policy.saved(wait=True)]


@pytest.mark.slow
def test_a_checkpoint_is_written_when_the_last_rank_has_written(folders, tmp_path):
    folder = folders("qwen3", {})
    results = run_on_ranks(2, save_with_a_slow_rank, folder, tmp_path / "step-1")
    assert results == [[False, True]] * 2


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["cluster.tensor_parallel=3"], "tensor_parallel"),
        (["cluster.sequence_parallel=3"], "sequence_parallel"),
        (["cluster.expert_parallel=2"], "expert_parallel"),
        (["cluster.shard_workers=3"], "shard_workers"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny, settings, key):
    cluster = config_of("grpo", tiny, "cluster=ray", "cluster.workers=4", *settings).cluster
    with pytest.raises(ConfigError, match=key):
        check_mesh(4, cluster)


@pytest.mark.parametrize(
    ("family", "changes", "by_expert", "why"),
    [
        ("gpt2", {}, False, "gpt2"),
        ("qwen3", {"num_key_value_heads": 1}, False, "key-value heads"),
        ("qwen3", {"intermediate_size": 63}, False, "63"),
        ("qwen3", {}, True, "no experts"),
        ("qwen3_moe", {"num_experts": 3}, True, "3 experts"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(folders, family, changes, by_expert, why):
    config = config_of("grpo", folders(family, changes))
    model = load(config.model, CPU).model
    with pytest.raises(ConfigError, match=why):
        tensor_parallel.divide_model(model, groups.Group(0, 2), by_expert)


def test_dropped_inputs_of_adapters_in_slices_are_refused(folders):
    config = config_of("sft", folders("qwen3", {}), "model.lora.rank=2", "model.lora.dropout=0.1")
    model = load(config.model, CPU).model
    add_adapters(model, config.model.lora, seed=0)
    with pytest.raises(ConfigError, match="dropout"):
        tensor_parallel.divide_model(model, groups.Group(0, 2), by_expert=False)


# ---- every family

COLUMNS = {
    "FSDP2": [],
    "tensor parallel": [TENSOR],
    "expert parallel": [TENSOR, EXPERT],
    "sequence parallel": [SEQUENCE],
}


def families_table(folders) -> str:
    """Return the table of what gives the numbers of one process, on two ranks."""
    lines = ["| model type | " + " | ".join(COLUMNS) + " |\n", "|---" * 5 + "|\n"]
    for family in sorted(FAMILIES):
        folder = folders(family, {})
        cases = [(folder, settings) for settings in COLUMNS.values()]
        print(family, flush=True)
        results = run_on_ranks(2, results_on_ranks, cases)[0]
        expected = compute(local_policy(folder))
        cells: list[str] = []
        for column, result in zip(COLUMNS, results, strict=True):
            if isinstance(result, str):
                cells.append("no")
                continue
            assert not difference(expected, result), (family, column)
            cells.append("yes")
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |\n")
    return "".join(lines)


@pytest.mark.scale
def test_every_family_on_two_ranks(folders, request):
    head, rest = PAGE.read_text().split(BEGIN)
    written, tail = rest.split(END_MARK)
    table = families_table(folders)
    if request.config.getoption("--write-docs"):
        PAGE.write_text(head + BEGIN + table + END_MARK + tail)
        return
    assert written == table


def test_the_docs_list_the_families_that_can_be_divided():
    table = PAGE.read_text().split(BEGIN)[1].split(END_MARK)[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    divided = [row[0].strip("| `") for row in rows if row[2] == "yes"]
    assert divided == list(tensor_parallel.FAMILIES)

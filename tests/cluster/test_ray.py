"""Runs on Ray follow the local run: any number of ranks, resumed on others, lost workers."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import preloaded
import pyarrow.parquet as pq
import pytest
import torch
from families import save_family
from parallel import TENSOR, needs_experts
from refused import refused
from tiny_runs import (
    config_of,
    ctrl_c_at,
    metrics_of,
    overrides_of,
    random_batch,
    toy_run,
    tree,
)
from used_ports import use_ports

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")

import reusable_actors  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from postgrad.cluster import actor_pool, engine_pool, stored  # noqa: E402
from postgrad.cluster.actor_pool import ActorPool  # noqa: E402
from postgrad.cluster.backends import open_engine, open_models  # noqa: E402
from postgrad.cluster.engines import engine_config  # noqa: E402
from postgrad.cluster.ray_connection import import_ray, start_local  # noqa: E402
from postgrad.cluster.worker_group import WorkerGroup  # noqa: E402
from postgrad.errors import RunError  # noqa: E402
from postgrad.model.checkpoint_files import read_tensors  # noqa: E402
from postgrad.model.load.tiny import make_tiny  # noqa: E402
from postgrad.model.policy import read_weights  # noqa: E402
from postgrad.rollout.engine import (  # noqa: E402
    Request,
    Sampling,
    make_sampling,
    trajectory_seed,
)
from postgrad.training.driver import train  # noqa: E402
from postgrad.training.log import is_timing  # noqa: E402
from postgrad.training.report import Reporter  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = (*toy_run(steps=3, response_tokens=6), "optimizer.lr=2e-3", "cluster.wait_s=300")
METHODS = {
    "sft": (),
    "grpo": ("training.updates_per_step=2", "method.kl=loss"),
    "ppo": ("method.critic_lr=1e-2",),
    "luffy": (),
    "bupo": ("method.num_blocks=1", "method.phase_one_steps=2"),
    "classmate": (),
}
REQUESTS = [
    Request([1 + i, 2, 3], [trajectory_seed(3, 1, str(i), j) for j in range(3)]) for i in range(5)
]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("verifier") / "odd.py"
    file.write_text("def odd(response, problem):\n    return sum(map(ord, response)) % 11 / 10\n")
    return file


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Starts one Ray for the module; it has more CPUs than the machine, so ranks share cores."""
    before = dict(os.environ)
    patch = pytest.MonkeyPatch()
    patch.setattr(ActorPool, "create_actor", reusable_actors.create_actor)
    patch.setattr(ActorPool, "close", reusable_actors.close)
    patch.setattr(stored, "MIN_BYTES", 1)  # every column stays with the ranks, however small
    start_local(import_ray(), num_cpus=8)
    yield
    reusable_actors.IDLE.clear()
    ray.shutdown()
    patch.undo()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def make_config(tiny, verifier, tmp_path):
    def make(recipe: str, name: str, *more: str):
        own = (
            *SMALL,
            *METHODS.get(recipe, ()),
            f"reward.verifier={verifier}:odd",
            f"runs={tmp_path}",
            f"name={name}",
            *more,
        )
        return config_of(recipe, tiny, *own)

    return make


def run(config) -> tuple[list[dict], dict, Path]:
    """Returns the metrics per step, the last weights and the folder of a complete run."""
    result = train(config, Reporter())
    lines = [line for line in metrics_of(result.folder) if "loss" in line or "critic/loss" in line]
    checkpoint = result.folder / "checkpoints" / f"step-{result.step}"
    return lines, read_weights(checkpoint / "policy", ()), result.folder


def optimizer_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Returns the full tensors of an optimizer that one process or several ranks have written."""
    return dict(read_tensors(folder / "checkpoints" / f"step-{step}" / "optimizer.safetensors"))


def assert_close_weights(one: dict, two: dict, atol: float = 2e-4) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name], two[name], atol=atol), name


def on_ray(workers: int, *more: str) -> tuple[str, ...]:
    return ("cluster=ray", f"cluster.workers={workers}", *more)


def assert_same_metrics(expected: list[dict], actual: list[dict], tolerance: float = 1e-5) -> None:
    """Compares the metrics of all steps; times may differ."""
    assert len(expected) == len(actual) > 0
    for first, second in zip(expected, actual, strict=True):
        # Rollouts from a checkpoint have no times.
        names = {name for name in first if not is_timing(name)}
        assert names == {name for name in second if not is_timing(name)}
        for name in names:
            assert second[name] == pytest.approx(first[name], rel=tolerance, abs=tolerance), (
                f"step {first['step']}: {name}"
            )
    assert any(line.get("grad_norm", 0) > 0 for line in expected)


FREQUENT = ("grpo", "ppo")


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in FREQUENT)) for name in METHODS],
)
def test_two_and_three_ranks_follow_the_local_run(recipe, make_config):
    own = () if recipe == "bupo" else ("training.steps=2",)  # BuPO's second phase is step 3
    if recipe == "grpo":  # with top-k: the ranks replay which ids were kept
        own = (*own, "rollout.top_k=12")
    local, weights, _ = run(make_config(recipe, "local", *own))
    for workers in (2, 3) if recipe == "grpo" else (3,):
        on_ranks, sharded, _ = run(make_config(recipe, f"ray{workers}", *own, *on_ray(workers)))
        assert_same_metrics(local, on_ranks)
        assert_close_weights(weights, sharded)
    start = load_file(Path(make_config(recipe, "x").model.path) / "model.safetensors")
    assert any(not torch.equal(weights[name], start[name]) for name in weights), (
        "a run without updates proves nothing"
    )


MESHES = {
    "tensor": ("cluster.tensor_parallel=2",),
    "sequence": ("cluster.sequence_parallel=2",),
    "hybrid": ("cluster.shard_workers=2",),
}
MESH_CASES: list[Any] = []
for method in METHODS:
    for mesh_name in MESHES:
        is_quick = (method, mesh_name) == ("ppo", "tensor")
        marks = () if is_quick else (pytest.mark.scale,)
        MESH_CASES.append(pytest.param(method, mesh_name, marks=marks))


@pytest.mark.parametrize(("recipe", "mesh"), MESH_CASES)
def test_four_ranks_of_a_mesh_follow_the_local_run(recipe, mesh, make_config):
    local, weights, _ = run(make_config(recipe, "local"))
    on_mesh, divided, _ = run(make_config(recipe, mesh, *on_ray(4, *MESHES[mesh])))
    assert_same_metrics(local, on_mesh)
    assert_close_weights(weights, divided)


# ---- adapters

# Rank 2 gives matrices of two rows: one of three ranks holds none of them. Ranks sum gradients in
# another order, so gradients differ by rounding (1e-7 of their norm). AdamW divides each element by
# its own size and would turn that into up to 2 · lr wherever an element is nearly zero. With
# eps=1 an update is nearly linear in the gradient. With one update per step all ratios are 1, so
# no token crosses the clip bound by rounding.
LORA = ("model.lora.rank=2", "optimizer.lr=0.5", "optimizer.eps=1", "training.updates_per_step=1")


def adapter_of(folder: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return load_file(
        folder / "checkpoints" / f"step-{step}" / "adapter" / "adapter_model.safetensors"
    )


@pytest.mark.parametrize("recipe", ["grpo", pytest.param("bupo", marks=pytest.mark.nightly)])
def test_adapters_on_ranks_follow_the_local_run(recipe, make_config):
    """The engine gets merged weights, the reference is the base model, the files are equal."""
    pytest.importorskip("peft")
    local, weights, folder = run(make_config(recipe, "local", *LORA))
    on_ranks, sharded, other = run(make_config(recipe, "ray", *LORA, *on_ray(2)))
    assert_same_metrics(local, on_ranks)
    assert_close_weights(weights, sharded, 1e-5)
    assert_close_weights(adapter_of(folder), adapter_of(other), 1e-5)
    for file in ("adapter/adapter_config.json", "policy/config.json"):
        assert (
            len({(f / "checkpoints" / "step-3" / file).read_text() for f in (folder, other)}) == 1
        ), file
    states = [optimizer_of(f, 3) for f in (folder, other)]
    assert {n: t.shape for n, t in states[0].items()} == {n: t.shape for n, t in states[1].items()}
    start = load_file(Path(make_config(recipe, "x").model.path) / "model.safetensors")
    changed = {
        name for name in weights if not torch.allclose(weights[name], start[name], atol=1e-4)
    }
    assert changed
    assert all("proj" in name for name in changed), (
        "merged weights change, and only those with adapters"
    )


@pytest.mark.nightly
def test_adapters_resume_on_other_numbers_of_workers_and_reach_engines(make_config, tmp_path):
    pytest.importorskip("peft")
    keep = (*LORA, "training.checkpoint_every=1", "training.keep_checkpoints=9", "method.kl=none")
    complete, weights, folder = run(make_config("grpo", "complete", *keep, *on_ray(2)))
    for step, cluster in enumerate([on_ray(2), on_ray(3), ()], start=1):
        stop_after(make_config("grpo", "resumed", *keep, *cluster), step)
    resumed = [line for line in metrics_of(tmp_path / "resumed") if "loss" in line]
    assert_same_metrics(complete, resumed)
    separate, other_weights, other = run(
        make_config("grpo", "separate", *keep, *on_ray(2, "cluster.engines=1"))
    )
    assert responses(folder, 3) == responses(other, 3) != responses(folder, 1)
    assert all(line["engine/gap_max"] < 1e-4 for line in [*complete, *separate]), (
        "trainer and engine have equal log-probs"
    )
    assert_close_weights(weights, other_weights, 1e-4)


# ---- ports, number of workers, pools


def assert_close(one: Any, two: Any, name: str, tolerance: float) -> None:
    """Compare two results of the contract; ranks add up in another order."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), name
        for key in one:
            assert_close(one[key], two[key], f"{name} {key}", tolerance)
    elif isinstance(one, torch.Tensor):
        assert torch.allclose(one, two, atol=tolerance, equal_nan=True), name
    elif isinstance(one, float):
        assert two == pytest.approx(one, rel=tolerance, abs=tolerance), name
    else:
        assert one == two, name


def tokens_of(groups: list[list[Any]]) -> list[list[int]]:
    return [completion.tokens for group in groups for completion in group]


def test_every_port_on_ray_gives_what_a_local_model_gives(make_config, tmp_path):
    results = {}
    for name, more in {
        "local": (),
        "ray": on_ray(3),
        "engines": on_ray(2, "cluster.engines=2"),
    }.items():
        config = make_config("grpo", name, "method.kl=none", *more)
        with open_models(config) as models:
            results[name] = use_ports(models.policy, models.engine, tmp_path / f"saved {name}")
    local = results.pop("local")
    sampled = ("generated", "greedy", "after publish")
    assert tokens_of(local["generated"]) != tokens_of(local["after publish"])
    for name, remote in results.items():
        assert remote["shares_weights"] == (name == "ray")
        for what in sampled:
            assert tokens_of(remote[what]) == tokens_of(local[what]), (name, what)
        for what in ("logprobs", "inside"):
            assert_close(local[what], remote[what], f"{name} {what}", 1e-5)
        for what in ("token_stats", "after second update", "after load", "weights"):
            assert_close(local[what], remote[what], f"{name} {what}", 1e-3)
        for key in ("loss", "grad_norm", "entropy"):
            assert_close(local["metrics"][key], remote["metrics"][key], f"{name} {key}", 1e-5)
        for what in ("columns", "refused"):
            assert remote[what] == local[what], (name, what)
        assert "advantages" in remote["broken"][1] and remote["failed"][0] is RunError
    before = tokens_of(results["engines"]["before publish"])
    assert before == tokens_of(local["generated"]), "engines keep the old weights"


def test_resume_on_other_numbers_of_workers(make_config):
    """A run on three ranks resumes on two, one and none; on three it resumes bit-exactly."""
    keep = ("training.checkpoint_every=1", "training.keep_checkpoints=9", "training.steps=4")
    complete, weights, folder = run(make_config("ppo", "complete", *keep, *on_ray(3)))
    for name, clusters in {
        "fewer": [on_ray(3), on_ray(2), on_ray(1), ()],
        "same": [on_ray(3), on_ray(3)],
    }.items():
        for step, cluster in enumerate(clusters, start=1):
            config = make_config("ppo", name, *keep, *cluster)
            stop_after(config, step if step < len(clusters) else 4)
        lines = [line for line in metrics_of(folder.parent / name) if "loss" in line]
        checkpoint = folder.parent / name / "checkpoints" / "step-4"
        resumed_weights = read_weights(checkpoint / "policy", ())
        if name == "same":
            assert_same_metrics(complete, lines, tolerance=0.0)
            assert all(torch.equal(weights[n], resumed_weights[n]) for n in weights)
            files = [file for file in checkpoint.rglob("*.safetensors") if file.is_file()]
            assert sum(file.name.endswith("-of-00003.safetensors") for file in files) == 2 * 3
            for file in files:
                other = folder / "checkpoints" / "step-4" / file.relative_to(checkpoint)
                assert file.read_bytes() == other.read_bytes(), file
        else:
            assert_same_metrics(complete, lines)


def responses(folder: Path, step: int) -> list[list[int]]:
    return (
        pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet")
        .column("response")
        .to_pylist()
    )


def stop_after(config, step: int) -> None:
    """Runs until a step is saved, as after Ctrl-C in that step."""
    reporter = ctrl_c_at(step) if step < config.training.steps else Reporter()
    assert train(config, reporter).step == step


def test_role_with_its_own_workers(make_config):
    local, _, _ = run(make_config("ppo", "local", "training.steps=2"))
    on_ranks, _, _ = run(
        make_config("ppo", "pooled", "training.steps=2", *on_ray(1, "cluster.pools.critic=2"))
    )
    assert_same_metrics(local, on_ranks)


@pytest.fixture(scope="module")
def other_models(tmp_path_factory) -> tuple[Path, Path]:
    """(teacher, reward model) of random weights."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("models")
    teacher = make_tiny(folder / "teacher", seed=5, layers=1, width=32)
    torch.manual_seed(6)
    model = AutoModelForSequenceClassification.from_pretrained(teacher, num_labels=1)
    model.save_pretrained(folder / "reward")
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder / "reward")
    return teacher, folder / "reward"


@pytest.mark.parametrize(
    ("recipe", "divergence", "pool"),
    [("distill", "sampled", ("cluster.pools.teacher=1",)), ("gkd", "jsd", ())],
    ids=["sampled tokens, apart", "top tokens, beside"],
)
def test_a_teacher_on_ranks_follows_the_local_run(
    recipe, divergence, pool, make_config, other_models
):
    """With workers of its own, and sharded beside the policy."""
    own = (f"method.teacher={other_models[0]}", "training.steps=2")
    local, _, _ = run(make_config(recipe, "local", *own))
    assert local[0][f"distill/{divergence}"] != 0
    on_ranks, _, _ = run(make_config(recipe, "ray", *own, *on_ray(2, *pool)))
    assert_same_metrics(local, on_ranks)


@needs_experts
@pytest.mark.nightly
@pytest.mark.parametrize("pool", [(), ("cluster.pools.critic=1",)], ids=["beside", "apart"])
def test_a_dense_critic_of_a_policy_with_experts_follows_the_local_run(
    pool, make_config, other_models, tmp_path
):
    """Expert parallelism divides the policy only; a pool of one worker divides nothing."""
    experts = save_family(tmp_path / "experts", "qwen3_moe")
    own = (f"model.path={experts}", f"method.critic_path={other_models[0]}", "training.steps=2")
    local, _, _ = run(make_config("ppo", "local", *own))
    on_ranks, _, _ = run(
        make_config("ppo", "ray", *own, *on_ray(2, "cluster.expert_parallel=2", *pool))
    )
    assert_same_metrics(local, on_ranks)


def test_a_reward_model_with_its_own_worker_follows_the_local_run(make_config, other_models):
    """The policy is divided over two workers, the reward model is not."""
    own = (f"reward.verifier=model:{other_models[1]}", "training.steps=2")
    local, _, _ = run(make_config("grpo", "local", *own))
    assert len({line["reward/reward_model"] for line in local}) == 2
    for name, pool in {"beside": (), "apart": ("cluster.pools.reward_model=1",)}.items():
        on_ranks, _, _ = run(make_config("grpo", name, *own, *on_ray(2, TENSOR, *pool)))
        assert_same_metrics(local, on_ranks)


@pytest.mark.nightly
def test_offload_and_activation_checkpointing_change_nothing(make_config):
    local, _, _ = run(make_config("ppo", "local", "training.steps=2"))
    memory_saving = ("cluster.offload=true", "model.activation_checkpointing=true")
    on_ranks, _, _ = run(
        make_config("ppo", "offload", "training.steps=2", *on_ray(2, *memory_saving))
    )
    assert_same_metrics(local, on_ranks)


@pytest.mark.parametrize("more", [(), ("model.lora.rank=2",)], ids=["full", "adapters"])
def test_bfloat16_keeps_float32_masters_and_writes_the_local_files(make_config, more):
    """The step is close to the local one, up to rounding; the files have equal names and dtypes."""
    results = {}
    for name, cluster in {"local": (), "ray": on_ray(2)}.items():
        own = ("training.steps=1", "model.dtype=bfloat16", "method.kl=none", *more, *cluster)
        lines, weights, folder = run(make_config("grpo", name, *own))
        weights = adapter_of(folder, 1) if more else weights
        optimizer = optimizer_of(folder, 1)
        results[name] = (lines[0], weights, optimizer)
    local, local_weights, local_optimizer = results["local"]
    on_ranks, weights, optimizer = results["ray"]
    assert on_ranks["loss"] == pytest.approx(local["loss"], abs=1e-3)
    assert on_ranks["grad_norm"] == pytest.approx(local["grad_norm"], rel=0.02)
    for a, b in ((local_weights, weights), (local_optimizer, optimizer)):
        assert a.keys() == b.keys()
        for key in a:
            assert (a[key].dtype, a[key].shape) == (b[key].dtype, b[key].shape)
    master_keys = [key for key in optimizer if key.startswith("master/")]
    masters = {key.removeprefix("master/"): optimizer[key] for key in master_keys}
    if more:
        masters = {
            f"base_model.model.{name.replace('.default.', '.')}": t for name, t in masters.items()
        }
    assert masters.keys() == weights.keys()
    assert all(t.dtype == torch.float32 for t in masters.values())
    assert all(torch.equal(masters[k].bfloat16(), weights[k]) for k in weights)


# ---- prefetched rollouts, asynchronous checkpoints


def test_staleness_0_changes_nothing_and_1_is_corrected_and_resumes(make_config, tmp_path):
    cluster = on_ray(1, "cluster.engines=1", "method.kl=none", "training.checkpoint_every=1")
    sync, weights, _ = run(make_config("grpo", "sync", *cluster))
    zero, same, _ = run(make_config("grpo", "zero", "rollout.staleness=0", *cluster))
    assert_same_metrics(sync, zero, tolerance=0.0)
    assert all(torch.equal(weights[n], same[n]) for n in weights)

    prefetched, stale, _ = run(make_config("grpo", "prefetched", "rollout.staleness=1", *cluster))
    assert [line["rollout/staleness"] for line in prefetched] == [0.0, 1.0, 1.0]
    assert all("wait/rollout_s" in line and "stage/sample_s" in line for line in prefetched)
    assert prefetched[0]["loss"] == pytest.approx(sync[0]["loss"], abs=1e-6)
    gaps = [line["engine/gap_mean"] for line in prefetched]
    assert gaps[0] < 1e-4 < gaps[1], "the gap shows that the rows are from older weights"
    assert prefetched[0]["correction/std"] < 1e-4 < prefetched[1]["correction/std"], (
        "the correction weights differ from 1"
    )
    run(make_config("grpo", "frozen", "optimizer.lr=1e-12", *cluster))
    assert (
        responses(tmp_path / "prefetched", 2)
        == responses(tmp_path / "frozen", 2)
        != responses(tmp_path / "sync", 2)
    ), "sampled before step 1"
    assert responses(tmp_path / "prefetched", 3) != responses(tmp_path / "frozen", 3), (
        "sampled after step 1"
    )
    config = make_config("grpo", "killed", "rollout.staleness=1", *cluster)
    stop_after(config, 1)
    assert (tmp_path / "killed" / "checkpoints" / "step-1" / "pending.bin").is_file()
    resumed, resumed_weights, _ = run(config)
    assert_same_metrics(prefetched, resumed, tolerance=0.0)
    assert all(torch.equal(stale[n], resumed_weights[n]) for n in stale)


@pytest.mark.nightly
def test_stream_on_two_engines_keeps_the_bound(make_config):
    stream = ("rollout.stream=true", "rollout.staleness=1", "method.kl=none")
    lines, _, folder = run(make_config("grpo", "stream", *stream, *on_ray(1, "cluster.engines=2")))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["staleness/max"] <= 1 for line in lines] == [True] * 3
    uids = []
    for step, line in enumerate(lines, start=1):
        table = pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet")
        versions = [version for row in table["version"].to_pylist() for version in row]
        assert step - 1 - min(versions) == line["staleness/max"] and max(versions) < step
        uids += sorted(set(table["uid"].to_pylist()))
    assert len(set(uids)) == 12


# ---- access


def test_nothing_listens_beyond_loopback():
    """Checks the listening sockets of every process of the cluster."""
    import psutil

    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    num_listening = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # an actor of an earlier test may end now
            name = process.name()
            if "ray" in " ".join(process.cmdline()) or name.startswith("ray"):
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        num_listening += 1
                        assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), (
                            name,
                            connection.laddr,
                        )
    assert num_listening > 0


def test_wrong_token_is_refused_in_one_line(tiny, verifier, tmp_path):
    address = ray.get_runtime_context().gcs_address
    more = [
        "cluster=ray",
        f"cluster.address={address}",
        f"runs={tmp_path}",
        f"reward.verifier={verifier}:odd",
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_TOKEN")}
    environment["RAY_AUTH_TOKEN"] = "0" * 64
    arguments = overrides_of(tiny, *SMALL, *more)
    done = preloaded.run(preloaded.COMMAND, "train", "grpo", *arguments, env=environment)
    assert done.returncode == 2, done.stderr
    assert f"cluster.address={address}" in done.stderr
    assert "RAY_AUTH_TOKEN" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_more_workers_than_cores_are_refused(make_config):
    with (
        refused("too_large", "cluster.workers", shows="99"),
        open_models(make_config("grpo", "x", *on_ray(99))),
    ):
        pass


def test_worker_without_a_free_core_is_named(make_config, monkeypatch):
    """Another program holds all cores but one; the second worker waits for it."""

    class Other:
        def ready(self):
            return True

    monkeypatch.setattr(actor_pool, "PLACE_S", 3.0)
    monkeypatch.setattr(reusable_actors, "RESET_S", 0.1)  # the first worker waits for the second
    monkeypatch.setattr(reusable_actors, "IDLE", [])  # new actors, which need a core each
    free = int(ray.available_resources()["CPU"])
    other = ray.remote(Other).options(num_cpus=free - 1).remote()
    assert ray.get(other.ready.remote())
    try:
        named = r"policy 1 worker was not started: .* had 1 CPU free within 3 s"
        with pytest.raises(RunError, match=named):
            WorkerGroup(ray, make_config("grpo", "waits", *on_ray(2)), "policy", 2, ["policy"])
    finally:
        ray.kill(other)


def test_pool_without_a_role_is_refused(make_config):
    config = make_config("grpo", "x", *on_ray(1, "cluster.pools.critic=1"))
    with refused("unknown_name", "cluster.pools.critic"), open_models(config):
        pass


def test_engines_alone_give_the_samples_of_a_local_engine(make_config):
    with (
        open_engine(engine_config(make_config("grpo", "x", *on_ray(2)))) as engine,
        open_engine(engine_config(make_config("grpo", "x"))) as local,
    ):
        assert engine.generate(REQUESTS, Sampling(1.0, 8)) == local.generate(
            REQUESTS, Sampling(1.0, 8)
        )


# ---- lost workers; last, because the tests before share actors that these kill


def test_lost_engine_is_restarted_and_repeats_its_requests(make_config, capsys, monkeypatch):
    monkeypatch.setattr(engine_pool, "MAX_RESTARTS", 1)
    with open_models(
        make_config("grpo", "engine", "method.kl=none", *on_ray(1, "cluster.engines=2"))
    ) as models:
        models.policy.update(random_batch(32), 1)
        models.engine.publish(models.policy.weights())
        before = models.engine.generate(REQUESTS, Sampling(1.0, 10))
        engines = models.engine.caller
        ray.get(engines.workers[1].handle.die_at.remote("engine", "generate"))
        assert models.engine.generate(REQUESTS, Sampling(1.0, 10)) == before, (
            "equal seeds and equal published weights"
        )
        assert "the engine 1 worker died during engine.generate" in capsys.readouterr().err
        ray.get(engines.workers[0].handle.die_at.remote("engine", "generate"))
        with pytest.raises(RunError, match=r"the engine 0 worker died .* after 1 restarts"):
            models.engine.generate(REQUESTS, Sampling(1.0, 10))


@pytest.mark.long  # test_rollout_stream.py has the same without Ray
def test_lost_engine_of_a_stream_is_restarted_and_samples_its_groups_again(make_config, capsys):
    stream = ("rollout.stream=true", "rollout.staleness=1", "method.kl=none")
    config = make_config("grpo", "stream", *stream, *on_ray(1, "cluster.engines=2"))
    with open_models(config) as models:
        expected = models.engine.generate(REQUESTS, make_sampling(config.rollout))
        ray.get(models.engine.caller.workers[1].handle.die_at.remote("engine", "poll"))
        waiting = {str(i): request for i, request in enumerate(REQUESTS)}
        unfinished = {name: len(request.seeds) for name, request in waiting.items()}
        added = waiting
        rows = {}
        while unfinished:
            result = models.engine.poll(0, list(unfinished), added)
            added = {name: waiting[name] for name in result["missing"]}
            for name, index, completion in result["finished"]:
                rows[name, index] = completion.tokens
                unfinished[name] -= 1
            unfinished = {name: count for name, count in unfinished.items() if count}
        assert "the engine 1 worker died during engine.poll" in capsys.readouterr().err
    for i, group in enumerate(expected):
        assert [one.tokens for one in group] == [rows[str(i), j] for j in range(len(group))]


def test_failure_of_one_rank_is_raised_at_once(make_config):
    """The other ranks hang in a collective operation; the driver does not wait for them."""
    with open_models(make_config("grpo", "alone", "method.kl=none", *on_ray(2))) as models:
        ray.get(
            models.policy.caller.workers[1].handle.fail_at.remote("policy", "logprobs", "a bad row")
        )
        start = time.monotonic()
        with pytest.raises(RunError, match=r"^a bad row$"):
            models.policy.logprobs(random_batch(3))
        assert time.monotonic() - start < 300, "before cluster.wait_s"


def test_hung_worker_is_named_with_the_time_limit(make_config):
    with open_models(
        make_config("grpo", "hung", "cluster.wait_s=2", "method.kl=none", *on_ray(1))
    ) as models:
        group = models.policy.caller
        ray.get(group.workers[0].handle.hang_at.remote("policy", "logprobs"))
        with pytest.raises(
            RunError, match=r"the policy worker .* policy\.logprobs within 2 s \(cluster\.wait_s\)"
        ):
            models.policy.logprobs(random_batch(1))
        with pytest.raises(RunError, match=r"engine\.generate"):
            models.engine.generate(REQUESTS, Sampling())


EVERY = ("training.checkpoint_every=1", "training.keep_checkpoints=9")


@pytest.fixture(scope="module")
def complete(tiny, verifier, tmp_path_factory):
    """Returns the metrics, the weights and the folder of a run on two ranks that nobody kills."""
    folder = tmp_path_factory.mktemp("complete")
    own = (*SMALL, *METHODS["grpo"], *EVERY, f"reward.verifier={verifier}:odd", f"runs={folder}")
    return run(config_of("grpo", tiny, *own, *on_ray(2)))


def test_worker_killed_in_a_step_is_named_and_the_run_resumes(
    make_config, complete, monkeypatch, tmp_path
):
    mark = tmp_path / "died"
    expected, weights, _ = complete
    config = make_config("grpo", "killed", "training.checkpoint_every=1", *on_ray(2))
    original = WorkerGroup.__init__

    def init_with_kill(self, *arguments) -> None:
        original(self, *arguments)
        ray.get(self.workers[1].handle.die_at.remote("policy", "update", 2, str(mark)))

    monkeypatch.setattr(WorkerGroup, "__init__", init_with_kill)
    with pytest.raises(
        RunError, match=r"step 2, stage update: the policy 1 worker died during policy\.update"
    ):
        train(config, Reporter())
    assert time.time() - mark.stat().st_mtime < 300, "before cluster.wait_s"
    monkeypatch.setattr(WorkerGroup, "__init__", original)
    metrics, resumed, _ = run(config)
    assert_same_metrics(expected, metrics, tolerance=0.0)
    assert all(torch.equal(weights[n], resumed[n]) for n in weights)


class DriverKilled(BaseException):
    """Ends a run as SIGKILL does: the driver handles nothing and removes nothing."""


CHECK_STATUSES = WorkerGroup._check_statuses


def kill_driver_after_loss(self, *arguments) -> None:
    try:
        CHECK_STATUSES(self, *arguments)
    except RunError as error:
        raise DriverKilled from error


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [(1,), (0, 1)], ids=["one rank", "all ranks and the driver"])
def test_a_kill_between_the_files_of_a_checkpoint(
    killed, make_config, complete, monkeypatch, tmp_path
):
    original = WorkerGroup.__init__

    def init_with_kill(self, *arguments) -> None:
        original(self, *arguments)
        for rank in killed:
            ray.get(self.workers[rank].handle.die_between_files.remote(2))

    config = make_config("grpo", "killed", *EVERY, *on_ray(2))
    with monkeypatch.context() as patch:
        patch.setattr(WorkerGroup, "__init__", init_with_kill)
        if len(killed) == 2:
            patch.setattr(WorkerGroup, "_check_statuses", kill_driver_after_loss)
        with pytest.raises(DriverKilled if len(killed) == 2 else RunError):
            train(config, Reporter())
    root = tmp_path / "killed" / "checkpoints"
    assert (root / "latest").read_text() == "step-1\n"
    assert not (root / "step-2").exists()
    half_written = [path.name for path in root.rglob("*.safetensors") if "step-1/" not in str(path)]
    if len(killed) == 2:  # nobody was left to remove it
        assert any(name.startswith("model-") for name in half_written)
        assert not any(name.startswith("optimizer-") for name in half_written)
    else:
        assert not half_written
    run(config)
    assert tree(root) == tree(complete[2] / "checkpoints")

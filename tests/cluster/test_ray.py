"""Ray with FSDP2 over gloo: the same trajectories as one process, on any number of ranks, through deaths and changes of their number."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from world import config_of, metrics_of, overrides_of, random_batch, toy_run

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")

import warm  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from postgrad.cluster import place, place_engine  # noqa: E402
from postgrad.cluster import ray_backend as ray_place  # noqa: E402
from postgrad.cluster.engines import engine_config  # noqa: E402
from postgrad.errors import ConfigError, RunError  # noqa: E402
from postgrad.model.views import after  # noqa: E402
from postgrad.rollout.engine import Request, Sampling, trajectory_seed  # noqa: E402
from postgrad.training.driver import train  # noqa: E402
from postgrad.training.log import is_timing  # noqa: E402
from postgrad.training.report import Reporter  # noqa: E402

pytestmark = pytest.mark.slow

SMALL = (
    *toy_run(steps=3, response_tokens=6),
    "optimizer.lr=2e-3",
    "cluster.wait_s=60",
)
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
    """One Ray for the module, with more room than cores: the ranks here take turns."""
    before = dict(os.environ)
    patch = pytest.MonkeyPatch()
    patch.setattr(ray_place.Actors, "make", warm.make)
    patch.setattr(ray_place.Actors, "close", warm.close)
    ray_place.start_local(ray_place.import_ray(), num_cpus=8)
    yield
    warm.IDLE.clear()
    ray.shutdown()
    patch.undo()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def overrides(tiny, verifier, tmp_path):
    def make(recipe: str, name: str, *more: str):
        own = (
            *SMALL,
            *METHODS[recipe],
            f"reward.verifier={verifier}:odd",
            f"runs={tmp_path}",
            f"name={name}",
            *more,
        )
        return config_of(recipe, tiny, *own)

    return make


def run(config) -> tuple[list[dict], dict, Path]:
    """(metrics of the steps, the last weights, the folder) of a whole run."""
    result = train(config, Reporter())
    lines = [line for line in metrics_of(result.folder) if "loss" in line or "critic/loss" in line]
    return (
        lines,
        load_file(
            result.folder / "checkpoints" / f"step-{result.step}" / "policy" / "model.safetensors"
        ),
        result.folder,
    )


def on_ray(workers: int, *more: str) -> tuple[str, ...]:
    return ("cluster=ray", f"cluster.workers={workers}", *more)


def assert_same_trajectory(one: list[dict], two: list[dict], tolerance: float = 1e-5) -> None:
    assert len(one) == len(two) > 0
    for mine, other in zip(one, two, strict=True):
        assert mine.keys() == other.keys()
        for name in mine:
            if not is_timing(name):
                assert other[name] == pytest.approx(mine[name], rel=tolerance, abs=tolerance), (
                    f"step {mine['step']}: {name}"
                )
    assert any(line.get("grad_norm", 0) > 0 for line in one)


@pytest.mark.parametrize("recipe", METHODS)
def test_two_and_three_ranks_follow_the_local_run(recipe, overrides):
    local, weights, _ = run(overrides(recipe, "local"))
    for workers in (2, 3):
        there, sharded, _ = run(overrides(recipe, f"ray{workers}", *on_ray(workers)))
        assert_same_trajectory(local, there)
        assert weights.keys() == sharded.keys()
        for name in weights:
            assert torch.allclose(weights[name], sharded[name], atol=2e-4), name
    start = load_file(Path(overrides(recipe, "x").model.path) / "model.safetensors")
    assert any(not torch.equal(weights[name], start[name]) for name in weights), (
        "a run that does not move proves nothing"
    )


# ---- adapters

# Rank 2 gives matrices of two rows: one of three ranks holds none of them. Ranks sum gradients in
# another order, so gradients differ by rounding (1e-7 of their norm). AdamW divides each element by
# its own size and would turn that into up to 2 · lr wherever an element is nearly zero. With
# eps=1 an update is nearly linear in the gradient. With one update per step all ratios are 1, so
# no token crosses the clip bound by rounding.
LORA = (
    "model.lora.rank=2",
    "optimizer.lr=0.5",
    "optimizer.eps=1",
    "training.updates_per_step=1",
)


def adapter_of(folder: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return load_file(
        folder / "checkpoints" / f"step-{step}" / "adapter" / "adapter_model.safetensors"
    )


@pytest.mark.parametrize("recipe", ["grpo", "bupo"])
def test_adapters_on_ranks_follow_the_local_run(recipe, overrides):
    """The engine sees them merged, the reference is the base below them, and the files are those of one process."""
    pytest.importorskip("peft")
    local, weights, folder = run(overrides(recipe, "local", *LORA))
    there, sharded, other = run(overrides(recipe, "ray", *LORA, *on_ray(2)))
    assert_same_trajectory(local, there)
    for one, two in ((weights, sharded), (adapter_of(folder), adapter_of(other))):
        assert one.keys() == two.keys()
        assert all(
            one[name].shape == two[name].shape and torch.allclose(one[name], two[name], atol=1e-5)
            for name in one
        )
    for file in ("adapter/adapter_config.json", "policy/config.json"):
        assert (
            len({(f / "checkpoints" / "step-3" / file).read_text() for f in (folder, other)}) == 1
        ), file
    states = [
        load_file(f / "checkpoints" / "step-3" / "optimizer.safetensors") for f in (folder, other)
    ]
    assert {n: t.shape for n, t in states[0].items()} == {n: t.shape for n, t in states[1].items()}
    start = load_file(Path(overrides(recipe, "x").model.path) / "model.safetensors")
    moved = {name for name in weights if not torch.allclose(weights[name], start[name], atol=1e-4)}
    assert moved and all("proj" in name for name in moved), (
        "merged weights move, and only those that have adapters"
    )


def test_adapters_go_on_with_another_number_of_workers_and_engines_apart_see_them(
    overrides, tmp_path
):
    pytest.importorskip("peft")
    keep = (
        *LORA,
        "training.checkpoint_every=1",
        "training.keep_checkpoints=9",
        "method.kl=none",
        "training.async_save=true",
    )
    whole, weights, folder = run(overrides("grpo", "whole", *keep, *on_ray(2)))
    for step, where in enumerate([on_ray(2), on_ray(3), ()], start=1):
        stop_after(overrides("grpo", "falling", *keep, *where), step)
    assert_same_trajectory(
        whole, [line for line in metrics_of(tmp_path / "falling") if "loss" in line]
    )
    far, there, other = run(overrides("grpo", "far", *keep, *on_ray(2, "cluster.engines=1")))
    assert responses(folder, 3) == responses(other, 3) != responses(folder, 1)
    assert all(line["engine/gap_max"] < 1e-4 for line in [*whole, *far]), (
        "what the trainer finds is what was sampled"
    )
    assert all(torch.allclose(weights[name], there[name], atol=1e-4) for name in weights)


def test_dropped_inputs_of_adapters_repeat_on_ranks(overrides):
    pytest.importorskip("peft")
    own = (*LORA, "training.steps=1", *on_ray(2))
    one, two, plain = (
        run(overrides("sft", f"p{i}", f"model.lora.dropout={p}", *own))[1]
        for i, p in enumerate((0.5, 0.5, 0.0))
    )
    assert all(torch.equal(one[name], two[name]) for name in one) and any(
        not torch.equal(one[name], plain[name]) for name in one
    )


# ---- ports, numbers of workers, pools


def test_the_ports_of_ranks_answer_as_the_local_ones(overrides):
    """Log-probs under views, one update, what is sampled, and an update that is seen in it."""
    stories = {}
    for name, more in {
        "local": (),
        "ray": on_ray(3),
        "apart": on_ray(2, "cluster.engines=2"),
    }.items():
        config = overrides("grpo", name, "method.kl=none", *more)
        if name == "apart":
            config.cluster.engine_apart = True
        with place(config) as placed:
            batch = random_batch(31)
            told = {
                "logprobs": placed.policy.logprobs(batch),
                "inside": placed.policy.logprobs(batch, after(1)),
            }
            told["sampled"] = placed.engine.generate(REQUESTS, Sampling(1.0, 10))
            told["metrics"] = placed.policy.update(random_batch(32), 1)
            if not placed.engine.shares_weights:
                told["old"] = placed.engine.generate(REQUESTS, Sampling(1.0, 10))
                placed.engine.publish(placed.policy.weights())
            told["again"] = placed.engine.generate(REQUESTS, Sampling(1.0, 10))
            told["weights"] = dict(placed.policy.weights())
            stories[name] = told
    local = stories["local"]
    assert [c.tokens for r in local["sampled"] for c in r] != [
        c.tokens for r in local["again"] for c in r
    ]
    for name in ("ray", "apart"):
        there = stories[name]
        for what in ("logprobs", "inside"):
            for column in local[what]:
                assert torch.allclose(local[what][column], there[what][column], atol=1e-5), (
                    name,
                    what,
                    column,
                )
        for what in ("sampled", "again"):
            assert [c.tokens for r in local[what] for c in r] == [
                c.tokens for r in there[what] for c in r
            ], (name, what)
        for key in ("loss", "grad_norm", "entropy"):
            assert there["metrics"][key] == pytest.approx(local["metrics"][key], rel=1e-5)
    assert [c.tokens for r in stories["apart"]["old"] for c in r] == [
        c.tokens for r in local["sampled"] for c in r
    ]
    assert all(
        torch.allclose(local["weights"][n], stories["ray"]["weights"][n], atol=1e-6)
        for n in local["weights"]
    )


def test_resume_on_other_numbers_of_workers(overrides):
    """A checkpoint of three ranks goes on with two, then one, then none; with the same number it goes on bit for bit."""
    keep = ("training.checkpoint_every=1", "training.keep_checkpoints=9", "training.steps=4")
    whole, weights, folder = run(overrides("ppo", "whole", *keep, *on_ray(3)))
    for name, places in {
        "falling": [on_ray(3), on_ray(2), on_ray(1), ()],
        "same": [on_ray(3), on_ray(3)],
    }.items():
        for step, where in enumerate(places, start=1):
            config = overrides("ppo", name, *keep, *where)
            stop_after(config, step if step < len(places) else 4)
        lines = [line for line in metrics_of(folder.parent / name) if "loss" in line]
        there = load_file(
            folder.parent / name / "checkpoints" / "step-4" / "policy" / "model.safetensors"
        )
        if name == "same":
            assert_same_trajectory(whole, lines, tolerance=0.0)
            assert all(torch.equal(weights[n], there[n]) for n in weights)
            for file in (
                "optimizer.safetensors",
                "critic_optimizer.safetensors",
                "critic/value_head.safetensors",
            ):
                one, two = (
                    p / "checkpoints" / "step-4" / file for p in (folder, folder.parent / name)
                )
                assert one.read_bytes() == two.read_bytes(), file
        else:
            assert_same_trajectory(whole, lines)


def responses(folder: Path, step: int) -> list[list[int]]:
    return (
        pq.read_table(folder / "rollouts" / f"step-{step:06d}.parquet")
        .column("response")
        .to_pylist()
    )


def stop_after(config, step: int) -> None:
    """Run until a step is saved, as if somebody had pressed Ctrl-C in it."""
    import signal

    class Stop(Reporter):
        def step(self, metrics, batch) -> None:
            if metrics["step"] == step < config.training.steps:
                signal.raise_signal(signal.SIGINT)

    assert train(config, Stop()).step == step


def test_a_role_in_a_pool_of_its_own(overrides):
    local, _, _ = run(overrides("ppo", "local", "training.steps=2"))
    there, _, _ = run(
        overrides("ppo", "pooled", "training.steps=2", *on_ray(1, "cluster.pools.critic=2"))
    )
    assert_same_trajectory(local, there)


MOODY = """
import os
def moody(response, problem):
    assert len(response) % 5, "bad mood"
    return {"score": len(response) / 6, "pid": os.getppid()}
"""


def test_verifiers_in_a_pool_of_their_own(overrides, tmp_path):
    """The same run, judged below actors; a verifier that fails is counted there as here."""
    (tmp_path / "moody.py").write_text(MOODY)
    own = (
        "training.steps=2",
        f"reward.verifier={tmp_path / 'moody.py'}:moody",
        "reward.max_failure_rate=1",
    )
    local, _, _ = run(overrides("grpo", "local", *own))
    there, _, _ = run(overrides("grpo", "pool", *own, *on_ray(1, "cluster.pools.verifier=2")))
    above = [[line.pop("reward/pid") for line in told] for told in (local, there)]
    assert_same_trajectory(local, there)
    assert set(above[0]) == {float(os.getpid())} and float(os.getpid()) not in above[1]
    assert any(line["reward/failures"] > 0 for line in local)


def test_offload_and_recomputed_blocks_change_nothing(overrides):
    local, _, _ = run(overrides("ppo", "local", "training.steps=2"))
    frugal = ("cluster.offload=true", "model.activation_checkpointing=true")
    there, _, _ = run(overrides("ppo", "frugal", "training.steps=2", *on_ray(2, *frugal)))
    assert_same_trajectory(local, there)


@pytest.mark.parametrize("more", [(), ("model.lora.rank=2",)], ids=["whole", "adapters"])
def test_bfloat16_keeps_float32_masters_and_writes_the_local_files(overrides, more):
    """The step is near the local one (sums in another order, rounded); files, names and types are the same, so either goes on."""
    told = {}
    for name, where in {"local": (), "ray": on_ray(2)}.items():
        own = ("training.steps=1", "model.dtype=bfloat16", "method.kl=none", *more, *where)
        lines, weights, folder = run(overrides("grpo", name, *own))
        weights = adapter_of(folder, 1) if more else weights
        told[name] = (
            lines[0],
            weights,
            load_file(folder / "checkpoints" / "step-1" / "optimizer.safetensors"),
        )
    (one, mine, state), (two, theirs, other) = told["local"], told["ray"]
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-3) and two[
        "grad_norm"
    ] == pytest.approx(one["grad_norm"], rel=0.02)
    for a, b in ((mine, theirs), (state, other)):
        assert {k: (t.dtype, t.shape) for k, t in a.items()} == {
            k: (t.dtype, t.shape) for k, t in b.items()
        }
    masters = {k.removeprefix("master/"): t for k, t in other.items() if k.startswith("master/")}
    if more:
        masters = {
            f"base_model.model.{name.replace('.default.', '.')}": t for name, t in masters.items()
        }
    assert masters.keys() == theirs.keys() and all(
        t.dtype == torch.float32 for t in masters.values()
    )
    assert all(torch.equal(masters[k].bfloat16(), theirs[k]) for k in theirs)


# ---- rollouts ahead, saving behind


def test_staleness_0_is_the_run_without_it_and_1_is_corrected_and_resumes(overrides, tmp_path):
    apart = on_ray(1, "cluster.engines=1", "method.kl=none", "training.checkpoint_every=1")
    sync, weights, _ = run(overrides("grpo", "sync", *apart))
    zero, same, _ = run(overrides("grpo", "zero", "rollout.staleness=0", *apart))
    assert_same_trajectory(sync, zero, tolerance=0.0)
    assert all(torch.equal(weights[n], same[n]) for n in weights)

    ahead, stale, _ = run(overrides("grpo", "ahead", "rollout.staleness=1", *apart))
    assert [line["rollout/staleness"] for line in ahead] == [0.0, 1.0, 1.0]
    assert all("wait/rollout_s" in line and "stage/sample_s" in line for line in ahead)
    assert ahead[0]["loss"] == pytest.approx(sync[0]["loss"], abs=1e-6)
    gaps = [line["engine/gap_mean"] for line in ahead]
    assert gaps[0] < 1e-4 < gaps[1], "rows of the older weights are seen as such"
    assert ahead[0]["correction/std"] < 1e-4 < ahead[1]["correction/std"], "and weighed as such"
    run(overrides("grpo", "still", "optimizer.lr=1e-12", *apart))
    assert (
        responses(tmp_path / "ahead", 2)
        == responses(tmp_path / "still", 2)
        != responses(tmp_path / "sync", 2)
    ), "sampled before step 1"
    assert responses(tmp_path / "ahead", 3) != responses(tmp_path / "still", 3), (
        "sampled after step 1"
    )
    config = overrides("grpo", "killed", "rollout.staleness=1", *apart)
    stop_after(config, 1)
    assert (tmp_path / "killed" / "checkpoints" / "step-1" / "pending.bin").is_file()
    resumed, there, _ = run(config)
    assert_same_trajectory(ahead, resumed, tolerance=0.0)
    assert all(torch.equal(stale[n], there[n]) for n in stale)


def test_saving_behind_the_run_writes_the_same_bytes(overrides, tmp_path):
    every = ("training.checkpoint_every=1", "training.keep_checkpoints=9", *on_ray(2))
    run(overrides("ppo", "at-once", *every))
    run(overrides("ppo", "behind", "training.async_save=true", *every))
    for step in (1, 2, 3):
        one, two = (
            tmp_path / name / "checkpoints" / f"step-{step}" for name in ("at-once", "behind")
        )
        files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
        assert files == sorted(p.relative_to(two) for p in two.rglob("*") if p.is_file())
        for file in files:
            assert (one / file).read_bytes() == (two / file).read_bytes(), file
    assert (tmp_path / "behind" / "checkpoints" / "latest").read_text() == "step-3\n"


# ---- the door


def test_nothing_listens_beyond_loopback():
    """Sockets of every process of the cluster."""
    import psutil

    mine = [psutil.Process(), *psutil.Process().children(recursive=True)]
    seen = 0
    for process in mine:
        with suppress(psutil.NoSuchProcess):  # an actor of an earlier test may end meanwhile
            name = process.name()
            if "ray" in " ".join(process.cmdline()) or name.startswith("ray"):
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        seen += 1
                        assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), (
                            name,
                            connection.laddr,
                        )
    assert seen > 0


def test_another_token_is_refused_in_one_line(overrides, tiny, verifier, tmp_path):
    address = ray.get_runtime_context().gcs_address
    more = [
        "cluster=ray",
        f"cluster.address={address}",
        f"runs={tmp_path}",
        f"reward.verifier={verifier}:odd",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "postgrad.cli.main",
            "train",
            "grpo",
            *overrides_of(tiny, *SMALL, *more),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH_TOKEN")},
            "RAY_AUTH_TOKEN": "0" * 64,
        },
    )
    assert done.returncode == 2, done.stderr
    assert (
        f"cluster.address={address} answers and refuses us; is it Ray, and is the cluster's token in RAY_AUTH_TOKEN"
        in done.stderr
        and len(done.stderr.strip().splitlines()) == 1
    ), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_more_workers_than_room_is_one_line(overrides):
    with (
        pytest.raises(
            ConfigError, match=r"want 99 CPU cores, the Ray cluster has 8; ask for fewer"
        ),
        place(overrides("grpo", "x", *on_ray(99))),
    ):
        pass


def test_a_pool_for_a_role_that_is_not_there(overrides):
    config = overrides("grpo", "x", *on_ray(1, "cluster.pools.critic=1"))
    with (
        pytest.raises(
            ConfigError,
            match=r"cluster\.pools\.critic: this run has no such role to place; its roles are reference",
        ),
        place(config),
    ):
        pass


def test_only_engines_for_an_evaluation(overrides):
    with (
        place_engine(engine_config(overrides("grpo", "x", *on_ray(2)))) as engine,
        place_engine(engine_config(overrides("grpo", "x"))) as local,
    ):
        assert engine.generate(REQUESTS, Sampling(1.0, 8)) == local.generate(
            REQUESTS, Sampling(1.0, 8)
        )


# ---- deaths, last: each costs processes that the tests before could share


def test_an_engine_that_dies_is_started_anew_and_repeats_its_share(overrides, capsys, monkeypatch):
    monkeypatch.setattr(ray_place, "ENGINE_RESTARTS", 1)
    with place(
        overrides(
            "grpo",
            "engine",
            "method.kl=none",
            *on_ray(1, "cluster.engines=2"),
        )
    ) as placed:
        placed.policy.update(random_batch(32), 1)
        placed.engine.publish(placed.policy.weights())
        before = placed.engine.generate(REQUESTS, Sampling(1.0, 10))
        engines = placed.engine.child
        ray.get(engines.members[1].handle.die_at.remote("engine", "generate"))
        assert placed.engine.generate(REQUESTS, Sampling(1.0, 10)) == before, (
            "the same seeds and the same, published weights"
        )
        assert (
            "the engine 1 worker died during engine.generate; it is started anew"
            in capsys.readouterr().err
        )
        ray.get(engines.members[0].handle.die_at.remote("engine", "generate"))
        with pytest.raises(
            RunError,
            match=r"the engine 0 worker died .* after 1 restarts",
        ):
            placed.engine.generate(REQUESTS, Sampling(1.0, 10))


def test_a_failure_on_one_rank_alone_is_told_at_once(overrides):
    """Its peers wait for it in an exchange; nobody waits for them."""
    with place(overrides("grpo", "alone", "method.kl=none", *on_ray(2))) as placed:
        ray.get(
            placed.policy.child.members[1].handle.fail_at.remote("policy", "logprobs", "a bad row")
        )
        start = time.monotonic()
        with pytest.raises(RunError, match=r"^a bad row$"):
            placed.policy.logprobs(random_batch(3))
        assert time.monotonic() - start < 60, "before cluster.wait_s"


def test_a_silent_worker_is_named_with_the_time_limit(overrides):
    with place(
        overrides("grpo", "hung", "cluster.wait_s=2", "method.kl=none", *on_ray(1))
    ) as placed:
        crew = placed.policy.child
        ray.get(crew.members[0].handle.hang_at.remote("policy", "logprobs"))
        with pytest.raises(
            RunError,
            match=r"the policy worker did not answer policy\.logprobs within 2 s \(cluster\.wait_s\)",
        ):
            placed.policy.logprobs(random_batch(1))
        with pytest.raises(RunError, match=r"engine\.generate cannot be asked"):
            placed.engine.generate(REQUESTS, Sampling())


def test_a_worker_killed_in_a_step_is_named_within_seconds_and_the_run_goes_on(
    overrides, monkeypatch, tmp_path
):
    mark = tmp_path / "died"
    whole, weights, _ = run(overrides("grpo", "whole", "training.checkpoint_every=1", *on_ray(2)))
    config = overrides("grpo", "killed", "training.checkpoint_every=1", *on_ray(2))
    real = ray_place.WorkerGroup.__init__

    def armed(self, *arguments) -> None:
        real(self, *arguments)
        ray.get(self.members[1].handle.die_at.remote("policy", "update", 2, str(mark)))

    monkeypatch.setattr(ray_place.WorkerGroup, "__init__", armed)
    with pytest.raises(
        RunError,
        match=r"step 2, stage update: the policy 1 worker died during policy\.update; the same command",
    ):
        train(config, Reporter())
    assert time.time() - mark.stat().st_mtime < 60, "before cluster.wait_s"
    monkeypatch.setattr(ray_place.WorkerGroup, "__init__", real)
    there, resumed, _ = run(config)
    assert_same_trajectory(whole, there, tolerance=0.0)
    assert all(torch.equal(weights[n], resumed[n]) for n in weights)

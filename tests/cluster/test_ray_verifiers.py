"""Verifiers on Ray: the verdicts of the local pool, and restarts of lost actors."""

import os
from pathlib import Path

import pytest
from refused import refused
from tiny_runs import config_of
from waiting import wait_for

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")

from postgrad.cluster.ray_connection import import_ray, start_local  # noqa: E402
from postgrad.cluster.resources import actor_resources, check_capacity  # noqa: E402
from postgrad.cluster.verifier_pool import RayVerifierPool  # noqa: E402
from postgrad.errors import RunError  # noqa: E402
from postgrad.problem import Failure, Problem, Score  # noqa: E402
from postgrad.verifiers.pool import VerifierPool  # noqa: E402
from postgrad.verifiers.scorer import Scorer  # noqa: E402

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent
HOSTILE = FOLDER.parent / "verifiers" / "hostile_verifiers.py"
DEADLY = FOLDER / "deadly_verifiers.py"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    before = dict(os.environ)
    # Ray believes that this machine has two Ascend devices.
    os.environ["RAY_OVERRIDE_RESOURCES"] = '{"NPU": 2}'
    start_local(import_ray(), num_cpus=4)
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def make_pool(tiny):
    pools = []

    def make(actors: int, *overrides: str) -> RayVerifierPool:
        own = (
            "cluster=ray",
            f"cluster.pools.verifier={actors}",
            "reward.workers=1",
            "reward.timeout_s=5",
            "cluster.wait_s=120",
            *overrides,
        )
        pools.append(RayVerifierPool(ray, config_of("grpo", tiny, *own)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def problem(truth: str = "5") -> Problem:
    return Problem("u", ({"role": "user", "content": "?"},), truth, "", ("a",), {"number": 0.1})


def test_verdicts_and_failures_equal_those_of_the_local_pool(make_pool):
    pool = make_pool(2)
    commands = ["ok", "sleep", "ok", "exit", "segfault", "raise", "system exit", "print"]
    commands += ["ok"] * 20
    items = [
        *((command, problem()) for command in commands),
        *((f"\\boxed{{{i % 3}+x}}", problem("x+1")) for i in range(40)),
        ("5", problem()),
    ]
    names = [f"{HOSTILE}:by_command"] * len(commands) + ["math"] * 40 + ["exact"]
    with VerifierPool(workers=2, timeout_s=5) as local_pool:
        local = local_pool.verify(items, names)
    assert pool.verify(items, names) == local and pool.verify([], []) == []
    assert local[1] == Failure("timeout", "no score within 5 s") and local[3].kind == "crash"
    assert [v.value for v in local[-41:]] == [float(i % 3 == 1) for i in range(40)] + [1.0]
    cases = ["dict", "nan", "none", "missing"]
    returned = pool.verify([(case, problem()) for case in cases], [f"{HOSTILE}:returns"] * 4)
    assert returned[0] == Score(0.5, {"acc": 1.0})
    assert [v.kind for v in returned[1:]] == ["invalid", "invalid", "error"]


def test_actors_run_in_the_driver_folder_and_end_with_the_pool(make_pool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(DEADLY.read_text())
    pool = make_pool(2)
    scorer = Scorer("own.py:describe_process", timeout_s=20, workers=1)
    scorer.backend = pool
    verdicts = scorer.score([problem(str(tmp_path))] * 40, ["x"] * 40)
    scorer.close()
    assert {v.value for v in verdicts} == {1.0} == {v.parts["in_folder"] for v in verdicts}
    actors = {int(v.parts["actor"]) for v in verdicts}
    children = {int(v.parts["pid"]) for v in verdicts}
    assert len(actors) == len(children) == 2 and os.getpid() not in actors
    pool.close()
    wait_for(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in actors | children),
        "the actors and their children to end",
    )
    with pytest.raises(RunError, match="closed"):
        pool.verify([("x", problem(""))], [f"{DEADLY}:describe_process"])


def test_dead_actor_is_restarted_and_a_response_fails_after_two_deaths(make_pool, tmp_path, capsys):
    pool = make_pool(1)
    commands = ["a", f"kill {tmp_path / 'mark'}", "bb", "kill", "ccc"]
    items = [(command, problem()) for command in commands]
    verdicts = pool.verify(items, [f"{DEADLY}:by_command"] * 5)
    assert verdicts[3] == Failure("crash", "the verifier worker died during verify")
    for index in (0, 1, 2, 4):
        assert verdicts[index] == Score(float(len(commands[index])))
    assert capsys.readouterr().err.count("the verifier worker died during verify") == 3


def test_hung_actor_is_restarted(make_pool, tmp_path, capsys):
    pool = make_pool(1, "cluster.wait_s=6", "reward.timeout_s=1")
    items = [(f"stop {tmp_path / 'mark'}", problem())]
    (verdict,) = pool.verify(items, [f"{DEADLY}:by_command"])
    assert verdict.value > 4
    assert "the verifier worker did not answer verify within 7 s" in capsys.readouterr().err


def test_error_of_an_actor_is_raised(make_pool, tmp_path):
    pool = make_pool(1)
    with refused("unknown_name", "reward.verifier"):
        pool.verify([("x", problem())], ["exakt"])
    file = tmp_path / "gone.py"
    file.write_text("def odd(response, problem):\n    return 1.0\n")
    Scorer(f"{file}:odd").close()
    pool.time_limits[f"{file}:odd"] = 1.0  # as if only the driver's machine had the file
    file.unlink()
    with refused("user_code"):
        pool.verify([("x", problem())], [f"{file}:odd"])


def test_resources_of_a_verifier_actor(tiny):
    config = config_of(
        "grpo",
        tiny,
        "cluster=ray",
        "cluster.pools.verifier=3",
        "reward.workers=2",
        "model.threads=1",
    )
    config.model.device = "cuda"
    assert actor_resources(config, "verifier", {"CPU": 8.0}) == {"num_gpus": 0, "num_cpus": 2}
    assert actor_resources(config, "verifier", {"verifier": 4.0})["resources"] == {"verifier": 1}
    assert actor_resources(config, "policy", {"verifier": 4.0}) == {"num_gpus": 1, "num_cpus": 1}
    config.model.device = "cpu"
    with refused("too_large", "cluster.workers", shows="has 7$|7 CPU cores"):
        check_capacity(ray, config)


def test_ascend_actors_ask_for_npus(tiny):
    """On a cluster with two NPUs that do not exist: Ray assigns them by number."""
    config = config_of("grpo", tiny, "cluster=ray", "cluster.workers=3", "model.threads=1")
    config.model.device = "npu"
    options = actor_resources(config, "policy", {"policy": 1.0})
    assert options == {"num_gpus": 0, "num_cpus": 1, "resources": {"NPU": 1, "policy": 1}}
    assert actor_resources(config, "verifier", {}).get("resources") is None
    with refused("too_large", "cluster.workers", shows="3 NPUs.* has 2"):
        check_capacity(ray, config)
    config.cluster.workers = 2
    check_capacity(ray, config)

    class Probe:
        def assigned(self):
            devices = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
            return ray.get_runtime_context().get_assigned_resources(), devices

    actor = ray.remote(Probe).options(**actor_resources(config, "policy", {})).remote()
    assigned, devices = ray.get(actor.assigned.remote(), timeout=600)
    ray.kill(actor)
    assert assigned["NPU"] == 1 and devices in ("0", "1")

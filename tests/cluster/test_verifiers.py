"""Verifiers as actors on Ray: the verdicts of the local pool, failures by their kind, and deaths of actors that cost nobody else."""

import os
import time
from pathlib import Path

import pytest
from world import config_of

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'postgrad[cluster]'")

from postgrad.cluster import ray_backend as ray_place  # noqa: E402
from postgrad.cluster.verifier_pool import Verifiers  # noqa: E402
from postgrad.errors import ConfigError, RunError  # noqa: E402
from postgrad.problem import Failure, Problem, Score  # noqa: E402
from postgrad.verifiers.pool import VerifierPool  # noqa: E402
from postgrad.verifiers.scorer import Scorer  # noqa: E402

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
HOSTILE, DEADLY = HERE.parent / "rewards" / "hostile_verifiers.py", HERE / "deadly_verifiers.py"


@pytest.fixture(scope="module", autouse=True)
def cluster():
    before = dict(os.environ)
    ray_place.start_local(ray_place.import_ray(), num_cpus=4)
    yield
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def verifiers(tiny):
    made = []

    def make(actors: int, *overrides: str) -> Verifiers:
        own = (
            "cluster=ray",
            f"cluster.pools.verifier={actors}",
            "reward.workers=1",
            "reward.timeout_s=2",
            "cluster.wait_s=30",
            *overrides,
        )
        made.append(Verifiers(ray, config_of("grpo", tiny, *own)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def problem(truth: str = "5") -> Problem:
    return Problem("u", ({"role": "user", "content": "?"},), truth, "", ("a",), {"number": 0.1})


def test_verdicts_and_failures_are_those_of_the_local_pool(verifiers):
    there = verifiers(2)
    overrides = [
        "ok",
        "sleep",
        "ok",
        "exit",
        "segfault",
        "raise",
        "system exit",
        "print",
        *["ok"] * 20,
    ]
    items = [
        *((word, problem()) for word in overrides),
        *((f"\\boxed{{{i % 3}+x}}", problem("x+1")) for i in range(40)),
        ("5", problem()),
    ]
    names = [f"{HOSTILE}:by_command"] * len(overrides) + ["math"] * 40 + ["exact"]
    with VerifierPool(workers=2, timeout_s=2) as pool:
        local = pool.verify(items, names)
    assert there.verify(items, names) == local and there.verify([], []) == []
    assert local[1] == Failure("timeout", "no score within 2 s") and local[3].kind == "crash"
    assert [v.value for v in local[-41:]] == [float(i % 3 == 1) for i in range(40)] + [1.0]
    cases = ["dict", "nan", "none", "missing"]
    returned = there.verify([(case, problem()) for case in cases], [f"{HOSTILE}:returns"] * 4)
    assert returned[0] == Score(0.5, {"acc": 1.0}) and [v.kind for v in returned[1:]] == [
        "invalid",
        "invalid",
        "error",
    ]


def test_they_judge_below_several_actors_where_the_driver_stands_and_leave_nothing(
    verifiers, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(DEADLY.read_text())
    there = verifiers(2)
    scorer = Scorer("mine.py:below", timeout_s=20, workers=1)
    scorer.backend = there
    found = scorer.score([problem(str(tmp_path))] * 40, ["x"] * 40)
    scorer.close()
    assert {v.value for v in found} == {1.0} == {v.parts["here"] for v in found}
    actors, children = ({int(v.parts[key]) for v in found} for key in ("actor", "pid"))
    assert len(actors) == len(children) == 2 and os.getpid() not in actors
    there.close()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in actors | children):
        assert time.monotonic() < deadline, "an actor's children end with it"
        time.sleep(0.05)
    with pytest.raises(RunError, match="the verifiers are closed"):
        there.verify([("x", problem(""))], [f"{DEADLY}:below"])


def test_a_dead_actor_is_replaced_and_only_what_kills_twice_fails(verifiers, tmp_path, capsys):
    there = verifiers(1)
    overrides = ["a", f"kill {tmp_path / 'mark'}", "bb", "kill", "ccc"]
    found = there.verify([(word, problem()) for word in overrides], [f"{DEADLY}:by_command"] * 5)
    assert found[3] == Failure("crash", "the verifier worker died during verify")
    assert [found[i] for i in (0, 1, 2, 4)] == [
        Score(float(len(overrides[i]))) for i in (0, 1, 2, 4)
    ]
    told = capsys.readouterr().err
    assert (
        told.count(
            "the verifier worker died during verify; it is started anew, and what it held is judged again\n"
        )
        == 3
    )


def test_a_silent_actor_is_stopped_and_replaced(verifiers, tmp_path, capsys):
    there = verifiers(1, "cluster.wait_s=1", "reward.timeout_s=1")
    assert (
        there.verify([(f"stop {tmp_path / 'mark'}", problem())], [f"{DEADLY}:by_command"])[0].value
        > 4
    )
    assert (
        "the verifier worker did not answer verify within 2 s; it was stopped; it is started anew"
        in capsys.readouterr().err
    )


def test_what_an_actor_refuses_is_told(verifiers, tmp_path):
    there = verifiers(1)
    with pytest.raises(ConfigError, match="is not a verifier; did you mean exact"):
        there.verify([("x", problem())], ["exakt"])
    file = tmp_path / "gone.py"
    file.write_text("def odd(response, problem):\n    return 1.0\n")
    Scorer(f"{file}:odd").close()
    there.seconds[f"{file}:odd"] = 1.0  # as on a machine that has the file, and an actor's has not
    file.unlink()
    with pytest.raises(ConfigError, match="gone"):
        there.verify([("x", problem())], [f"{file}:odd"])


def test_what_an_actor_takes(tiny):
    config = config_of(
        "grpo",
        tiny,
        "cluster=ray",
        "cluster.pools.verifier=3",
        "reward.workers=2",
        "model.threads=1",
    )
    config.model.device = "cuda"
    assert ray_place.needs_of(config, "verifier", {"CPU": 8.0}) == {"num_gpus": 0, "num_cpus": 2}
    assert ray_place.needs_of(config, "verifier", {"verifier": 4.0})["resources"] == {"verifier": 1}
    assert ray_place.needs_of(config, "policy", {"verifier": 4.0}) == {"num_gpus": 1, "num_cpus": 1}
    config.model.device = "cpu"
    with pytest.raises(
        ConfigError, match=r"4 workers .* want 7 CPU cores, the Ray cluster has 4; ask for fewer"
    ):
        ray_place._check_room(ray, config, 1)

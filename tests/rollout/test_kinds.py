"""The table of engines, and a user's own engine given by its path."""

from pathlib import Path

import pytest
from refused import refused
from tiny_runs import config_of, metrics_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.cluster.engines import engine_config
from postgrad.errors import ConfigError
from postgrad.rollout.kinds import ENGINES, check_engine, find_engine

USER_ENGINES = '''
"""Engines outside the package."""

import torch

from postgrad.rollout.native.engine import NativeEngine


class Shared(NativeEngine):
    """Samples from the trainer's own model."""

    def __init__(self, config, loaded):
        super().__init__(loaded, config.rollout)


class Copied:
    """Keeps its own copy of the weights and counts how often new ones arrive."""

    shares_weights = False

    def __init__(self, config, loaded):
        from postgrad.model.load.load import load

        own = load(config.model, torch.device("cpu"), config.seed)
        self.inner = NativeEngine(own, config.rollout)
        self.num_published = 0

    def publish(self, weights):
        self.num_published += 1
        self.inner.publish(weights)

    def generate(self, requests, sampling):
        with open("published.txt", "w") as file:
            file.write(str(self.num_published))
        return self.inner.generate(requests, sampling)


class NoPublish:
    shares_weights = True

    def generate(self, requests, sampling): ...
'''
ODD = Path(__file__).parents[1] / "outside" / "odd.py"
COMPARED = ("reward/mean", "grad_norm", "response/length")
SMALL = (
    f"reward.verifier={ODD}:odd",
    *toy_run(steps=3),
    "optimizer.lr=1e-2",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "my_engines.py").write_text(USER_ENGINES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(model: Path, folder: Path, name: str, *overrides: str) -> list[dict]:
    arguments = overrides_of(model, *SMALL, f"runs={folder}", *overrides, f"name={name}")
    assert main(["train", "grpo", *arguments]) == 0
    return [line for line in metrics_of(folder / name) if "reward/mean" in line]


@pytest.mark.slow
def test_training_with_a_user_engine_from_a_file_matches_the_native_engine(tiny, folder):
    native = train(tiny, folder, "native")
    shared = train(tiny, folder, "shared", "rollout.engine=my_engines.py:Shared")
    copied = train(tiny, folder, "copied", "rollout.engine=my_engines.py:Copied")
    for key in COMPARED:
        numbers = [line[key] for line in native]
        assert [line[key] for line in shared] == numbers, key
        assert [line[key] for line in copied] == pytest.approx(numbers, rel=1e-4), key
    assert any(line["grad_norm"] for line in native)
    assert int((folder / "published.txt").read_text()) >= 2


def test_evaluation_with_a_user_engine_from_a_file_gives_the_native_answers(tiny, folder):
    arguments = ["data=arithmetic:1", "limit=4", "template=plain", "max_response_tokens=4"]
    for engine in ("native", "my_engines.py:Shared"):
        out = folder / engine.replace(":", "-")
        code = main(
            ["eval", str(tiny), *arguments, "model.device=cpu", f"engine={engine}", f"out={out}"]
        )
        assert code == 0
    native, user = (file.read_bytes() for file in sorted(folder.glob("*/arithmetic-1.jsonl")))
    assert native == user


def test_a_user_engine_is_found_by_module_path_and_keeps_its_weight_sharing(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    assert find_engine("my_engines:Shared").shares_weights
    assert not find_engine("my_engines:Copied").shares_weights
    assert not find_engine("my_engines.py:Copied").remote


@pytest.mark.parametrize(
    "name", ["nativ", "my_engines.py:Missing", "my_engines.py:NoPublish", "missing.py:Engine", ":"]
)
def test_names_that_are_no_engine_are_refused(name, folder):
    with pytest.raises(ConfigError, match=name.partition(":")[2] or name):
        find_engine(name)


def test_the_table_says_which_engines_share_weights_and_which_are_servers():
    shared = [name for name, kind in ENGINES.items() if kind.shares_weights]
    remote = [name for name, kind in ENGINES.items() if kind.remote]
    assert shared == ["native", "hf"]
    assert remote == ["http", "sglang"]
    records = [name for name, kind in ENGINES.items() if kind.records_kept]
    assert records == ["native", "hf", "sglang"]


@pytest.mark.parametrize(
    ("overrides", "code", "at"),
    [
        (["rollout.engine=http"], "missing", "rollout.engine"),
        (["rollout.engine=sglang"], "missing", "rollout.engine"),
        (["rollout.engine=nativ"], "unknown_name", "rollout.engine"),
    ],
)
def test_settings_that_the_engine_cannot_use_are_refused(overrides, code, at, tiny):
    with refused(code, at):
        check_engine(engine_config(config_of("grpo", tiny, *overrides)))


def test_an_engine_that_the_workers_cannot_divide_is_refused(tiny):
    words = ["rollout.engine=vllm", "cluster=ray", "cluster.workers=3"]
    config = config_of("grpo", tiny, *words, "rollout.tensor_parallel=2")
    with refused("conflict", "rollout.tensor_parallel", shows="cluster.engines=1"):
        check_engine(engine_config(config))

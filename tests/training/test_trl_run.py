"""A run gives reward functions of TRL the engine's token ids."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from refused import refused
from tiny_runs import END, config_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.training.driver import train
from postgrad.training.report import Reporter

pytestmark = pytest.mark.slow

REWARD = """
import json
from pathlib import Path

CALLS = Path(__file__).with_name("calls.jsonl")

def reward(completion_ids, **kwargs):
    texts = [completion[0]["content"] for completion in kwargs["completions"]]
    call = {"ids": completion_ids, "texts": texts}
    with CALLS.open("a") as file:
        file.write(json.dumps(call) + "\\n")
    return [sum(ids) / 17 / len(ids) for ids in completion_ids]
"""


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARD)
    return file


def calls_of(reward: Path) -> list[dict[str, Any]]:
    lines = reward.with_name("calls.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def train_run(recipe: str, tiny: Path, reward: Path, *overrides: str) -> Path:
    settings = (
        *toy_run(steps=3),
        f"reward.verifier={reward}:reward",
        f"runs={reward.parent}",
        *overrides,
    )
    return train(config_of(recipe, tiny, *settings), Reporter()).folder


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("cluster.backend=process", "cluster.engines=1", "rollout.staleness=1"),
        ("cluster.backend=ray", "cluster.wait_s=300", "cluster.pools.verifier=1"),
    ],
    ids=["local", "prefetched", "ray"],
)
def test_ids_are_those_of_the_rollouts(overrides, tiny, reward):
    if "cluster.backend=ray" in overrides:
        pytest.importorskip("ray", reason="Ray is not installed")
    validation = ("data.validation=arithmetic:1", "training.validate_every=1")
    folder = train_run("grpo", tiny, reward, *validation, *overrides)
    calls = calls_of(reward)
    training = [call for call in calls if len(call["ids"]) == 16]
    assert len(training) == 3 and len(calls) == 3 + 8, "greedy and sampled, after each step"
    finishes = set()
    for number, call in enumerate(training, 1):
        file = folder / "rollouts" / f"step-{number:06d}.parquet"
        rows = pq.read_table(file).to_pylist()
        assert call["ids"] == [row["response"] for row in rows]
        assert call["texts"] == [row["text"] for row in rows]
        for row in rows:
            finishes.add(row["finish"])
            assert (row["response"][-1] == END) == (row["finish"] == "stop")
            assert END not in row["response"][:-1], "no padding"
    assert finishes == {"stop", "length"}


def test_the_texts_of_classmates_have_no_ids(tiny, reward):
    with refused("unsupported", "reward"):
        train_run("classmate", tiny, reward)
    assert not (reward.parent / "test").exists()


def test_an_evaluation_has_ids(tiny, reward):
    model = [one for one in overrides_of(tiny) if one.startswith("model.d")]
    command = ["eval", str(tiny), "data=arithmetic:1", "data.template=plain", *model]
    command += ["data.limit=2", "rollout.max_response_tokens=4", f"out={reward.parent / 'eval'}"]
    assert main([*command, f"verifier={reward}:reward"]) == 0
    (call,) = calls_of(reward)
    assert len(call["ids"]) == 2 and all(call["ids"])


def test_a_function_that_changes_its_ids_leaves_the_results_alone(tiny, reward):
    reward.write_text(
        "def reward(completion_ids, **kwargs):\n"
        "    for ids in completion_ids:\n"
        "        ids.clear()\n"
        "    return [1.0 for _ in completion_ids]\n"
    )
    model = [one for one in overrides_of(tiny) if one.startswith("model.d")]
    command = ["eval", str(tiny), "data=one=arithmetic:1", "data.template=plain", *model]
    command += ["data.limit=2", "rollout.max_response_tokens=4", f"out={reward.parent / 'eval'}"]
    assert main([*command, f"verifier={reward}:reward"]) == 0
    for line in (reward.parent / "eval/one.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["tokens"] and row["length"] == len(row["tokens"])

"""`postgrad train ...` and `postgrad.train(...)` with the same settings give the same bytes."""

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from api_rows import ROWS, odd
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tiny_runs import metrics_without_timing, tree

import postgrad
from postgrad.api.request import make_request
from postgrad.cli.main import main
from postgrad.cli.train import compose_arguments
from postgrad.config.compose import compose
from postgrad.methods import find_method

GENERATE = (Phase.explicit, Phase.generate)  # a failure is not shrunk: composing is slow
VERIFIER = """
def odd(response, problem):
    return sum(character in "13579" for character in response) / 4 + 0.01 * len(response)
"""


def request_of(recipe: str = "grpo", **named: Any) -> Any:
    arguments = dict.fromkeys(("tokenizer", "validation", "reward", "reward_weights", "method"))
    more = named.pop("settings", None)
    model = named.pop("model", "tiny")
    data = named.pop("data", "arithmetic:1")
    return make_request(recipe, model=model, data=data, settings=more, named=named, **arguments)


@pytest.mark.slow
def test_command_line_and_python_give_the_same_bytes(small, folder):
    run = postgrad.train(**small, validation=ROWS[:4], settings={"training.checkpoint_every": 2})
    (folder / "verifier.py").write_text(VERIFIER)
    words = [
        "train",
        "grpo",
        f"model.path={small['model']}",
        "data.train=runs/test/train.jsonl",
        "data.validation=runs/test/validation.jsonl",
        "reward.verifier=verifier.py:odd",
        "training.steps=3",
        "training.problems_per_step=4",
        "rollout.samples=4",
        "rollout.max_response_tokens=4",
        "optimizer.lr=3e-3",
        "model.device=cpu",
        "model.dtype=float32",
        "model.threads=1",
        "data.template=plain",
        "training.checkpoint_every=2",
        "name=test",
        "runs=cli",
    ]
    assert main(words) == 0
    other = Path("cli/test")
    assert tree(run.folder / "checkpoints") == tree(other / "checkpoints")
    assert metrics_without_timing(run.folder) == metrics_without_timing(other)
    for file in sorted((run.folder / "rollouts").iterdir()):
        assert pq.read_table(file).equals(pq.read_table(other / "rollouts" / file.name))
    changed = set(differing_lines(run.folder, other))
    assert changed == {"runs", "verifier"}  # the two settings that were given differently


def test_settings_with_short_names_are_not_replaced_by_arguments_that_were_not_given():
    config = request_of(settings={"name": "mine", "seed": 3}, name=None, seed=None).config
    assert (config.name, config.seed) == ("mine", 3)


@pytest.mark.parametrize("key", ["agent", "agent.command"])
@pytest.mark.parametrize("command", ["python my_agent.py", "sh -c 'echo \"a b\"'"])
def test_the_command_of_an_agent_is_passed_as_it_is(key, command):
    assert request_of(settings={key: command}).config.agent.command == command


def differing_lines(one: Path, other: Path) -> list[str]:
    """Return the keys of config.yaml whose lines differ."""
    pairs = zip(
        (one / "config.yaml").read_text().splitlines(),
        (other / "config.yaml").read_text().splitlines(),
        strict=True,
    )
    return [left.strip().partition(":")[0] for left, right in pairs if left != right]


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=GENERATE)
@given(
    steps=st.integers(1, 1000),
    lr=st.floats(1e-9, 1.0),
    temperature=st.floats(0.01, 2.0),
    betas=st.lists(st.floats(0.0, 0.999), min_size=2, max_size=2),
    shuffle=st.booleans(),
    stop_at=st.none() | st.floats(0.0, 1.0),
    group_size=st.integers(2, 64),
)
def test_numbers_become_the_same_configuration(
    steps, lr, temperature, betas, shuffle, stop_at, group_size
):
    words = [
        "grpo",
        "model.path=tiny",
        "data.train=arithmetic:1",
        "data.validation=arithmetic:2",
        "training.validate_every=1",
        f"training.steps={steps}",
        f"optimizer.lr={lr}",
        f"rollout.temperature={temperature}",
        f"optimizer.betas=[{betas[0]},{betas[1]}]",
        f"data.shuffle={str(shuffle).lower()}",
        f"training.stop_at={'null' if stop_at is None else stop_at}",
        f"rollout.samples={group_size}",
    ]
    more = {
        "data.validation": "arithmetic:2",
        "optimizer.betas": betas,
        "training": {"stop_at": stop_at, "validate_every": 1},
    }
    request = request_of(
        steps=steps,
        lr=lr,
        temperature=temperature,
        shuffle=shuffle,
        group_size=group_size,
        settings=more,
    )
    assert dataclasses.asdict(request.config) == dataclasses.asdict(compose_arguments(words))


@pytest.mark.slow
@settings(max_examples=15, deadline=None, phases=GENERATE)
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_texts_arrive_unchanged(text):
    overrides = [("model.path", "tiny"), ("data.train", text)]
    config = compose("grpo", overrides, lambda name: find_method(name).Settings)
    assert config.data.train == text


def test_a_dict_replaces_the_dict_of_the_recipe():
    weights = {"a": 1.0, "b": 0.5}
    settings = {"method.reward_weights": weights, "optimizer": {"weight_decay": 0.25}}
    found = request_of("gdpo", settings=settings).config
    assert found.method.reward_weights == weights
    assert found.optimizer.weight_decay == 0.25


def test_the_reward_of_both_is_the_same_function():
    """If the two drift apart, the first test compares nothing."""
    scope: dict[str, Any] = {}
    exec(VERIFIER, scope)
    for text in ("", "13", "2468", "97531"):
        assert scope["odd"](text, None) == odd(text, None)

"""Environments, tools and engines given to train() as objects of this process."""

from typing import Any

import pytest
from refused import refused
from tool_model import SHORT_CHAT, chat_model

import postgrad
from postgrad.rollout.native.engine import NativeEngine
from postgrad.user_code import PythonObject


def make_environment(bonus: float) -> type:
    """Return a class that no other process can import."""

    class OddDigits:
        made = 0

        def __init__(self, turns: int = 1) -> None:
            type(self).made += 1
            self.turns = turns

        def reset(self, problem: Any) -> None:
            self.left = self.turns

        def step(self, action: str) -> tuple[str, float, bool]:
            self.left -= 1
            reward = bonus + sum(character in "13579" for character in action)
            return "=", reward, self.left == 0

    return OddDigits


def without_reward(small: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in small.items() if key != "reward"}


@pytest.mark.slow
def test_an_environment_class_of_this_process(small):
    environment = make_environment(0.5)
    run = postgrad.train(
        **without_reward(small) | {"steps": 1},
        environment=environment,
        settings={"environment.options": {"turns": 2}, "rollout.max_turns": 2},
    )
    assert environment.made == 16
    # Turns that are cut off at the length limit are no actions and have no reward.
    assert run.rollouts()["reward"].max() >= 0.5
    assert run.config["environment"]["name"] == "python:OddDigits"


@pytest.mark.slow
def test_two_environments_with_equal_code_are_not_mixed_up(small):
    first, second = make_environment(1.0), make_environment(1.0)
    for number, environment in enumerate((first, second)):
        arguments = without_reward(small) | {"steps": 1, "name": f"run-{number}"}
        postgrad.train(**arguments, environment=environment)
        assert environment.made == 16
    assert PythonObject("a", first) != PythonObject("a", second)
    assert PythonObject("a", first) == PythonObject("a", first) == "python:a"
    assert hash(PythonObject("a", first)) == hash("python:a")


def test_an_object_instead_of_a_class_is_refused(small):
    environment = make_environment(0.0)
    arguments = without_reward(small) | {"steps": 1}
    with refused("user_code", "environment"):
        postgrad.train(**arguments, environment=environment())
    with refused("user_code", "rollout.engine"):
        postgrad.train(**small, engine=object())


@pytest.mark.slow
def test_a_tool_function_of_this_process(small, tmp_path):
    calls: list[str] = []

    def look() -> str:
        """Look at the board."""
        calls.append("look")
        return "7"

    def length(response: str, problem: Any) -> float:
        return len(response) / 10

    model = chat_model(tmp_path / "chat", SHORT_CHAT)
    arguments = {"model": model, "steps": 1, "template": "chat", "reward": length}
    run = postgrad.train(**small | arguments | {"max_tokens": 60}, tools=[look], max_turns=2)
    assert run.config["rollout"]["tools"] == ["python:look"]
    assert calls, "the model never called the tool"


@pytest.mark.slow
def test_an_engine_class_of_this_process(small):
    calls: list[int] = []

    class CountingEngine(NativeEngine):
        def __init__(self, config: Any, loaded: Any) -> None:
            super().__init__(loaded, config.rollout)

        def generate(self, requests: Any, sampling: Any) -> Any:
            calls.append(len(requests))
            return super().generate(requests, sampling)

    own = postgrad.train(**small | {"name": "own"}, engine=CountingEngine)
    assert calls[-3:] == [4, 4, 4]  # three steps, after the check of decoding
    stock = postgrad.train(**small)
    weights = "policy/model.safetensors"
    same = [(run.checkpoint() / weights).read_bytes() for run in (own, stock)]
    assert same[0] == same[1]
    assert own.config["rollout"]["engine"] == "python:CountingEngine"

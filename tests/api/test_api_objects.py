"""Objects as values of settings, and short names."""

import copy
import dataclasses
from typing import Any

from refused import refused

from postgrad.api.settings import as_setting, full_key
from postgrad.config.compose import known_keys
from postgrad.methods.grpo import Grpo
from postgrad.user_code import PythonObject, load_object


def defined(source: str, name: str = "f") -> Any:
    """Return an object of a program of its own, as a notebook would define it."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(source, scope)
    return scope[name]


def test_an_importable_object_is_given_by_its_path():
    assert as_setting(Grpo) == "postgrad.methods.grpo:Grpo"
    text = as_setting(defined("def f(x):\n    return x\n"))
    assert isinstance(text, PythonObject) and text == "python:f"


def test_the_object_stays_in_the_configuration_and_copies_are_text():
    @dataclasses.dataclass
    class Section:
        loss: str

    section = Section(PythonObject("f", 7))
    assert load_object(section.loss, "loss", lambda value: True, "number") == 7
    assert type(dataclasses.asdict(section)["loss"]) is str
    assert type(copy.deepcopy(section).loss) is str
    assert f"{section.loss}" == "python:f" and type(str(section.loss)) is str
    with refused("unsupported", "loss"):
        load_object(str(section.loss), "loss=python:f", lambda value: True, "number")


def test_short_names_are_aliases_or_last_parts():
    known = known_keys(Grpo.Settings)
    assert full_key("lr", known) == "optimizer.lr"
    assert full_key("group_size", known) == "rollout.samples"
    assert full_key("kl_coef", known) == "method.kl_coef"
    assert full_key("template", known) == "data.template"  # not reward.judge.template
    assert full_key("rollout.top_k", known) == "rollout.top_k"
    with refused("unknown_name", "learning_rate"):
        full_key("learning_rate", known)

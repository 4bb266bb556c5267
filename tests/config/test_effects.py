"""Settings with `only_with`: refused without their condition, accepted with it; generated."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from postgrad.config.check import TERM, check_effects, settings_of
from postgrad.config.compose import compose
from postgrad.config.schema import Config, setting
from postgrad.errors import ConfigError
from postgrad.evaluation.score import ScoreConfig
from postgrad.evaluation.settings import EvalConfig
from postgrad.methods import METHODS, find_method

REQUIRED = ["model.path=tiny", "data.train=arithmetic:1"]


def configurations() -> Iterator[tuple[str, Any]]:
    """Yield the default settings of each method and of the other commands, by their names."""
    yield "eval", EvalConfig()
    yield "score", ScoreConfig()
    for name in METHODS:
        yield name, Config(method=find_method(name).Settings(name=name))


CASES = [
    pytest.param(config, key, conditions, id=f"{name}-{key}")
    for name, config in configurations()
    for key, _, _, conditions in settings_of(config)
    if conditions
    and key not in ("environment.name", "agent.command", "model.lora.rank", "reward.judge.monitor")
    and (key.startswith("method.") or name in ("grpo", "sft", "eval", "score"))
]


def section_of(config: Any, key: str) -> tuple[Any, dataclasses.Field]:
    """Return the section that has the key, and the setting."""
    *sections, leaf = key.split(".")
    for name in sections:
        config = getattr(config, name)
    [field] = [one for one in dataclasses.fields(config) if one.name == leaf]
    return config, field


def put(config: Any, key: str, value: Any) -> None:
    section, field = section_of(config, key)
    setattr(section, field.name, value)


def another(config: Any, key: str, unlike: list[str]) -> Any:
    """Return a value of the setting other than its default, and other than these texts."""
    section, field = section_of(config, key)
    value = getattr(section, field.name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list | dict):
        return [*value, "x"] if isinstance(value, list) else {**value, "x": 1}
    choices = [one for one in field.metadata.get("choices", ()) if one not in unlike]
    return next((one for one in choices if one != value), "x" if "x" not in unlike else "y")


def set_term(config: Any, term: str, holds: bool) -> None:
    """Change the configuration so that a term of a condition holds, or does not."""
    match = TERM.fullmatch(term)
    assert match
    key, sign, listed = match.groups()
    section, field = section_of(config, key)
    value = getattr(section, field.name)
    texts = (listed or "").split(",")
    if sign is None:
        value = (value or another(config, key, [])) if holds else type(value)()
    elif sign == "~":
        value = listed if holds else "x"
    elif (sign == "=") == holds:
        given = {"null": None, "false": False, "true": True, "0": 0.0}
        value = given.get(texts[0], texts[0])
    else:
        value = another(config, key, texts)
    setattr(section, field.name, value)


@pytest.mark.parametrize(("config", "key", "conditions"), CASES)
def test_a_setting_is_refused_without_each_condition_and_accepted_with_all(config, key, conditions):
    alternatives = [(one,) if isinstance(one, str) else one for one in conditions]
    met = copy.deepcopy(config)
    for one in alternatives:
        for term in one[0].split(" and "):
            set_term(met, term, True)
    put(met, key, another(config, key, []))
    check_effects(met, {key})
    for one in alternatives:
        unmet = copy.deepcopy(met)
        for part in one:
            set_term(unmet, part.split(" and ")[-1], False)
        with pytest.raises(ConfigError) as caught:
            check_effects(unmet, {key})
        line = str(caught.value)
        assert line.startswith(f"{key}=") and " has no effect with" in line and "\n" not in line
        check_effects(unmet, {"seed"})  # nobody gave it


def test_conditions_of_inherited_settings_name_settings():
    for name in METHODS:
        schema = find_method(name).Settings
        names = {field.name for field in dataclasses.fields(schema)}
        for kind in schema.__mro__:
            assert vars(kind).get("only_with", {}).keys() <= names, kind


def refusal(recipe: str, *overrides: str | tuple[str, Any]) -> str:
    """Return the line of a refused configuration; "" if it is accepted."""
    try:
        compose(recipe, [*REQUIRED, *overrides], lambda name: find_method(name).Settings)
    except ConfigError as error:
        return str(error)
    return ""


def test_what_a_recipe_sets_may_be_switched_off_as_a_whole():
    assert refusal("reinforce_pp", "method.kl=none") == ""
    assert refusal("reinforce_pp", "method.kl=none", "method.kl_coef=0.5") != ""


def test_the_line_names_the_reason_and_both_ways_out():
    assert refusal("grpo", "method.kl_ratio=true") == (
        "method.kl_ratio=true has no effect with method.kl=none; use method.kl=loss, "
        "or leave it at false"
    )
    assert refusal("grpo", "environment.options.high=3") == (
        "environment.options={'high': 3} has no effect without environment.name; "
        "add environment=VALUE, or leave it out"
    )


def test_keys_of_a_file_are_given_and_those_of_its_recipe_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "defaults: [reinforce_pp, _self_]\nmethod: {kl: none, %s}\n"
    (tmp_path / "mine.yaml").write_text(text % "clip_low: 0.1")
    assert refusal("mine.yaml") == ""
    (tmp_path / "mine.yaml").write_text(text % "kl_ratio: true")
    assert refusal("mine.yaml").startswith("method.kl_ratio=true has no effect")
    (tmp_path / "more.yaml").write_text("defaults: [mine]\n")
    assert refusal("more.yaml").startswith("method.kl_ratio=true has no effect")
    (tmp_path / "mine.yaml").rename(tmp_path / "config.yaml")
    assert refusal("config.yaml") == "", "a run repeats what its config.yaml says"


def test_a_section_given_as_a_dict_gives_its_settings():
    assert refusal("grpo", ("optimizer", {"final_lr_ratio": 0.5})).startswith(
        "optimizer.final_lr_ratio=0.5"
    )


def test_terms():
    @dataclasses.dataclass
    class Section:
        a: str = setting("x", "a", choices=("x", "y", "z"))
        b: float | None = setting(None, "b")
        c: int = setting(0, "c", only_with=("s.a=y and s.b", "s.a~z"))

    @dataclasses.dataclass
    class Root:
        s: Section

    def is_read(a: str, b: float | None) -> bool:
        try:
            check_effects(Root(Section(a, b, 1)), {"s.c"})
        except ConfigError:
            return False
        return True

    assert [is_read("x", 1.0), is_read("y", None), is_read("y", 0.5), is_read("xz", None)] == [
        False,
        False,
        True,
        True,
    ]

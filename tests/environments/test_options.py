"""Options of an environment that its class does not take."""

import pytest
from refused import refused

from postgrad.environments.lookup import check_options
from postgrad.environments.session import load_environment


class Shop:
    def __init__(self, high: int, *, cost: float = 0.1):
        self.high, self.cost = high, cost


class Plain:
    pass


class Open:
    def __init__(self, **options):
        self.options = options


@pytest.mark.parametrize(
    ("environment", "options", "code", "at", "shows"),
    [
        (Shop, {"high": 3, "cots": 1}, "unknown_name", ".cots", r"did you mean cost\?"),
        (Shop, {"cost": 1}, "user_code", "", r"'high'; set environment\.options\.NAME=VALUE"),
        (Plain, {"high": 3}, "unknown_name", ".high", "it takes none"),
    ],
)
def test_a_wrong_option_is_named_with_the_one_to_use(environment, options, code, at, shows):
    with refused(code, f"environment.options{at}", shows=shows):
        check_options(environment, options, "shop.py:Shop")


def test_options_that_the_class_takes_pass():
    check_options(Shop, {"high": 3, "cost": 1}, "shop.py:Shop")
    check_options(Open, {"any": 3}, "shop.py:Open")


@pytest.mark.parametrize(("name", "missing"), [("Plain", "reset"), ("Stepless", "step")])
def test_a_class_that_is_no_environment_is_told_what_it_lacks(name, missing, tmp_path, monkeypatch):
    (tmp_path / "games.py").write_text(
        "class Plain:\n    def step(self, action): ...\n\n"
        "class Stepless:\n    def reset(self, problem): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    with refused("user_code", "environment", shows=rf"{name} has no {missing}\("):
        load_environment(f"games.py:{name}")

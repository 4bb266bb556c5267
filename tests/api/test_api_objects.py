"""Objects as values of settings: their texts, and hashes that follow their code."""

import copy
import dataclasses
from typing import Any

import pytest

from postgrad.api.objects import as_setting, describe, fingerprint
from postgrad.api.settings import full_key
from postgrad.config.compose import known_keys
from postgrad.errors import ConfigError
from postgrad.methods.grpo import Grpo
from postgrad.user_code import PythonObject, load_object


def defined(source: str, name: str = "f") -> Any:
    """Return an object of a program of its own, as a notebook would define it."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(source, scope)
    return scope[name]


BASE = "LIMIT = 3\ndef helper(x):\n    return x + 1\ndef f(x, y=2):\n    return helper(x) * LIMIT\n"


@pytest.mark.parametrize(
    "changed",
    [
        BASE.replace("x + 1", "x + 2"),
        BASE.replace("LIMIT = 3", "LIMIT = 4"),
        BASE.replace("y=2", "y=5"),
        BASE.replace("* LIMIT", "- LIMIT"),
    ],
    ids=["helper", "constant", "default", "code"],
)
def test_the_hash_changes_with_the_code_and_what_it_names(changed):
    assert fingerprint(defined(BASE)) != fingerprint(defined(changed))


def test_the_hash_ignores_lines_and_comments():
    assert fingerprint(defined(BASE)) == fingerprint(defined("# a comment\n\n\n" + BASE))


def test_classes_closures_and_objects_have_hashes_of_their_own():
    body = "class f:\n    rate = {}\n    def g(self):\n        return {}\n"
    hashes = {fingerprint(defined(body.format(*pair))) for pair in [(1, 1), (2, 1), (1, 2)]}
    assert len(hashes) == 3

    def closure(value: float) -> Any:
        return lambda x: x * value

    assert fingerprint(closure(1.0)) != fingerprint(closure(2.0))
    assert fingerprint(closure(1.0)) == fingerprint(closure(1.0))

    class Counter:
        def __init__(self, limit: int) -> None:
            self.limit = limit

    assert describe(Counter(1)) != describe(Counter(2))


PAIRS = {
    "partial": (
        "from functools import partial\ndef g(x, k):\n    return k\nf = partial(g, k={})\n"
    ),
    "helper in a generator": (
        "def h(c):\n    return {}\ndef f(text):\n    return sum(h(c) for c in text)\n"
    ),
    "constant in a generator": "K = {}\ndef f(text):\n    return sum(K for _ in text)\n",
    "bound method": (
        "class A:\n    def __init__(self, k):\n        self.k = k\n    def g(self, x):\n"
        "        return self.k\nf = A({}).g\n"
    ),
    "closure over a list": "def make(k):\n    return lambda x: k[0]\nf = make([{}])\n",
    "tuple of the module": "K = ({},)\ndef f(x):\n    return K[0]\n",
    "dict of the module": "K = {{1: {}}}\ndef f(x):\n    return K[1]\n",
    "cached helper": (
        "from functools import lru_cache\n@lru_cache\ndef h():\n    return {}\n"
        "def f(x):\n    return h()\n"
    ),
    "base class": "class A:\n    def g(self):\n        return {}\nclass f(A):\n    pass\n",
    "attribute that is a list": (
        "class A:\n    def __init__(self, k):\n        self.k = [k]\n    def __call__(self, x):\n"
        "        return self.k\nf = A({})\n"
    ),
    "object of an object": (
        "class B:\n    def __init__(self, k):\n        self.k = k\nclass A:\n"
        "    def __init__(self, k):\n        self.b = B(k)\nf = A({})\n"
    ),
    "property": "class f:\n    @property\n    def g(self):\n        return {}\n",
    "array": "import numpy\nK = numpy.array([1, {}])\ndef f(x):\n    return K\n",
    "tensor": "import torch\nclass A: pass\nf = A()\nf.w = torch.tensor([{}.0])\n",
    "table": "import pandas\nK = pandas.DataFrame({{'a': [1, {}]}})\ndef f(x):\n    return K\n",
    "object of the module": (
        "class A:\n    def __init__(self, k):\n        self.k = k\nJUDGE = A({})\n"
        "def f(x):\n    return JUDGE.k\n"
    ),
}


@pytest.mark.parametrize("body", PAIRS.values(), ids=list(PAIRS))
def test_the_hash_changes_with_values_wherever_they_are(body):
    first, again, other = (defined(body.format(number)) for number in (5, 5, 7))
    assert fingerprint(first) == fingerprint(again)
    assert fingerprint(first) != fingerprint(other)


def test_the_hash_of_a_subclass_does_not_read_installed_code(monkeypatch):
    body = "from postgrad.methods.grpo import Grpo\nclass f(Grpo):\n    pass\n"
    before = fingerprint(defined(body))
    monkeypatch.setattr(Grpo, "some_new_attribute", 1, raising=False)
    assert fingerprint(defined(body)) == before


def test_an_importable_object_is_given_by_its_path():
    assert as_setting(Grpo) == "postgrad.methods.grpo:Grpo"
    text = as_setting(defined(BASE))
    assert isinstance(text, PythonObject) and text.startswith("python:f#")


def test_the_object_stays_in_the_configuration_and_copies_are_text():
    @dataclasses.dataclass
    class Section:
        loss: str

    section = Section(PythonObject("f", 7))
    assert load_object(section.loss, "loss", lambda value: True, "number") == 7
    assert type(dataclasses.asdict(section)["loss"]) is str
    assert type(copy.deepcopy(section).loss) is str
    assert f"{section.loss}" == "python:f" and type(str(section.loss)) is str
    with pytest.raises(ConfigError, match="another Python process"):
        load_object(str(section.loss), "loss=python:f", lambda value: True, "number")


def test_short_names_are_aliases_or_last_parts():
    known = known_keys(Grpo.Settings)
    assert full_key("lr", known) == "optimizer.lr"
    assert full_key("group_size", known) == "rollout.samples"
    assert full_key("kl_coef", known) == "method.kl_coef"
    assert full_key("template", known) == "data.template"  # not reward.judge.template
    assert full_key("rollout.top_k", known) == "rollout.top_k"
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        full_key("learning_rate", known)

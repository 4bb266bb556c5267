"""The code and the place of errors: which place a sentence gives, and that processes keep both."""

import ast
import pickle
from pathlib import Path

from tables import tabled

import postgrad
from postgrad.cluster.ports import attempt, to_exception
from postgrad.cluster.wire import decode, encode
from postgrad.errors import CODES, Missing, NoEffect, Unreadable

SOURCES = Path(postgrad.__file__).parent


@tabled("sentence, at")
def test_the_place_is_what_the_sentence_begins_with(sentence: str, at: str) -> None:
    assert Missing(sentence).at == at
    assert Missing(sentence, at="other").at == "other"


def test_a_reworded_error_keeps_its_code_and_takes_the_new_place() -> None:
    error = Unreadable("model.path=a: no such folder")
    for sentence, at in (("the judge: none", "model.path"), ("data.train: none", "data.train")):
        reworded = error.reworded(sentence)
        assert (type(reworded), str(reworded), reworded.at) == (Unreadable, sentence, at)


def test_code_and_place_reach_other_processes() -> None:
    def fail() -> None:
        raise NoEffect("a b=1 has no effect", at="a.b")

    kind, parts = decode(encode(attempt(fail)))
    for error in (to_exception(kind, parts), pickle.loads(pickle.dumps(NoEffect("x", at="a.b")))):
        assert isinstance(error, postgrad.ConfigError)
        assert (error.code, error.at) == ("no_effect", "a.b")


def test_every_error_has_a_code() -> None:
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "ConfigError", f"{file}: line {node.lineno} has no code"
    assert all(code == kind.code for code, kind in CODES.items())

"""postgrad chat: the conversation that the model sees, and what is refused."""

import io
import sys
from typing import ClassVar

import pytest

from postgrad.cli.main import main


class FakeSampler:
    calls: ClassVar[list] = []

    def __init__(self, path, overrides):
        FakeSampler.calls = [(path, list(overrides))]

    def stream(self, messages, *, temperature, seed):
        contents = [message["content"] for message in messages]
        roles = "".join(message["role"][0] for message in messages)
        FakeSampler.calls.append((roles, contents, temperature, seed))
        yield from ("reply ", str(seed))


@pytest.mark.parametrize("end", ["", "\n/quit\nnever"])
@pytest.mark.parametrize("clear", ["/clear", "/new"])
def test_the_model_sees_the_conversation_until_it_is_cleared(monkeypatch, capsys, clear, end):
    monkeypatch.setattr("postgrad.api.sampler.Sampler", FakeSampler)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"a\n\nb\n{clear}\nc{end}"))
    assert main(["chat", "MODEL", "system=s", "temperature=0.5", "seed=3", "top_p=0.9"]) == 0
    assert FakeSampler.calls == [
        ("MODEL", ["top_p=0.9"]),
        ("su", ["s", "a"], 0.5, 3),
        ("suau", ["s", "a", "reply 3", "b"], 0.5, 4),
        ("su", ["s", "c"], 0.5, 5),
    ]
    assert capsys.readouterr().out.splitlines() == ["reply 3", "reply 4", "reply 5"]


def test_help_is_no_message(monkeypatch, capsys):
    monkeypatch.setattr("postgrad.api.sampler.Sampler", FakeSampler)
    monkeypatch.setattr(sys, "stdin", io.StringIO("/help\n/quit\n"))
    assert main(["chat", "MODEL"]) == 0
    assert FakeSampler.calls == [("MODEL", [])]
    out = capsys.readouterr().out
    assert all(word in out for word in ("/clear", "/quit", "/help"))


@pytest.mark.slow
def test_a_model_answers(tiny, monkeypatch, capsys):
    from postgrad import generate

    monkeypatch.setattr(sys, "stdin", io.StringIO("2+2=\n"))
    assert main(["chat", str(tiny), "max_response_tokens=4"]) == 0
    expected = generate(str(tiny), "2+2=", max_tokens=4)
    assert capsys.readouterr().out.strip() == expected.strip()


@pytest.mark.slow
def test_the_pieces_of_a_reply_are_the_generated_text(tiny):
    from postgrad.api.sampler import Sampler

    sampler = Sampler(str(tiny), ["max_response_tokens=12"])
    whole = sampler.generate("2+2=", temperature=1.0, seed=3)
    pieces = list(sampler.stream("2+2=", temperature=1.0, seed=3))
    assert "".join(pieces) == whole
    assert len(pieces) > 1
    stop = whole[len(whole) // 2]
    stopped = Sampler(str(tiny), ["max_response_tokens=12", f"rollout.stop=['{stop}']"])
    text = "".join(stopped.stream("2+2=", temperature=1.0, seed=3))
    assert text == whole[: whole.index(stop)]

"""The environments of examples/: guess the number, search with rewards from the tool, TextArena."""

import json

import pytest
from test_pool import collect, problem
from tiny_runs import EXAMPLES, GUESS, metrics_of, overrides_of, toy_run

from postgrad.cli.main import main
from postgrad.environments.calls import Call
from postgrad.environments.host import ThreadHost
from postgrad.environments.session import SessionSpec, load_environment
from postgrad.problem import Problem

FOLDER = EXAMPLES / "environments"
PASSAGES = [
    {"title": "Otter", "text": "The otter eats fish. It lives in rivers."},
    {"title": "Heron", "text": "The heron eats frogs and fish and more fish, near rivers."},
    {"title": "Owl", "text": "The owl eats mice at night."},
]


@pytest.fixture
def corpus(tmp_path) -> str:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PASSAGES))
    return str(file)


def open_session(spec: SessionSpec, one: Problem | None = None):
    sessions = ThreadHost().new_sessions()
    sessions.open(0, spec, one or problem(), 0)
    return sessions, text_of(collect(sessions, 1)[0])


def text_of(reply) -> str:
    return reply.messages[0]["content"] if reply.messages else ""


def search_spec(corpus: str, **options) -> SessionSpec:
    return SessionSpec(f"{FOLDER / 'search.py'}:Search", {"corpus": corpus, **options})


def test_search_finds_passages_and_its_use_is_rewarded(corpus):
    one = Problem("u", ({"role": "user", "content": "What do owls eat?"},), '["mice", "a mouse"]')
    sessions, text = open_session(search_spec(corpus, passages=2), one)
    assert "<answer>" in text
    sessions.act(0, "", [Call("search", {"query": "owl at night"}), Call("search", {"query": "x"})])
    reply = collect(sessions, 1)[0]
    assert [message["content"] for message in reply.messages] == [
        "Owl\nThe owl eats mice at night.",
        "Nothing was found.",
    ]
    sessions.act(0, "<answer>mice</answer>", [])
    assert collect(sessions, 1)[0].done
    sessions.finish(0)
    outcome = collect(sessions, 1)[0]
    assert outcome.reward == pytest.approx(0.1 - 2 * 0.02)
    assert outcome.parts == {"found": 1.0, "searches": 2.0} and outcome.state == {"searches": 2}


def test_passages_are_ranked_by_bm25(corpus):
    """By hand: `fish` is in both passages; its second occurrence outweighs the longer passage."""
    sessions, _ = open_session(search_spec(corpus))
    sessions.act(0, "", [Call("search", {"query": "Fish?"}), Call("search", {"query": "otter"})])
    first, second = (message["content"] for message in collect(sessions, 1)[0].messages)
    assert [passage.split("\n")[0] for passage in first.split("\n\n")] == ["Heron", "Otter"]
    assert second.startswith("Otter")


def arena(**options) -> SessionSpec:
    pytest.importorskip("textarena", reason="textarena is not installed")
    return SessionSpec(f"{FOLDER / 'arena_games.py'}:Game", options)


def test_a_game_for_one(tmp_path):
    sessions, text = open_session(arena(game="GuessTheNumber-v0"))
    assert "between 1 and 20" in text
    low, high = 1, 20
    for _ in range(10):
        guess = (low + high) // 2
        sessions.act(0, f"I say [{guess}]", [])
        reply = collect(sessions, 1)[0]
        if reply.done:
            break
        said = reply.messages[0]["content"]
        assert said in ("The target number is lower.", "The target number is higher.")
        low, high = (low, guess - 1) if "lower" in said else (guess + 1, high)
    assert reply.done and reply.reward == 1.0


def play_tic_tac_toe(uid: str, seed: int) -> list[tuple[str, float, bool]]:
    sessions = ThreadHost().new_sessions()
    sessions.open(0, arena(game="TicTacToe-v0"), problem(uid), seed)
    seen = [(text_of(collect(sessions, 1)[0]), 0.0, False)]
    while not seen[-1][2]:
        moves = seen[-1][0].rpartition("Available Moves:")[2]
        sessions.act(0, moves.partition("]")[0].partition("'")[2] + "]", [])
        reply = collect(sessions, 1)[0]
        seen.append((reply.messages[0]["content"], reply.reward, reply.done))
    return seen


def test_a_game_for_two_has_an_opponent_and_repeats_itself():
    games = [play_tic_tac_toe(uid, 3) for uid in "abcdefgh"]
    assert {text[0][0].partition("Player ")[2][0] for text in games} == {"0", "1"}, "both sides"
    assert {game[-1][1] for game in games} <= {-1.0, 0.0, 1.0}
    assert all("Available Moves" in text for game in games for text, _, done in game if not done)
    assert games[0] == play_tic_tac_toe("a", 3), "the same seed, the same opponent"


def test_guess_the_number():
    game = load_environment(GUESS.partition("=")[2])(high=9)
    assert "1 to 9" in game.reset(problem("a"))
    assert game.step("no idea") == ("Reply with one number.", -0.1, False)
    low, high = 1, 9
    while True:
        guess = (low + high) // 2
        text, reward, done = game.step(f"I say {guess}")
        if done:
            assert (text, reward) == ("Right!", 1.0)
            break
        low, high = (guess + 1, high) if text == "higher" else (low, guess - 1)


def test_a_run_plays_guess_the_number(tiny, tmp_path):
    overrides = overrides_of(
        tiny,
        *toy_run(steps=1, samples=2, response_tokens=40),
        *(GUESS, "environment.options.high=9", "environment.workers=0", "rollout.max_turns=2"),
        *("data.train=seeds:4", "reward.verifier=auto", f"runs={tmp_path}"),
    )
    assert main(["train", "grpo", *overrides]) == 0
    (metrics,) = metrics_of(tmp_path / "test")
    assert metrics["environment/failures"] == 0 and metrics["tools/turns"] > 0


def test_the_docs_show_guess_the_number():
    code = (EXAMPLES / "guess.py").read_text()
    page = (EXAMPLES.parent / "docs" / "environments.md").read_text()
    assert f"```python\n{code[code.index('import') :]}```" in page

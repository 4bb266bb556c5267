"""Trajectories with an environment: prompts, turns, rewards, failures; nobody waits for another."""

import string
import threading
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from refused import refused
from tool_model import KNOWS_TOOLS, PLAIN_CHAT, chat_tokenizer

from postgrad.config.schema import EnvironmentConfig, RolloutConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.environments.lookup import Environments
from postgrad.environments.port import choose_verifier
from postgrad.environments.session import load_environment
from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.conversations import Turns
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.episodes import turn_column
from postgrad.rollout.respond import respond
from postgrad.rollout.turns import run_turns
from postgrad.sandbox.local import probe
from postgrad.sandbox.outcome import SandboxError
from postgrad.verifiers.scorer import Scorer

GAMES = Path(__file__).parent / "games.py"
LETTERS = string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", "")
TOKENIZER = chat_tokenizer(LETTERS, PLAIN_CHAT)
END = TOKENIZER.eos_token_id


def problem(uid: str = "u", text: str = "", **extra) -> Problem:
    return Problem(uid, ({"role": "user", "content": text},), "", extra=extra)


def environments(name: str = "Echo", workers: int = 0, **changes) -> Environments:
    path = f"{GAMES}:{name}" if ":" not in name and "=" not in name else name
    return Environments(EnvironmentConfig(path, workers=workers, **changes), RolloutConfig())


def make_turns(found: Environments, max_turns: int = 4, template: str = "chat") -> Turns:
    tokenizer = chat_tokenizer(LETTERS, KNOWS_TOOLS) if found.schemas else TOKENIZER
    return Turns(found, Encoder(tokenizer, template, 4096, tools=found.schemas), max_turns)


def say(turns: Turns, text: str) -> list[int]:
    return [*turns.encoder.encode_response(text, with_end=False), END]  # type: ignore[attr-defined]


def play(turns: Turns, replies: list[str], one: Problem, limit: int = 2000):
    """One trajectory of a policy that says `replies`."""
    said = iter([say(turns, text) for text in replies])
    engine = FakeEngine(lambda prompt, seed: next(said))
    requests = [Request([1], [7])]
    ((done,),) = run_turns(engine, requests, [one], Sampling(max_new_tokens=limit), turns)
    turns.close()
    return done


def test_a_trajectory_is_what_the_template_writes():
    turns = make_turns(environments(options={"turns": 2}))
    done = play(turns, ["abc", "de"], problem("p1", "Play."))
    messages = [
        {"role": "user", "content": "Play.\n\nhello p1"},
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": "you said abc"},
        {"role": "assistant", "content": "de"},
    ]
    whole = turns.encoder.chat_template.render(messages).removesuffix("\n")  # type: ignore
    episode = done.episode
    assert TOKENIZER(whole)["input_ids"] == [*episode.prompt, *done.tokens]
    assert turns.encoder.decode(done.policy_tokens) == "abcde"
    assert (done.turns, episode.done, done.finish) == (2, True, "stop")
    assert (episode.rewards, episode.reward, episode.parts) == ([3.0, 2.0], 5.5, {"bonus": 0.25})
    assert episode.state == {"seen": ["abc", "de"]}
    assert episode.question == "Play.\n\nhello p1"


def test_turns_of_tokens_and_rewards_belong_together():
    done = play(make_turns(environments(options={"turns": 2})), ["abc", "de"], problem())
    column = turn_column(done)
    assert column.count(0.0) == 4 and column.count(1.0) == 3 and column[0] == 0 and column[-1] == 1
    assert [turn == -1.0 for turn in column] == [not own for own in done.policy_mask]
    assert len(set(done.episode.states)) == 2, "the two turns began in different states"


def test_the_last_turn_counts_although_nothing_follows_it():
    done = play(make_turns(environments(options={"turns": 9}), max_turns=2), ["a", "b"], problem())
    assert (done.turns, done.episode.rewards, done.episode.done) == (2, [1.0, 1.0], False)
    assert done.policy_mask[-1], "no observation after the last turn"


def test_an_observation_that_does_not_fit_ends_the_trajectory():
    done = play(make_turns(environments(options={"turns": 9})), ["ab", "c"], problem(), limit=20)
    assert (done.turns, done.finish, all(done.policy_mask)) == (1, "length", True)
    assert done.episode.rewards == [2.0]


def test_a_thought_is_no_action():
    done = play(make_turns(environments()), ["<think>hm hm</think> ab", "c"], problem())
    assert done.episode.state == {"seen": ["ab", "c"]}


def test_plain_prompts_are_continued_by_the_observation():
    turns = make_turns(environments(), template="plain")
    done = play(turns, ["ab", "c"], problem("u", "x"))
    assert turns.encoder.decode(done.tokens) == "abyou said abc"


def test_trajectories_with_equal_prompts_are_one_request():
    turns = make_turns(environments(options={"turns": 1}))
    engine = FakeEngine(lambda prompt, seed: [3, END])
    requests = [Request([1], [1, 2, 3]), Request([1], [4, 5])]
    run_turns(engine, requests, [problem("a"), problem("b")], Sampling(), turns)
    assert sorted(request.seeds for request in engine.requests) == [[1, 2, 3], [4, 5]]


def test_a_failed_environment_is_a_failure_of_its_trajectory():
    turns = make_turns(environments("Hostile"), max_turns=2)
    raising, fine = say(turns, "raise"), say(turns, "go")
    engine = FakeEngine(lambda prompt, seed: raising if seed % 2 else fine)
    answers = respond(
        engine, Scorer("environment"), turns.encoder, [problem()], Sampling(), 4, 0, turns
    )
    kinds = {type(answer.verdict) for answer in answers}
    assert kinds == {Score, Failure}
    for answer in answers:
        raised = "raise" in answer.text
        assert isinstance(answer.verdict, Failure) == raised
        if raised:
            assert "(games.py, line " in answer.verdict.reason
        assert raised or answer.verdict == Score(2.0)


def test_a_prompt_that_became_too_long_is_a_failure():
    turns = make_turns(environments())
    turns.encoder.max_prompt_tokens = 5
    assert play(turns, [], problem()).episode.failure.kind == "prompt"


def test_fenced_python_runs_between_turns():
    """Code in place: the sandbox's output follows the block, and the policy goes on."""
    try:
        probe()
    except SandboxError as error:
        pytest.skip(f"no sandbox: {error}")
    rollout = RolloutConfig(tools=["python"], tool_format="python_blocks")
    found = Environments(EnvironmentConfig(), rollout)
    program = "I compute it.\n```python\nprint(6 * 7)\n```"
    done = play(make_turns(found), [program, "It is 42."], problem("u", "6*7?"))
    assert [message["role"] for message in done.messages] == ["assistant", "tool", "assistant"]
    assert done.messages[1]["content"] == "42"
    assert (done.turns, done.calls, done.errors) == (2, 1, 0)


SLOW = """
import threading

GATES = {}

class Slow:
    def reset(self, problem):
        self.name = problem.uid

    def step(self, action):
        if self.name == "slow":
            GATES["slow"].wait(60)
        return "", 1.0, action == "stop"
"""


def test_nobody_waits_for_a_slow_environment(tmp_path):
    """One environment answers only after the other trajectory has begun its last turn."""
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    turns = make_turns(environments(f"{file}:Slow"), max_turns=5)
    gate = threading.Event()
    load_environment(f"{file}:Slow").step.__globals__["GATES"]["slow"] = gate
    go = say(turns, "go")
    num_fast_turns = 0

    def reply(prompt, seed):
        nonlocal num_fast_turns
        num_fast_turns += "fast" in turns.encoder.decode(prompt)
        if num_fast_turns == 5:
            gate.set()
        return go

    problems = [problem("slow", "slow"), problem("fast", "fast")]
    requests = [Request([1], [1]), Request([1], [2])]
    sampling = Sampling(max_new_tokens=900)
    slow, fast = run_turns(FakeEngine(reply), requests, problems, sampling, turns)
    assert slow[0].turns == fast[0].turns == 5 and gate.is_set()


# ---- several environments, and settings that cannot work


def test_rows_choose_among_several_environments():
    both = environments(
        f"e={GAMES}:Echo,w={GAMES}:Wallet",
        options={"e": {"turns": 3}},
        weights={"e": 3.0, "w": 1.0},
    )
    assert both.spec_for(problem("x", environment="w")).environment.endswith(":Wallet")
    assert both.spec_for(problem("x", environment="e")).options == {"turns": 3}
    names = [both.choose(problem(str(i))) for i in range(400)]
    assert 0.68 < names.count("e") / 400 < 0.82
    assert names == [both.choose(problem(str(i))) for i in range(400)], "always the same"
    assert [schema["function"]["name"] for schema in both.schemas] == ["pay"]
    with refused("unknown_name", "environment"):
        both.choose(problem("x", environment="z"))


@pytest.mark.parametrize(
    ("changes", "code", "at"),
    [
        ({"name": "gues"}, "unknown_name", "environment"),
        ({"name": f"{GAMES}:NoEnvironment"}, "user_code", "environment"),
        (
            {"name": f"{GAMES}:Echo", "options": {"turn": 1}},
            "unknown_name",
            "environment.options.turn",
        ),
        ({"name": f"a={GAMES}:Echo,{GAMES}:Echo"}, "conflict", "environment"),
        (
            {"name": f"a={GAMES}:Echo", "weights": {"b": 1.0}},
            "unknown_name",
            "environment.weights.b",
        ),
    ],
)
def test_environments_that_cannot_be_had_are_refused(changes, code, at):
    with refused(code, at):
        Environments(EnvironmentConfig(**changes), RolloutConfig())


def test_the_reward_of_an_environment_is_a_verifier():
    assert choose_verifier("auto", environments()) == "environment"
    assert choose_verifier("environment + 0.1*format", environments()) == "environment + 0.1*format"
    with refused("missing", "reward.verifier"):
        choose_verifier("environment", None)

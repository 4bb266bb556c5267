"""Agents: programs that call the policy through an endpoint, and their trajectories."""

import queue
import string
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from refused import refused
from tool_model import CALL, KNOWS_TOOLS, PLAIN_CHAT, chat_tokenizer
from waiting import wait_for_end

from postgrad.agents.program import read_reward
from postgrad.agents.runner import Agents
from postgrad.config.schema import AgentConfig
from postgrad.data.encode.encoder import Encoder
from postgrad.problem import Failure, Problem, Score
from postgrad.rollout.engine import Completion, Request, Sampling
from postgrad.rollout.episodes import turn_column
from postgrad.rollout.respond import respond
from postgrad.rollout.turns import run_turns

PROGRAM = Path(__file__).parent / "program.py"
LETTERS = string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", "")
USER = {"role": "user", "content": "What?"}
PROBLEM = Problem("p1", (USER,), "42")


def command(name: str) -> str:
    return f"{sys.executable} -I -S {PROGRAM} {name}"


def make_agents(
    name: str, template: str = PLAIN_CHAT, verifier: str = "auto", **changes
) -> tuple[Agents, Encoder]:
    prompts = Encoder(chat_tokenizer(LETTERS, template), "chat", 200)
    return Agents(AgentConfig(command(name), **changes), prompts, verifier), prompts


class CountingEngine(FakeEngine):
    """The log-prob of a token is minus its position in the response, so that a shift shows."""

    def _complete(self, request, seed, limit) -> Completion:
        done = super()._complete(request, seed, limit)
        return Completion(done.tokens, [-float(i) for i in range(len(done.tokens))], done.finish)


def play(agents: Agents, prompts: Encoder, replies: list[str], problem=PROBLEM, limit=2000):
    """The trajectories of one program whose calls get `replies`, in order."""
    tokens = [prompts.encode_response(text) for text in replies]
    said = iter(tokens)
    engine = CountingEngine(lambda prompt, seed: next(said))
    requests = [Request(prompts.prompt(problem), [7])]
    try:
        sampling = Sampling(max_new_tokens=limit)
        (done,) = run_turns(engine, requests, [problem], sampling, agents)
    finally:
        agents.close()
    return done, engine


def render(prompts: Encoder, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of a conversation, up to the end of its last message."""
    assert prompts.chat_template is not None
    text = prompts.chat_template.render(messages).removesuffix("\n")
    return prompts.tokenizer(text)["input_ids"]  # type: ignore[return-value]


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_calls_that_continue_each_other_are_one_trajectory():
    agents, prompts = make_agents("two_turns")
    (done,), engine = play(agents, prompts, ["one", "seven"])
    again = {"role": "user", "content": "again"}
    conversation = [USER, said("one"), again, said("seven")]
    episode = done.episode
    assert [*episode.prompt, *done.tokens] == render(prompts, conversation)
    assert episode.prompt == prompts.prompt(PROBLEM)
    assert prompts.decode(done.policy_tokens) == "oneseven"
    # The policy wrote "one" and its end, and "seven" and its end; the template the rest.
    num_between = len(done.tokens) - 4 - 6
    assert done.policy_mask == [True] * 4 + [False] * num_between + [True] * 6
    assert done.logprobs == [
        0.0,
        -1.0,
        -2.0,
        -3.0,
        *[0.0] * num_between,
        *(-float(i) for i in range(6)),
    ]
    assert (episode.turn_ends, done.turns) == ([4, len(done.tokens)], 2)
    assert turn_column(done)[:4] == [0.0] * 4 and turn_column(done)[-1] == 1.0
    assert (episode.reward, episode.rewards, episode.parts) == (0.5, [0.0, 0.5], {"replies": 4.0})
    assert done.messages == [said("one"), again, said("seven")]
    assert (episode.question, episode.answer, episode.failure) == ("What?", "seven", None)
    first, second = engine.requests
    assert second.prompt == [*episode.prompt, *done.tokens[:-6]] and first.seeds != second.seeds


def test_other_calls_are_other_trajectories_with_the_same_reward():
    agents, prompts = make_agents("branches")
    done, _ = play(agents, prompts, ["a", "help", "b", "c"])
    texts = [[*one.episode.prompt, *one.tokens] for one in done]
    go_on = {"role": "user", "content": "go on"}
    other = {"role": "user", "content": "another way"}
    helper = {"role": "user", "content": "a question to a helper"}
    # First the one with the last reply. It branches off, so its prompt has the earlier turn.
    assert texts[0] == render(prompts, [USER, said("a"), other, said("c")])
    assert prompts.decode(done[0].policy_tokens) == "c"
    assert texts[1] == render(prompts, [USER, said("a"), go_on, said("b")])
    assert prompts.decode(done[1].policy_tokens) == "ab"
    assert texts[2] == render(prompts, [helper, said("help")])
    assert [one.episode.reward for one in done] == [2.0] * 3
    assert [one.episode.answer for one in done] == ["c"] * 3


def test_tool_calls_and_their_answers_continue_a_trajectory():
    agents, prompts = make_agents("tool_turn", KNOWS_TOOLS)
    (done,), _ = play(agents, prompts, [CALL, "12"])
    text = prompts.decode_raw(done.tokens)
    assert text.startswith(CALL) and "<tool_response>\n12\n</tool_response>" in text
    assert prompts.decode(done.policy_tokens) == CALL + "12" and done.turns == 2
    assert "look" in prompts.decode_raw(done.episode.prompt)


def test_a_refused_call_is_in_no_trajectory():
    agents, prompts = make_agents("refused", max_calls=1)
    (done,), engine = play(agents, prompts, ["abcdef"], limit=100)
    assert done.episode.failure is None, done.episode.failure
    assert len(engine.requests) == 1 and prompts.decode(done.tokens) == "abc"
    assert done.finish == "length" and engine.requests[0].max_new_tokens == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "replies"),
    [("crash", "exit", ["x"]), ("silent", "no calls", []), ("answer_only", "no reward", ["x"])],
)
def test_a_program_that_fails_is_a_failure(name, kind, replies):
    agents, prompts = make_agents(name)
    (done,), _ = play(agents, prompts, replies)
    assert done.episode.failure.kind == kind
    assert prompts.decode(done.policy_tokens) == "".join(replies)
    if name == "crash":
        assert "the agent is broken" in done.episode.failure.reason


def test_a_program_that_gives_up_at_the_length_has_the_reward_0():
    agents, prompts = make_agents("endless")
    (done,), _ = play(agents, prompts, ["x" * 30] * 9, limit=100)
    assert done.episode.failure is None and done.episode.reward == 0.0
    assert done.turns == 2 and len(done.tokens) <= 100


@pytest.mark.slow
def test_a_program_is_killed_with_its_children_at_the_time_limit(tmp_path):
    agents, prompts = make_agents("hang", timeout_s=4.0)
    file = tmp_path / "pid"
    problem = Problem("p1", (USER,), "", extra={"pid_file": str(file)})
    began = time.monotonic()
    (done,), _ = play(agents, prompts, ["x"], problem)
    assert done.episode.failure.kind == "timeout" and time.monotonic() - began < 300
    if file.exists():  # the machine was fast enough for the program to start its child
        wait_for_end(int(file.read_text()))


def test_a_verifier_may_score_the_last_reply():
    agents, prompts = make_agents("answer_only", verifier="exact")
    tokens = prompts.encode_response("42")
    engine = FakeEngine(lambda prompt, seed: tokens)

    class Exact:
        def score(self, problems, responses, token_ids):
            rows = zip(problems, responses, strict=True)
            return [Score(float(problem.ground_truth == text)) for problem, text in rows]

    try:
        answers = respond(engine, Exact(), prompts, [PROBLEM], Sampling(), 2, 0, agents)
    finally:
        agents.close()
    assert [answer.score for answer in answers] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("words\n0.25\n", Score(0.25)),
        ('{"reward": 1, "speed": 2, "name": "x"}', Score(1.0, {"speed": 2.0})),
        ('{"score": true}', Score(1.0)),
        ("done", None),
        ('{"answer": 3}', None),
        ("[1]", None),
        ("", None),
    ],
)
def test_the_last_line_of_the_output_is_the_reward(output, reward):
    assert read_reward(output) == reward


def test_a_reward_that_is_not_finite_is_a_failure():
    assert isinstance(read_reward("NaN"), Failure)


def test_a_program_that_does_not_exist_is_refused():
    prompts = Encoder(chat_tokenizer(LETTERS, PLAIN_CHAT), "chat", 200)
    with refused("unknown_name", "agent"):
        Agents(AgentConfig("no_such_program x"), prompts, "auto")


def test_the_endpoint_of_agents_names_its_model_and_has_errors_in_openai_s_shape():
    import httpx

    agents, _ = make_agents("silent")
    recording: Any = None
    session = agents.endpoint.open_session(recording, queue.SimpleQueue().put)
    try:
        with httpx.Client(base_url=session.base_url, timeout=20) as client:
            assert client.get("/models/policy").json()["id"] == "policy"
            limits = {"input": "x", "max_tokens": 5}
            answers = [
                (404, client.get("/models/other")),
                (404, client.post("/embeddings", json={})),
                (405, client.get("/chat/completions")),
                (400, client.post("/responses", json=limits)),
            ]
        for status, answer in answers:
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answers[-1][1].json()["error"]["param"] == "max_tokens"
    finally:
        agents.close()


def test_a_session_needs_its_token():
    import http.client

    agents, _ = make_agents("silent")
    address = agents.endpoint.address.removeprefix("http://")
    try:
        connection = http.client.HTTPConnection(address, timeout=20)
        connection.request("GET", "/agent/guess/v1/models")
        assert connection.getresponse().status == 401
        connection.close()
    finally:
        agents.close()

"""`postgrad serve` with the official OpenAI client and our HTTP engine.

The sampled tokens must equal those of the native engine.
"""

import http.client
import itertools
import json
import shutil
import threading
import time
from functools import partial

import openai
import pytest
from refused import refused
from serve_process import live
from tiny_runs import END, config_of, same_completions, stock_model, stock_row
from waiting import in_threads, join, wait_for

from postgrad.cluster.host import build_host
from postgrad.model.load.load import load_tokenizer
from postgrad.model.load.tiny import make_tiny
from postgrad.rollout.engine import Request, Sampling, trajectory_seed
from postgrad.rollout.http import HttpChat, HttpEngine
from postgrad.rollout.http_client import Address
from postgrad.rollout.native.scheduler import Scheduler

PROMPT = [1, 10, 2, 15]  # "1+2="
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def native(tiny):
    return build_host(config_of("grpo", tiny)).engine


def said(native, prompts, seed, limit=12, temperature=1.0, prompt=PROMPT):
    done = native.generate([Request(prompt, [seed])], Sampling(temperature, limit))[0][0]
    return done, prompts.decode(done.tokens)


def seed_of(native, wanted, limit=12):
    """A seed whose answer is as a test wants it."""
    return next(
        s
        for s in range(500)
        if wanted(native.generate([Request(PROMPT, [s])], Sampling(1.0, limit))[0][0])
    )


# ---- what is said


@pytest.mark.parametrize("seed", [3, 2**63 - 1, -5])
def test_completions_are_the_native_engine_s(client, native, prompts, seed):
    done, text = said(native, prompts, seed % 2**64)
    answer = client.completions.create(
        model="tiny", prompt="1+2=", max_tokens=12, seed=seed, logprobs=0, extra_body=IDS
    )
    choice = answer.choices[0]
    assert choice.text == text
    assert choice.token_ids == done.tokens
    assert choice.finish_reason == done.finish
    assert choice.prompt_token_ids == PROMPT
    assert choice.logprobs.token_logprobs == pytest.approx(done.logprobs, abs=1e-5)
    assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == len(done.tokens)


def test_several_prompts_and_choices_come_in_order(client, native, prompts):
    answer = client.completions.create(
        model="tiny", prompt=[[1, 2], [3, 15]], n=2, max_tokens=6, seed=9, extra_body=IDS
    )
    truth = [
        said(native, prompts, seed, 6, prompt=prompt)[0].tokens
        for prompt in ([1, 2], [3, 15])
        for seed in (9, 10)
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.token_ids for choice in answer.choices] == truth
    assert len({tuple(t) for t in truth}) > 2
    texts = client.completions.create(
        model="tiny", prompt=["1+2=", "1+2="], max_tokens=6, temperature=0
    )
    assert [c.text for c in texts.choices] == [said(native, prompts, 0, 6, 0.0)[1]] * 2


def test_equal_prompts_of_a_list_differ_without_a_seed(client):
    def texts(**fields):
        answer = client.completions.create(
            model="tiny", prompt=["1+2="] * 16, max_tokens=12, extra_body=IDS, **fields
        )
        return {tuple(choice.token_ids) for choice in answer.choices}

    assert len(texts()) > 8
    assert len(texts(seed=3)) == 1


@pytest.mark.slow
def test_each_has_its_own_sampling_in_one_batch(client, native, prompts):
    """Temperatures, filters and limits of requests that decode together do not touch each other."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 0.5},
        {"extra_body": {"top_k": 2}},
        {"extra_body": {"min_p": 0.4}},
    ]
    truth = [
        Sampling(
            kind.get("temperature", 1.0), 10, kind.get("top_p", 1.0), **kind.get("extra_body", {})
        )
        for kind in kinds
    ]
    found = {}

    def ask(i, seed):
        kind = kinds[i] | {"extra_body": kinds[i].get("extra_body", {}) | IDS}
        more = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10, "seed": seed}
        found[i, seed] = client.completions.create(**more, **kind).choices[0].token_ids

    pairs = [(i, seed) for i in range(len(kinds)) for seed in range(4)]
    join(in_threads(*(partial(ask, *pair) for pair in pairs)))
    for (i, seed), tokens in found.items():
        assert tokens == native.generate([Request(PROMPT, [seed])], truth[i])[0][0].tokens, kinds[i]
    assert len(found) == 20


def test_chat_goes_through_the_template_and_tells_log_probs(client, native, prompts, tiny):
    done, text = said(native, prompts, 4, 8)
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "1+2="}],
        max_completion_tokens=8,
        seed=4,
        logprobs=True,
        top_logprobs=3,
        extra_body=IDS,
    )
    choice = answer.choices[0]
    assert choice.message.content == text
    assert choice.message.role == "assistant"
    assert choice.token_ids == done.tokens
    assert answer.prompt_token_ids == PROMPT
    entries = choice.logprobs.content
    exact = stock_row(stock_model(tiny), PROMPT, done.tokens)[0].tolist()
    assert [entry.logprob for entry in entries] == pytest.approx(exact, abs=1e-4)
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= values[0] + 1e-6
        assert entry.bytes == list(entry.token.encode())
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2="}]
    again = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=8, seed=4
    )
    assert again.choices[0].message.content == text


@pytest.mark.slow
def test_top_log_probs_are_those_of_the_distribution(client, tiny):
    import torch

    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, temperature=0.5, logprobs=18, seed=1
    )
    logits = stock_model(tiny)(input_ids=torch.tensor([PROMPT])).logits[0, -1] / 0.5
    overrides = [load_tokenizer(config_of("grpo", tiny).model).decode([i]) for i in range(18)]
    exact = dict(zip(overrides, logits.log_softmax(-1).tolist(), strict=True))
    top_logprobs = answer.choices[0].logprobs.top_logprobs[0]
    assert set(top_logprobs) == set(exact)
    assert all(top_logprobs[word] == pytest.approx(exact[word], abs=1e-4) for word in exact)
    named = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=3,
        logprobs=1,
        seed=1,
        extra_body={"return_tokens_as_token_ids": True, **IDS},
    ).choices[0]
    assert named.logprobs.tokens == [f"token_id:{i}" for i in named.token_ids]


@pytest.mark.slow
def test_two_models_on_one_port_and_a_chat_template_with_its_options(
    tiny, tiny_untied, native, tmp_path
):
    """The second model brings a template that closes the question, twice if it is asked to."""
    templated = shutil.copytree(tiny_untied, tmp_path / "templated")
    tokenizer = load_tokenizer(config_of("grpo", templated).model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}={% if closes_twice %}={% endif %}"
    )
    tokenizer.save_pretrained(templated)
    truth = {"tiny": native, "other": build_host(config_of("grpo", templated)).engine}
    with (
        live(tiny, other=templated) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        assert [card.id for card in client.models.list().data] == ["tiny", "other"]
        for name, engine in truth.items():
            done = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=IDS
            ).choices[0]
            ((expected,),) = engine.generate([Request(PROMPT, [0])], Sampling(0.0, 8))
            assert done.token_ids == expected.tokens
        ask = {
            "model": "other",
            "messages": [{"role": "user", "content": "1+2"}],
            "max_tokens": 4,
            "temperature": 0,
        }
        assert client.chat.completions.create(**ask, extra_body=IDS).prompt_token_ids == PROMPT
        options = {"chat_template_kwargs": {"closes_twice": True}}
        twice = client.chat.completions.create(**ask, extra_body=options | IDS)
        assert twice.prompt_token_ids == [*PROMPT, 15]
        with pytest.raises(
            openai.BadRequestError,
            match=r"chat_template_kwargs\.closes_thrice: the chat template never reads",
        ):
            client.chat.completions.create(
                **ask, extra_body={"chat_template_kwargs": {"closes_thrice": True}}
            )
        with pytest.raises(openai.NotFoundError, match="no model ''"):
            client.completions.create(model="", prompt=PROMPT)


# ---- streams


def test_stream_gives_the_same_text_as_one_response(client, native, prompts):
    seed = seed_of(native, lambda done: done.finish == "stop" and len(done.tokens) > 4)
    done, text = said(native, prompts, seed)
    pieces = list(
        client.completions.create(
            model="tiny",
            prompt="1+2=",
            max_tokens=12,
            seed=seed,
            stream=True,
            logprobs=0,
            stream_options={"include_usage": True},
            extra_body=IDS,
        )
    )
    choices = [piece.choices[0] for piece in pieces if piece.choices]
    assert "".join(choice.text for choice in choices) == text
    assert [i for choice in choices for i in choice.token_ids] == done.tokens
    assert [p for choice in choices for p in choice.logprobs.token_logprobs] == pytest.approx(
        done.logprobs, abs=1e-5
    )
    assert choices[0].prompt_token_ids == PROMPT
    assert [c.finish_reason for c in choices][-1] == "stop"
    assert all(choice.finish_reason is None for choice in choices[:-1])
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == len(done.tokens)
    assert all(piece.usage is None for piece in pieces[:-1])


def test_a_chat_streams_with_its_role_first(client, native, prompts):
    messages = [{"role": "user", "content": "1+2="}]
    pieces = list(
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=6, seed=5, n=2, stream=True
        )
    )
    assert [piece.choices[0].delta.role for piece in pieces[:2]] == ["assistant"] * 2
    for index in (0, 1):
        own = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == said(native, prompts, 5 + index, 6)[1]
        assert own[-1].finish_reason in ("stop", "length")


def test_the_bytes_of_a_stream(server):
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    events = answer.read().decode().split("\n\n")
    assert answer.getheader("content-type").startswith("text/event-stream")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(json.loads(e.removeprefix("data: ")) for e in events[:-2])


# ---- stop strings


def test_stop_strings_end_text_and_row_and_tokens_stay(client, native, prompts):
    seed = seed_of(native, lambda done: len(set(done.tokens[:6])) > 4 and len(done.tokens) >= 6)
    done, text = said(native, prompts, seed)
    stop = text[3:5]
    at = text.index(stop)
    ask = {
        "model": "tiny",
        "prompt": "1+2=",
        "max_tokens": 12,
        "seed": seed,
        "stop": [stop, "no such"],
    }
    choice = client.completions.create(**ask, extra_body=IDS).choices[0]
    assert choice.text == text[:at]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop
    assert choice.token_ids == done.tokens[: at + 2], (
        "one token a character: those of the string belong to the row"
    )
    kept = client.completions.create(
        **ask, extra_body={"include_stop_str_in_output": True}
    ).choices[0]
    assert kept.text == text[: at + 2]
    pieces = list(client.completions.create(**ask, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == text[:at]
    assert client.completions.create(**ask | {"stop": stop}).choices[0].text == text[:at]


# ---- joining, leaving, waiting


def slowly(monkeypatch, seconds=0.03) -> list[int]:
    """Make decode steps slow, so that a test can act during an answer; returns a list of steps."""
    real = Scheduler.step
    steps: list[int] = []

    def step(self):
        steps.append(len(steps))
        time.sleep(seconds)
        return real(self)

    monkeypatch.setattr(Scheduler, "step", step)
    return steps


def pause_at(monkeypatch, *numbers: int) -> dict[int, threading.Event]:
    """Decode steps of these numbers wait for their event; the first step has number 0."""
    real = Scheduler.step
    events = {number: threading.Event() for number in numbers}
    count = itertools.count()

    def step(self):
        number = next(count)
        if number in events:
            assert events[number].wait(300), f"step {number} was never released"
        return real(self)

    monkeypatch.setattr(Scheduler, "step", step)
    return events


LONG = {"model": "tiny", "prompt": [1], "max_tokens": 200, "temperature": 0}


@pytest.mark.slow
def test_requests_join_those_that_decode(server, client, monkeypatch):
    """The short request arrives at step 3 of the long one, and ends before step 60."""
    pauses = pause_at(monkeypatch, 3, 60)
    stream = client.completions.create(**LONG, stream=True)
    next(stream)
    ask = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "seed": 1}
    short = in_threads(partial(client.completions.create, **ask))
    wait_for(lambda: server.rows() == 2, "the short request to arrive")
    pauses[3].set()
    join(short, 50)  # it does not wait for the long answer
    pauses[60].set()
    assert sum(1 for _ in stream) > 20


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_rows(server, monkeypatch, stream):
    import socket

    steps = slowly(monkeypatch, 0.1)
    body = json.dumps(LONG | {"stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: server.rows() == 1, "the row to decode")
        if stream:
            assert b"200 OK" in connection.recv(1000)
    wait_for(lambda: server.rows() == 0, "the row to be freed")
    assert len(steps) < 199, "decoding stopped before the last token"


@pytest.mark.slow
def test_a_full_queue_says_so_and_when_to_come_again(tiny, monkeypatch):
    with live(tiny, rows=1, queue=1) as small:
        pauses = pause_at(monkeypatch, 3)
        threads = in_threads(*[partial(small.ask, "/v1/completions", LONG)] * 2)
        wait_for(lambda: small.rows() == 2, "both places to be taken")
        status, answer, headers = small.ask("/v1/completions", LONG)
        assert status == 429
        assert headers["retry-after"] == "1"
        assert "all 2 places are taken" in answer["error"]["message"]
        status, answer, _ = small.ask("/v1/completions", LONG | {"n": 3})
        assert status == 400 and "3 completions" in answer["error"]["message"]
        pauses[3].set()
        join(threads)
        assert small.ask("/v1/completions", LONG)[0] == 200


def test_a_waiting_request_starts_with_the_new_weights(tiny, tmp_path, monkeypatch):
    """One row decodes and two requests wait when the reload arrives, one of them with an echo."""
    other = make_tiny(tmp_path / "other", seed=5, layers=2, width=32)
    running = LONG | {"max_tokens": 20, "logprobs": 0}
    short = running | {"prompt": PROMPT, "max_tokens": 8}
    echo = short | {"echo": True}
    truth = {}
    for name, folder in (("old", tiny), ("new", other)):
        with live(folder) as server:
            answers = [server.ask("/v1/completions", body)[1] for body in (running, short, echo)]
            truth[name] = [answer["choices"][0] for answer in answers]
    assert all(old != new for old, new in zip(truth["old"], truth["new"], strict=True))
    found = {}
    with live(tiny, rows=1, reload_below=tmp_path) as server:
        pauses = pause_at(monkeypatch, 3, 5)

        def ask(name, body, path="/v1/completions"):
            found[name] = server.ask(path, body)[1]

        threads = []
        for name, body in (("running", running), ("short", short), ("echo", echo)):
            threads.extend(in_threads(partial(ask, name, body)))
            wait_for(lambda: server.rows() == len(threads), f"{name} to arrive")
        pauses[3].set()
        threads.extend(in_threads(partial(ask, "reload", {"folder": "other"}, "/v1/reload")))
        assert server.served is not None
        wait_for(lambda: server.served.worker._tasks, "the reload to arrive")
        pauses[5].set()
        join(threads, 60)
    assert found["reload"]["version"] == 1
    choices = [found[name]["choices"][0] for name in ("running", "short", "echo")]
    assert choices[0] == truth["old"][0] and choices[1:] == truth["new"][1:]


def test_requests_get_an_error_when_the_server_stops_before_they_end(tiny, monkeypatch, capfd):
    """Two requests decode and two wait, one of each a stream, and the server gives 1 s."""
    found: dict[str, tuple[int, str]] = {}

    def ask(name, stream):
        body = json.dumps(LONG | {"stream": stream})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        found[name] = response.status, response.read().decode()

    with live(tiny, rows=2, grace_s=1) as server:
        steps = slowly(monkeypatch, 0.1)
        kinds = [("running", False), ("running stream", True), ("waiting", False)]
        threads = []
        for name, stream in [*kinds, ("waiting stream", True)]:
            threads.extend(in_threads(partial(ask, name, stream)))
            wait_for(lambda: server.rows() == len(threads), f"{name} to arrive")
        num_steps = len(steps)
        wait_for(lambda: len(steps) > num_steps + 3, "both rows to have tokens")
    join(threads, 60)
    status, stream = found.pop("running stream")
    events = stream.strip().split("\n\n")
    last = json.loads(events[-1].removeprefix("data: "))
    assert status == 200 and len(events) > 2 and "shut down" in last["error"]["message"]
    assert len(found) == 3
    for status, body in found.values():
        assert status == 503 and "shut" in json.loads(body)["error"]["message"]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_an_answer_has_a_time_limit(tiny, monkeypatch):
    with live(tiny, time_limit_s=0.3) as short:
        slowly(monkeypatch)
        status, answer, _ = short.ask("/v1/completions", LONG)
        assert status == 504 and answer["error"]["code"] == "timeout"
        wait_for(lambda: short.rows() == 0, "the rows to be freed")


def test_failed_engine_call_is_reported_and_the_server_continues(
    client, server, monkeypatch, capfd
):
    real = Scheduler.step
    monkeypatch.setattr(Scheduler, "step", lambda self: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="the engine failed: ZeroDivisionError"):
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=50, seed=3, n=4)
    monkeypatch.setattr(Scheduler, "step", real)
    assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3).choices
    assert server.rows() == 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_model_whose_weights_are_not_numbers_gives_no_text(tiny, stream):
    """A greedy response would be the first token of the vocabulary, again and again."""
    with (
        live(tiny) as server,
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        assert server.served is not None
        server.served.worker.engine.model.base_model.norm.weight.data.fill_(float("nan"))
        with pytest.raises(openai.APIError, match="not numbers"):
            list(client.completions.create(**LONG, stream=stream))
        wait_for(lambda: server.rows() == 0, "the row to be freed")


# ---- our own client


@pytest.mark.slow
def test_our_engine_over_http_is_the_native_engine(server, native, prompts):
    """Equal tokens for 64-bit seeds, sampled and greedy; log-probs equal the trainer's."""
    seeds = [trajectory_seed(0, 1, "p", i) for i in range(6)]
    assert max(seeds) >= 2**63
    requests = [
        Request(PROMPT, seeds),
        Request([7, 15], seeds[:2], 3),
        Request([9, 12, 9, 12, 15], seeds[3:]),
    ]
    engine = HttpEngine(Address.parse(f"{server.url}#tiny"), prompts, 60)
    for sampling in (
        Sampling(1.0, 12),
        Sampling(0.0, 12),
        Sampling(0.7, 12, 0.9),
        Sampling(1.0, 12, 1.0, 3, 0.1),
    ):
        ours = engine.generate(requests, sampling)
        assert same_completions(ours, native.generate(requests, sampling), 1e-5), sampling
    assert engine.takes_ids
    assert engine.max_context == 512
    assert {c.tokens[-1] == END for g in ours for c in g} == {True, False}


def test_our_chat_client_and_its_errors(server, native, prompts):
    chat = HttpChat(Address.parse(f"{server.url}#tiny"), 60)
    short, long = ([{"role": "user", "content": text}] for text in ("1+2=", "1" * 600))
    assert chat.reply([short], Sampling(0.0, 6), [1]) == [said(native, prompts, 1, 6, 0.0)[1]]
    assert "400" in chat.reply([long], Sampling(0.0, 6), [1])[0].reason
    with refused("unknown_name", f"{server.url}", shows=r"tinny; did you mean tiny\?"):
        HttpChat(Address.parse(f"{server.url}#tinny"), 60)

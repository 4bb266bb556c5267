"""`echo` of /v1/completions: the prompt with its log-probs, as evaluation harnesses read them."""

import threading

import pytest
import torch
from tables import tabled
from tiny_runs import stock_model

from postgrad.serving.model_text import ModelText

PROMPT = [1, 10, 2, 15]  # "1+2="


def exact_logprobs(tiny, ids, temperature=1.0):
    """Log-probs (tokens, vocabulary) after each token, by the stock transformers model."""
    with torch.no_grad():
        logits = stock_model(tiny)(input_ids=torch.tensor([ids])).logits[0]
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_prompt_logprobs_are_those_of_the_stock_model(client, tiny, temperature):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "logprobs": 3, "echo": True}
    ids = {"return_token_ids": True}
    answer = client.completions.create(**asked, temperature=temperature, extra_body=ids)
    choice = answer.choices[0]
    sampled = choice.token_ids
    ids = [*PROMPT, *sampled]
    exact = exact_logprobs(tiny, ids, temperature or 1.0)
    given = choice.logprobs
    assert given.token_logprobs[0] is None and given.top_logprobs[0] is None
    for i in range(1, len(ids)):
        logprob = given.token_logprobs[i]
        assert logprob == pytest.approx(float(exact[i - 1, ids[i]]), abs=1e-4)
        top = sorted(exact[i - 1].tolist(), reverse=True)[:3]
        assert sorted(given.top_logprobs[i].values(), reverse=True)[:3] == pytest.approx(
            top, abs=1e-4
        )
        assert given.top_logprobs[i][given.tokens[i]] == logprob
    assert answer.usage.prompt_tokens == 4 and answer.usage.completion_tokens == len(sampled)
    # Offsets point into the text: from one to the next is the token's text.
    assert choice.text.startswith("1+2=")
    assert given.text_offset[:4] == [0, 1, 2, 3] and given.text_offset[4] == 4


def test_the_request_of_lm_evaluation_harness_is_answered(server, tiny):
    """The body that lm_eval's local-completions sends, and how it reads the answer."""
    prompts = [[1, 10, 2, 15, 3], [2, 10, 2, 15, 4, 5]]
    context_lengths = [4, 4]
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1}
    body |= {"logprobs": 1, "seed": 1234, "echo": True}
    status, answer, _ = server.ask("/v1/completions", body)
    assert status == 200
    for choice, ids, start in zip(answer["choices"], prompts, context_lengths, strict=True):
        exact = exact_logprobs(tiny, ids)
        continuation = range(start, len(ids))
        total = sum(choice["logprobs"]["token_logprobs"][start:-1])
        assert total == pytest.approx(
            float(sum(exact[i - 1, ids[i]] for i in continuation)), abs=1e-4
        )
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        values = choice["logprobs"]["token_logprobs"][start:-1]
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        assert is_greedy == all(int(exact[i - 1].argmax()) == ids[i] for i in continuation)


def test_an_echo_may_have_no_new_tokens_and_may_be_streamed(client):
    whole = client.completions.create(
        model="tiny", prompt="1+2=", max_tokens=0, logprobs=0, echo=True
    )
    choice = whole.choices[0]
    assert choice.text == "1+2=" and choice.finish_reason == "length"
    assert len(choice.logprobs.token_logprobs) == 4 and whole.usage.completion_tokens == 0
    chunks = client.completions.create(
        model="tiny", prompt="1+2=", max_tokens=3, seed=5, echo=True, stream=True
    )
    plain = client.completions.create(model="tiny", prompt="1+2=", max_tokens=3, seed=5)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == "1+2=" + plain.choices[0].text


def test_long_echoes_do_not_hold_up_the_event_loop(server, monkeypatch):
    """Prompt and log-probs are decoded token by token, in a thread of their own."""
    threads: set[str] = set()

    def noted(served, token):
        threads.add(threading.current_thread().name)
        return real(served, token)

    real = ModelText.token_text
    monkeypatch.setattr(ModelText, "token_text", noted)
    body = {"model": "tiny", "prompt": "1+2=", "max_tokens": 2, "logprobs": 1, "echo": True}
    assert server.ask("/v1/completions", body)[0] == 200
    assert threads and all("AnyIO" in name for name in threads)


def test_no_new_tokens_need_echo(server):
    status, answer, _ = server.ask(
        "/v1/completions", {"model": "tiny", "prompt": "1+2=", "max_tokens": 0}
    )
    assert status == 400 and answer["error"]["param"] == "max_tokens"


# ---- tokens in, tokens out


def test_generate_takes_and_returns_tokens(server, tiny):
    """The request of verifiers and prime-rl, and the parts of the response that they check."""
    params = {"temperature": 1.0, "max_tokens": 6, "seed": 3, "logprobs": 1}
    more = {"stop_token_ids": [], "skip_special_tokens": False, "routed_experts_prompt_start": 3}
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": params | more}
    status, answer, _ = server.ask("/inference/v1/generate", body)
    assert status == 200
    choice = answer["choices"][0]
    exact = exact_logprobs(tiny, [*PROMPT, *choice["token_ids"]])
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    for i, (token, entry) in enumerate(
        zip(choice["token_ids"], choice["logprobs"]["content"], strict=True)
    ):
        assert entry["token"] == f"token_id:{token}"
        assert entry["logprob"] == pytest.approx(float(exact[3 + i, token]), abs=1e-4)
    first = choice["token_ids"][0]
    status, answer, _ = server.ask(
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": params | {"stop_token_ids": [first]}},
    )
    assert answer["choices"][0]["token_ids"] == [first]
    assert answer["choices"][0]["finish_reason"] == "stop"


@tabled("change, param")
def test_wrong_fields_of_generate_are_refused(server, change, param):
    status, answer, _ = server.ask("/inference/v1/generate", {"token_ids": PROMPT} | change)
    assert status == 400 and answer["error"]["param"] == param

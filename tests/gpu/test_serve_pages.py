"""`postgrad serve` on a GPU: requests decode over pages, in captured graphs."""

import json
import socket
import threading

import pytest
import torch
from llama import make_llama
from recording_decoder import nothing_is_lost

from postgrad.rollout.engine import Request, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CLIENTS = 64
LIMIT = 60
TIE = 1e-3  # log-probs closer than this are equal up to rounding


def prompt_of(client: int) -> list[int]:
    return [(7 * i * (client + 1)) % 2000 + 20 for i in range(3 + 5 * (client % 30))]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from serve_process import live

    folder = make_llama(tmp_path_factory.mktemp("llama") / "llama", 3.0)
    with live(folder, device="cuda", rows=48) as running:
        yield running


def store_of(server):
    from postgrad.rollout.native.store_pages import PageStore

    store = server.served.worker._scheduler.store
    assert isinstance(store, PageStore)
    return store


def ask_all(server, bodies, num_top=0):
    """Return the choice of each client; most likely tokens are sampled outside of whole graphs."""
    answers = {}

    def ask(client, body):
        fixed = {"model": "tiny", "return_token_ids": True, "logprobs": num_top}
        status, answer, _ = server.ask("/v1/completions", fixed | body)
        assert status == 200, answer
        answers[client] = answer["choices"][0]

    threads = [threading.Thread(target=ask, args=item) for item in bodies.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == len(bodies)
    return answers


def stock_logprobs(model, prompt, tokens, temperature=1.0):
    """Return the log-probs (tokens, vocabulary) of the stock model before each token."""
    ids = torch.tensor([[*prompt, *tokens]], device="cuda")
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1).cpu()


def test_greedy_answers_of_64_clients_are_those_of_the_plain_path(server):
    """Each token is the plain path's, or one that is as likely up to rounding."""
    bodies = {
        client: {"prompt": prompt_of(client), "max_tokens": LIMIT, "temperature": 0}
        for client in range(CLIENTS)
    }
    answers = ask_all(server, bodies)
    engine = server.served.worker.engine
    assert nothing_is_lost(store_of(server).pool)
    assert engine.decoder.captures and sorted(engine.decoder.graphs) == [8, 16, 32, 64]
    assert engine.decoder.prefill_graph is not None
    num_equal = 0
    for client, choice in answers.items():
        logprobs = stock_logprobs(engine.model, prompt_of(client), choice["token_ids"])
        chosen = logprobs.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
        assert (logprobs.max(-1).values - chosen).max() < TIE
        reported = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(reported, chosen, rtol=0, atol=TIE)
        num_equal += torch.equal(logprobs.argmax(-1), torch.tensor(choice["token_ids"]))
    assert num_equal > CLIENTS // 2


def test_sampled_answers_with_seeds_and_filters_are_those_of_generate(server):
    """Filters and temperatures of requests that decode together do not touch each other."""
    kinds = [{}, {"temperature": 0.7}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.2}]
    bodies = {
        client: {"prompt": prompt_of(client), "max_tokens": 20, "seed": client}
        | kinds[client % len(kinds)]
        for client in range(CLIENTS)
    }
    answers = ask_all(server, bodies, num_top=2)
    engine = server.served.worker.engine
    num_equal = 0
    for client, choice in answers.items():
        kind = {"temperature": 1.0} | kinds[client % len(kinds)]
        tokens = choice["token_ids"]
        logprobs = stock_logprobs(engine.model, prompt_of(client), tokens, kind["temperature"])
        chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        reported = torch.tensor(choice["logprobs"]["token_logprobs"])
        torch.testing.assert_close(reported, chosen, rtol=0, atol=TIE)
        if top_k := kind.get("top_k"):
            least = logprobs.topk(top_k).values[:, -1]
            assert (chosen > least - TIE).all(), "every token is one of the k most likely"
        if min_p := kind.get("min_p"):
            largest = logprobs.max(-1).values
            assert (chosen.exp() > min_p * largest.exp() - TIE).all()
        if top_p := kind.get("top_p"):
            more_likely = torch.where(logprobs > chosen[:, None] + TIE, logprobs.exp(), 0.0).sum(-1)
            assert (more_likely < top_p + TIE).all()
        num_equal += tokens == plain_tokens(engine, client, kind, len(tokens))
    assert num_equal > 0.8 * CLIENTS, "rounding at a boundary is rare"


def plain_tokens(engine, client, kind, length):
    """Return the tokens of the engine over slots with the same seed."""
    decoder = engine.decoder
    engine.decoder = None
    try:
        request = Request(prompt_of(client), [client], 20)
        tokens = engine.generate([request], Sampling(max_new_tokens=20, **kind))[0][0].tokens
    finally:
        engine.decoder = decoder
        engine.model.eval()
    return tokens[:length]


def test_a_prompt_in_several_passes_has_the_log_probs_of_one(server, monkeypatch):
    from postgrad.rollout.native import prefill

    prompt = [(7 * i) % 2000 + 20 for i in range(1500)]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "echo": True, "n": 2}
    whole = ask_all(server, {0: body})[0]
    passes: list[int] = []
    prefill_pass = prefill._prefill_pass

    def counted(decoder, spans):
        passes.append(sum(len(span.tokens) for span in spans))
        prefill_pass(decoder, spans)

    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 256)
    monkeypatch.setattr(prefill, "_prefill_pass", counted)
    parts = ask_all(server, {0: body})[0]
    assert passes == [256] * 5 + [219], "the prompt without its last token, once for two samples"
    one, several = (choice["logprobs"]["token_logprobs"][1:1500] for choice in (whole, parts))
    torch.testing.assert_close(torch.tensor(several), torch.tensor(one), rtol=0, atol=TIE)
    engine = server.served.worker.engine
    logprobs = stock_logprobs(engine.model, prompt, parts["token_ids"])
    chosen = logprobs.gather(1, torch.tensor(parts["token_ids"])[:, None])[:, 0]
    assert (logprobs.max(-1).values - chosen).max() < TIE


def test_a_client_that_leaves_frees_its_pages(server):
    body = {"model": "tiny", "prompt": [20] * 100, "max_tokens": 1800, "temperature": 1.0}
    data = json.dumps(body | {"stream": True, "n": 8}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    from serve_process import wait_for

    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        assert b"200 OK" in connection.recv(1000)
        wait_for(lambda: server.rows() > 0, "rows to decode")
    wait_for(lambda: server.rows() == 0, "the rows to be freed")
    store = store_of(server)
    assert nothing_is_lost(store.pool)
    assert sorted(store.free_slots) == list(range(store.capacity))
    short = {"model": "tiny", "prompt": [20] * 100, "max_tokens": 5, "temperature": 0}
    assert server.ask("/v1/completions", short)[0] == 200

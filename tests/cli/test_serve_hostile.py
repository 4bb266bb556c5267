"""`postgrad serve` with huge, malformed, slow and unauthorized requests; weight reloads."""

import http.client
import json
import shutil
import socket
import time

import openai
import pytest
from safetensors.torch import load_file, save_file
from serve_process import live
from starlette.testclient import TestClient
from tables import tabled
from tiny_runs import config_of
from waiting import in_threads, join, wait_for

from postgrad.cluster.host import build_host
from postgrad.data.encode.encoder import Encoder
from postgrad.model.load.tiny import make_tiny
from postgrad.net import server as net_server
from postgrad.rollout.engine import Request, Sampling
from postgrad.serving import app as app_module
from postgrad.serving import http as http_module

TOKEN = "a-secret-word"


GOOD = {"model": "tiny", "prompt": "1+2=", "max_tokens": 3}


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 3}


@pytest.fixture(scope="module")
def server(tiny):
    with live(tiny, token=TOKEN) as running:
        yield running


def post(server, body, path="/v1/completions", **headers):
    return server.ask(
        path, body, {name.replace("_", "-"): value for name, value in headers.items()}
    )


def assert_refused(answer, status, says="", param=None):
    """Check the status and OpenAI's shape of an error; the message contains `says`."""
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert says in error["message"], error
    assert "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param, error


# ---- invalid requests


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b"",
        b"[" * 200_000,
        b'{"model": "tiny", "prompt": ' + b'{"a":' * 50_000,
        b'{"model": "tiny", "prompt": [1], "temperature": NaN}',
        b'{"model": "tiny", "prompt": [1], "seed": ' + b"9" * 5000 + b"}",
        b"[1]",
    ],
)
def test_bodies_that_are_not_a_json_object_are_refused(server, body):
    assert_refused(post(server, body), 400, "JSON")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [18]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["1"] * 300}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 509}, "prompt"),
        ({"prompt": [1] * 512}, "prompt"),
        ({"temperature": 1e-30}, "temperature"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": "a" * 257}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"a" * 500: 1}, "a" * 80),
    ],
)
def test_completions_with_a_wrong_field_are_refused(server, change, param):
    """Wrong types and bounds are in test_serve_fields.py."""
    assert_refused(post(server, GOOD | change), 400, param=param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", GOOD | {"prompt": "\ud83d"}),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"\ude00": 1}}),
        ("/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": "\ud83d"}]}),
    ],
)
def test_half_of_a_character_is_refused(server, path, body):
    """JSON can write one half of a surrogate pair, which no tokenizer and no response can."""
    assert_refused(post(server, body, path), 400, "half of a character")
    whole = json.dumps(GOOD | {"user": "\U0001f600"})
    assert "\\ud83d\\ude00" in whole
    assert post(server, whole.encode())[0] == 200


def test_errors_suggest_the_nearest_name(server):
    assert_refused(post(server, GOOD | {"temprature": 1}), 400, "did you mean temperature?")
    assert_refused(server.ask("/v1/models/tinny"), 404, "did you mean tiny?", "model")


@pytest.mark.parametrize("name", ["gpt-4", "", None, "a" * 1000])
def test_a_server_of_one_model_answers_to_any_name(server, name):
    status, body, _ = post(server, GOOD | {"model": name})
    assert status == 200 and body["model"] == "tiny"
    assert post(server, CHAT | {"model": name}, "/v1/chat/completions")[0] == 200
    assert post(server, {"model": name, "input": "1"}, "/v1/responses")[0] == 200


@pytest.mark.slow
def test_a_server_of_two_models_needs_a_known_name(tiny):
    with live(tiny, other=tiny) as two:
        assert two.ask("/v1/completions", GOOD | {"model": "other"})[1]["model"] == "other"
        unknown = two.ask("/v1/completions", GOOD | {"model": "tinny"})
        assert_refused(unknown, 404, "did you mean tiny?", "model")
        with (
            openai.OpenAI(base_url=two.url, api_key="none", max_retries=0) as client,
            pytest.raises(openai.NotFoundError) as refused,
        ):
            client.completions.create(**GOOD | {"model": "gpt-4"})
        assert refused.value.code == "model_not_found"


@tabled("change, param")
def test_chats_with_a_wrong_field_are_refused(server, change, param):
    assert_refused(post(server, CHAT | change, "/v1/chat/completions"), 400, param=param)


@tabled("path, body, param, says")
def test_errors_name_the_fields_of_the_request_and_no_path(server, tiny, path, body, param, says):
    answer = post(server, {"model": "tiny"} | body, f"/v1/{path}")
    assert_refused(answer, 400, says, param)
    assert str(tiny) not in answer[1]["error"]["message"]


def test_statuses_reach_the_official_client_as_its_own_errors(server):
    with openai.OpenAI(base_url=server.url, api_key=TOKEN, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="exceed the context") as refused:
            client.chat.completions.create(**CHAT | {"max_tokens": 1000})
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_who_may_come_in(server):
    assert server.ask("/health", headers={"Authorization": ""})[0] == 200
    refused = ("", "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xe4")
    for wrong in (*refused, f"Bearer {TOKEN.upper()}", f"bearer{TOKEN}"):
        assert_refused(post(server, GOOD, Authorization=wrong), 401, "token")
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert post(server, GOOD, Authorization=f"{scheme} {TOKEN}")[0] == 200
    assert_refused(post(server, GOOD, Host="evil.example"), 403, "unknown host name")
    assert_refused(post(server, GOOD, Origin="http://evil.example"), 403, "another origin")
    assert_refused(post(server, GOOD, Sec_Fetch_Site="cross-site"), 403, "another site")
    assert (
        post(
            server, GOOD, Host=f"localhost:{server.port}", Origin=f"http://localhost:{server.port}"
        )[0]
        == 200
    )
    assert_refused(post(server, GOOD, Content_Type="text/plain"), 400, "send JSON")
    assert post(server, GOOD, Content_Type="Application/JSON; charset=UTF-8")[0] == 200


def test_a_server_for_other_machines_has_any_name_for_clients_with_the_token():
    """Machines have names that they do not know: of a cluster, a container or a proxy."""
    key = {"Authorization": f"Bearer {TOKEN}"}
    name = {"Host": "gpu1.cluster.example:8000"}
    client = TestClient(app_module.make_app([], "0.0.0.0", TOKEN))
    assert client.get("/v1/models", headers=name | key).status_code == 200
    for wrong in ({}, {"Authorization": "Bearer wrong"}):
        assert client.get("/v1/models", headers=name | wrong).status_code == 403
    assert client.get("/health", headers=name).status_code == 403
    foreign = name | key | {"Origin": "http://evil.example"}
    assert client.get("/v1/models", headers=foreign).status_code == 403
    open_app = TestClient(app_module.make_app([], "0.0.0.0"))
    assert open_app.get("/v1/models", headers=name | key).status_code == 403


def test_paths_and_methods(server):
    assert_refused(post(server, GOOD, "/v1/embeddings"), 404, "no /v1/embeddings here")
    assert_refused(server.ask("/"), 404, "no / here")
    assert_refused(server.ask("/v1/completions"), 405, "Method Not Allowed")
    assert_refused(server.ask("/v1/models/other"), 404, "no model 'other'")
    assert server.ask("/v1/models/tiny")[1]["max_model_len"] == 512
    assert_refused(post(server, {"folder": "/"}, "/v1/reload"), 403, "start it with --reload-below")


# ---- huge and slow


LONG = "1+2=" * 3000  # more than 16 characters per token of the context of 512


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": LONG}, "prompt"),
        ("completions", {"prompt": ["1", LONG]}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"a": [LONG]}}, "messages"),
        ("chat/completions", CHAT | {"chat_template_kwargs": {LONG: 1}}, "messages"),
        (
            "chat/completions",
            CHAT | {"tools": [{"function": {"name": "look", "description": LONG}}]},
            "messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": LONG}}]}]},
            "messages",
        ),
        ("responses", {"input": LONG}, "input"),
        ("responses", {"input": "1", "instructions": LONG}, "input"),
    ],
)
def test_a_prompt_of_too_many_characters_is_refused_before_it_is_encoded(
    server, monkeypatch, path, body, param
):
    encoded = []
    monkeypatch.setattr(Encoder, "prompt", lambda self, problem: encoded.append(problem) or [1])
    monkeypatch.setattr(Encoder, "text", lambda self, problem: encoded.append(problem) or "")
    answer = post(server, {"model": "tiny"} | body, f"/v1/{path}")
    assert_refused(answer, 400, "characters exceeds the context of 512 tokens", param)
    assert answer[1]["error"]["code"] == "context_length_exceeded"
    assert all(LONG not in str(problem) for problem in encoded)


def test_requests_take_turns_prompt_by_prompt_and_gone_clients_give_up_theirs(server, monkeypatch):
    order: list[str] = []
    encode = server.served.encode

    def slow(request, prompt):
        order.append(prompt)
        time.sleep(0.05)
        return encode(request, prompt)

    monkeypatch.setattr(server.served, "encode", slow)
    many = GOOD | {"prompt": [f"{i}" for i in range(1, 9)] * 30}  # 12 seconds
    gone = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    gone.request("POST", "/v1/completions", json.dumps(many), headers)
    wait_for(lambda: len(order) > 2, "the first prompts")
    assert post(server, GOOD)[0] == 200
    assert len(order) < 200, "the other prompts of the first request wait for their turns"
    gone.close()
    wait_for(lambda: post(server, GOOD)[0] == 200 and order[-2:] == ["1+2="] * 2, "the end")
    assert len(order) < 240


def head(length, more=""):
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\n{length}\r\n{more}\r\n"
    ).encode()


def read_all(connection):
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def test_huge_bodies_are_refused_unread(server):
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head("Content-Length: 9000000000"))
        assert b"413" in read_all(connection).split(b"\r\n")[0], "and the connection is closed"
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head("Transfer-Encoding: chunked"))
        try:
            for _ in range(200):
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        except OSError:
            pass
        else:
            assert b"413" in connection.recv(100)
    assert post(server, GOOD)[0] == 200


@pytest.mark.slow
def test_slow_bodies_and_slow_headers_are_not_waited_for(server, monkeypatch):
    monkeypatch.setattr(http_module, "BODY_S", 0.3)
    monkeypatch.setattr(net_server, "HEADER_TIMEOUT_S", 0.3)
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(head("Content-Length: 100") + b'{"model"')
        answer = read_all(connection)
        assert b"408" in answer.split(b"\r\n")[0] and b"did not arrive within 0.3 s" in answer
    for first in (b"", b"POST /v1/compl", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            connection.sendall(first)
            assert read_all(connection) == b""


def test_a_hundred_idle_connections_do_not_keep_others_out(server):
    idle = [socket.create_connection(("127.0.0.1", server.port), 60) for _ in range(100)]
    try:
        for connection in idle:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert post(server, GOOD)[0] == 200
    finally:
        for connection in idle:
            connection.close()


def test_garbage_is_not_http(server):
    for garbage in (
        b"\x16\x03\x01\x02\x00\x01\x00" * 9,
        b"GET\r\n\r\n",
        b"A" * 100_000 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
            try:
                connection.sendall(garbage)
                assert b"400" in read_all(connection)[:20]
            except ConnectionResetError:
                pass
    assert post(server, GOOD)[0] == 200


# ---- new weights


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_new_weights_that_are_not_numbers_are_refused(tiny, tmp_path, value):
    broken = shutil.copytree(tiny, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    last = sorted(tensors)[-1]
    tensors[last].view(-1)[-1] = value
    save_file(tensors, broken / "model.safetensors")
    with live(tiny, reload_below=tmp_path) as server:
        before = post(server, GOOD | {"temperature": 0})[1]["choices"]
        assert_refused(post(server, {"folder": "broken"}, "/v1/reload"), 400, last, "folder")
        assert server.ask("/health")[1]["models"]["tiny"]["version"] == 0
        assert post(server, GOOD | {"temperature": 0})[1]["choices"] == before


@pytest.mark.slow
def test_new_weights_come_from_below_the_allowed_folder_only(tiny, tmp_path):
    below = tmp_path / "allowed"
    other = make_tiny(below / "other", seed=5, layers=2, width=32)
    wide = make_tiny(below / "wide", seed=5, layers=2, width=64)
    secret = shutil.copytree(other, tmp_path / "secret")
    (below / "link").symlink_to(secret)
    (below / "files").mkdir()
    (below / "files" / "model.safetensors").symlink_to(secret / "model.safetensors")
    (below / "empty").mkdir()
    (below / "torn").mkdir()
    (below / "torn" / "model.safetensors").write_bytes(
        (other / "model.safetensors").read_bytes()[:1000]
    )
    ask = {"model": "tiny", "prompt": [1, 10, 2, 15], "max_tokens": 10}
    ask |= {"temperature": 0, "return_token_ids": True}
    truth = []
    for folder in (tiny, other):
        engine = build_host(config_of("grpo", folder)).engine
        groups = engine.generate([Request([1, 10, 2, 15], [0])], Sampling(0.0, 10))
        truth.append(groups[0][0].tokens)
    assert truth[0] != truth[1]
    with live(tiny, reload_below=below) as server:
        reload = lambda folder: post(server, {"folder": str(folder)}, "/v1/reload")  # noqa: E731
        said = lambda: post(server, ask)[1]["choices"][0]["token_ids"]  # noqa: E731
        for folder, status, says in (
            (secret, 403, "outside"),
            (below / "link", 403, "outside"),
            ("link", 403, "outside"),
            ("../secret", 403, "outside"),
            (below / "files", 403, "outside"),
            ("nowhere", 400, "does not exist"),
            ("empty", 400, "no .safetensors file"),
            ("a\0b", 400, "does not exist"),
            (wide, 400, "has the shape"),
            ("torn", 400, "cannot be read"),
        ):
            assert_refused(reload(folder), status, says)
        assert_refused(post(server, {"folder": 3}, "/v1/reload"), 400, param="folder")
        assert_refused(post(server, {}, "/v1/reload"), 400, param="folder")
        assert_refused(post(server, [1], "/v1/reload"), 400)
        assert_refused(
            post(server, {"folder": "other", "model": "x"}, "/v1/reload"), 404, "no model 'x'"
        )
        assert said() == truth[0], "refused weights change nothing"
        found = []
        again = ask | {"n": 1, "seed": 1}
        threads = in_threads(*[lambda: found.append(post(server, again))] * 4)
        status, answer, _ = reload("other")
        join(threads)
        assert status == 200 and answer["version"] == 1 and answer["num_tensors"] > 5
        assert all(answer[1]["choices"][0]["token_ids"] in truth for answer in found), (
            "never half of the one and half of the other"
        )
        assert said() == truth[1] and server.ask("/health")[1]["models"]["tiny"]["version"] == 1
        assert reload(other)[0] == 200, "an absolute path below the folder is one, too"

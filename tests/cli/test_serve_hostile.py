"""`postgrad serve` with huge, malformed, slow and unauthorized requests; weight reloads."""

import json
import os
import shutil
import signal
import socket
import threading
import urllib.request
from random import Random

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_process import live, wait_for
from tiny_runs import config_of, postgrad
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from postgrad import web
from postgrad.cli import serve as command_line
from postgrad.cli.main import main
from postgrad.cluster.host import build_host
from postgrad.model.tiny import make_tiny
from postgrad.rollout.engine import Request, Sampling
from postgrad.rollout.native.jobs import LiveJob
from postgrad.rollout.served_path import parse_served_path
from postgrad.rollout.stops import StopStrings
from postgrad.serving import app as app_module
from postgrad.serving import servers_file, vllm_server
from postgrad.serving.detokenizer import Detokenizer, raw_bytes
from postgrad.serving.model_text import ModelText
from postgrad.serving.options import ServeOptions
from postgrad.serving.requests import parse_request
from postgrad.serving.responses import ResponseBuilder
from postgrad.serving.worker import RowUpdate

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
        ({"model": 3}, "model"),
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
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": 1e-30}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": "a" * 257}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": 3}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": 3, "stream": True}, "stream_options"),
        ({"echo": 1}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"temprature": 1}, "temprature"),
        ({"a" * 500: 1}, "a" * 80),
    ],
)
def test_completions_with_a_wrong_field_are_refused(server, change, param):
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
    unknown = post(server, GOOD | {"model": "tinny"})
    assert_refused(unknown, 404, "did you mean tiny?", "model")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}] * 1001}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "messages"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"prompt": "a"}, "prompt"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_chats_with_a_wrong_field_are_refused(server, change, param):
    assert_refused(post(server, CHAT | change, "/v1/chat/completions"), 400, param=param)


def test_neutral_values_of_unsupported_fields_are_accepted(server):
    neutral = {
        "echo": False,
        "best_of": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "suffix": None,
        "user": "x",
    }
    assert post(server, GOOD | neutral)[0] == 200
    assert (
        post(
            server,
            CHAT | {"tools": None, "response_format": {"type": "text"}},
            "/v1/chat/completions",
        )[0]
        == 200
    )


def test_statuses_reach_the_official_client_as_its_own_errors(server):
    with openai.OpenAI(base_url=server.url, api_key=TOKEN, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="exceed the context") as refused:
            client.chat.completions.create(**CHAT | {"max_tokens": 1000})
        assert refused.value.code == "context_length_exceeded" and refused.value.param == "messages"
        with pytest.raises(openai.NotFoundError) as refused:
            client.completions.create(**GOOD | {"model": "gpt-4"})
        assert refused.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_who_may_come_in(server):
    assert server.ask("/health", headers={"Authorization": ""})[0] == 200
    for wrong in ("", "Bearer wrong", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer \xe4"):
        assert_refused(post(server, GOOD, Authorization=wrong), 401, "token")
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


def test_paths_and_methods(server):
    assert_refused(post(server, GOOD, "/v1/embeddings"), 404, "no /v1/embeddings here")
    assert_refused(server.ask("/"), 404, "no / here")
    assert_refused(server.ask("/v1/completions"), 405, "Method Not Allowed")
    assert_refused(server.ask("/v1/models/other"), 404, "no model 'other'")
    assert server.ask("/v1/models/tiny")[1]["max_model_len"] == 512
    assert_refused(post(server, {"folder": "/"}, "/v1/reload"), 403, "start it with --reload-below")


# ---- huge and slow


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
    monkeypatch.setattr(app_module, "BODY_S", 0.3)
    monkeypatch.setattr(web, "HEADER_TIMEOUT_S", 0.3)
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
    ask = {
        "model": "tiny",
        "prompt": [1, 10, 2, 15],
        "max_tokens": 10,
        "temperature": 0,
        "return_token_ids": True,
    }
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
        streams = [
            threading.Thread(target=lambda: found.append(post(server, ask | {"n": 1, "seed": 1})))
            for _ in range(4)
        ]
        for thread in streams:
            thread.start()
        status, answer, _ = reload("other")
        for thread in streams:
            thread.join()
        assert status == 200 and answer["version"] == 1 and answer["num_tensors"] > 5
        assert all(answer[1]["choices"][0]["token_ids"] in truth for answer in found), (
            "never half of the one and half of the other"
        )
        assert said() == truth[1] and server.ask("/health")[1]["models"]["tiny"]["version"] == 1
        assert reload(other)[0] == 200, "an absolute path below the folder is one, too"


# ---- arguments, mapping, tokens


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], "MODEL"),
        (["tiny", "--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["tiny", "--port"], "--port: "),
        (["tiny", "--port", "70000"], "--port: 70000"),
        (["tiny", "--engine", "vlm"], "--engine: "),
        (["tiny", "--queue", "-1"], "--queue: -1"),
        (["tiny", "--name", "a,b"], "--name: "),
        (["tiny", "tiny"], "--name: "),
        (["tiny", "--token-file", "/no/such"], "--token-file /no/such cannot be read"),
        (["tiny", "--reload-below", "/no/such"], "--reload-below /no/such: no such folder"),
        (["tiny", "--servers", "/no/such/servers.json"], "cannot be written"),
        (["/no/such/model", "--port", "0"], "no such folder"),
        (["tiny", "--port", "0", "--context", "513"], "--context 513 is more than the model's 512"),
        (["tiny", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(overrides, says, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    assert main(["serve", *(overrides or ["--port=0"])]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error


def test_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "tiny", "--port", str(port)]) == 2
        assert (
            f"cannot listen on 127.0.0.1 port {port}: Address already in use"
            in capsys.readouterr().err
        )
        assert main(["serve", "tiny", "--engine", "vllm", "--port", str(port)]) == 2


def test_a_mapping_is_shared_and_each_server_takes_its_own_entries_away(tmp_path):
    file = tmp_path / "servers.json"
    one = {"a": servers_file.make_entry("127.0.0.1", 8000, "a", 0, "/models/a")}
    two = {
        "b": servers_file.make_entry("0.0.0.0", 8001, "b", 0, "org/b"),
        "c": servers_file.make_entry("0.0.0.0", 8001, "c", 1, "org/c"),
    }
    with servers_file.list_servers(file, one):
        with servers_file.list_servers(file, two):
            assert parse_served_path(f"{file}#a") == ("http://127.0.0.1:8000/v1#a", "/models/a")
            assert parse_served_path(f"{file}#c") == ("http://127.0.0.1:8001/v1#c", "org/c")
            entry = json.loads(file.read_text())["b"]
            assert {
                "outward_host",
                "local_host",
                "port",
                "served_model_name",
                "model_index",
                "status",
            } <= set(entry)
            assert entry["status"] == "running" and entry["outward_host"] == socket.gethostname()
        assert set(json.loads(file.read_text())) == {"a"}
        newer = {"a": servers_file.make_entry("127.0.0.1", 9000, "a", 0, "/models/a")}
        with servers_file.list_servers(file, newer):
            pass
        assert json.loads(file.read_text()) == {}
    assert json.loads(file.read_text()) == {}, (
        "an entry that another server took over is not touched"
    )

    def name(i):
        with servers_file.list_servers(
            file, {f"m{i}": servers_file.make_entry("127.0.0.1", i, "m", 0, "t")}
        ):
            all_listed.wait(300)
            seen.append(set(json.loads(file.read_text())))
            all_read.wait(300)

    seen: list[set[str]] = []
    all_listed, all_read = threading.Barrier(8), threading.Barrier(8)
    threads = [threading.Thread(target=name, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(file.read_text()) == {}
    assert seen == [{f"m{i}" for i in range(8)}] * 8


# ---- vLLM


def test_without_vllm_one_clear_line(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve", "tiny", "--engine", "vllm", "--port", "0"]) == 2
    assert (
        "--engine vllm needs vLLM, which is not installed: pip install vllm"
        in capsys.readouterr().err
    )


STAND_IN = """
import http.server, json, os, sys
arguments = sys.argv[1:]
open(os.environ["SAID"], "w").write(json.dumps([arguments, os.environ.get("VLLM_API_KEY")]))
if "broken" in arguments[1]:
    sys.exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): ...
host = arguments[arguments.index("--host") + 1]
port = int(arguments[arguments.index("--port") + 1])
http.server.HTTPServer((host, port), Handler).serve_forever()
"""


REGISTRY = """
class ModelRegistry:
    def get_supported_archs():
        print("a line of its own")
        return {"Qwen3ForCausalLM", "LlamaForCausalLM"}
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package that takes vLLM's place; `said.json` holds its arguments and its key."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "main.py").write_text(STAND_IN)
    (tmp_path / "vllm" / "__init__.py").write_text(REGISTRY)
    (tmp_path / "vllm" / "platforms.py").write_text(
        "import os\nclass current_platform:\n    device_type = os.environ['RUNS_ON']\n"
    )
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("SAID", str(tmp_path / "said.json"))
    monkeypatch.setenv("RUNS_ON", "cpu")
    return tmp_path / "said.json"


def test_vllm_server_is_a_child_with_our_arguments_and_token_and_ends_with_us(
    stand_in, tmp_path, capfd
):
    """A stand-in gets the options and the token; real vLLM is tested by test_vllm_serve.py."""
    servers = tmp_path / "servers.json"
    (tmp_path / "token").write_text("long-enough\n")
    overrides = [
        "serve",
        "org/model",
        "--engine",
        "vllm",
        "--port",
        "0",
        "--name",
        "m",
        "--token-file",
        str(tmp_path / "token"),
        "--servers",
        str(servers),
        "--rows",
        "32",
        "--context",
        "1024",
    ]
    found: list[tuple[str, str]] = []

    def stop_when_ready():
        wait_for(lambda: servers.exists() and "m" in json.loads(servers.read_text()), "the mapping")
        found.append(parse_served_path(f"{servers}#m"))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_ready, daemon=True).start()
    assert main(overrides) == 0 and json.loads(servers.read_text()) == {}
    arguments, token = json.loads(stand_in.read_text())
    assert (
        token == "long-enough"
        and "long-enough" not in arguments
        and arguments[:2] == ["serve", "org/model"]
    )
    port = int(arguments[arguments.index("--port") + 1])
    assert (
        found == [(f"http://127.0.0.1:{port}/v1#m", "org/model")]
        and f"m: http://127.0.0.1:{port}/v1" in capfd.readouterr().out
    )
    for pair in (
        ("--served-model-name", "m"),
        ("--host", "127.0.0.1"),
        ("--generation-config", "vllm"),
        ("--logprobs-mode", "processed_logprobs"),
        ("--max-num-seqs", "32"),
        ("--max-model-len", "1024"),
    ):
        assert arguments[arguments.index(pair[0]) + 1] == pair[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_vllm_server_that_cannot_start_is_reported(stand_in, capfd):
    assert main(["serve", "broken", "--engine", "vllm", "--port", "0"]) == 1
    assert "vLLM's server of broken ended with code 3 before it was ready" in capfd.readouterr().err


@pytest.mark.parametrize("key", ["--reload-below", "--queue", "--time-limit", "--threads"])
def test_what_vllm_s_server_has_not_is_refused_with_it(key, stand_in, capsys):
    assert (
        main(
            [
                "serve",
                "org/model",
                "--engine",
                "vllm",
                "--port",
                "0",
                key,
                "/tmp" if key == "--reload-below" else "7",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert error.startswith(f"postgrad: {key} ")
    assert error.count("\n") == 1
    assert not stand_in.exists()


def serve_until_named(overrides, servers, name):
    """Run the command here until its model is in the mapping; the model's address."""
    found: list[str] = []

    def stop_when_ready():
        wait_for(
            lambda: servers.exists() and name in json.loads(servers.read_text()), "the mapping"
        )
        found.append(parse_served_path(f"{servers}#{name}")[0])
        urllib.request.urlopen(found[0].replace(f"/v1#{name}", "/health"), timeout=600).close()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_ready, daemon=True).start()
    assert main(["serve", *overrides, "--port", "0", "--servers", str(servers)]) == 0
    return found[0]


@pytest.mark.slow
def test_the_engine_is_vllm_where_it_can_run_the_model_else_native(stand_in, tiny, tmp_path, capfd):
    servers, broken = tmp_path / "servers.json", shutil.copytree(tiny, tmp_path / "broken")
    serve_until_named([str(tiny), "--name", "m"], servers, "m")
    arguments, _ = json.loads(stand_in.read_text())
    assert arguments[:2] == ["serve", str(tiny)]
    first, second = capfd.readouterr().out.splitlines()[:2]
    assert first.startswith("engine: vllm (")
    assert second.startswith("m: http://127.0.0.1:")
    stand_in.unlink()
    serve_until_named([str(tiny), "--name", "m", "--engine", "native"], servers, "m")
    assert (
        capfd.readouterr().out.startswith(
            "engine: native (--engine native)\nm: 64 rows of 512 tokens"
        )
        and not stand_in.exists()
    )
    serve_until_named([str(broken), "--name", "m"], servers, "m")
    out = capfd.readouterr().out
    assert (
        stand_in.exists()
        and "engine: native (vLLM's server of m ended with code 3 before it was ready" in out
        and "rows of" in out
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"--queue": "7"}, "vLLM's server has no --queue"),
        ({"--reload-below": "/tmp"}, "vLLM's server has no --reload-below"),
        ({"runs_on": "cuda"}, "the installed vLLM runs on cuda, the model on cpu"),
        ({"runs_on": ""}, "the installed vLLM finds no device to run on, the model on cpu"),
        ({"architecture": "OddForCausalLM"}, "vLLM does not know OddForCausalLM"),
        ({"file": "model.gguf"}, "vLLM reads model folders, and this is a GGUF file"),
        ({"file": "adapter"}, "vLLM reads model folders, and this is an adapter"),
        ({"file": "two"}, "several models share one port"),
        ({"package": "gone"}, "vLLM is not installed"),
        ({}, ""),
    ],
)
def test_why_vllm_is_not_taken(change, says, stand_in, tiny, tmp_path, monkeypatch):
    model = shutil.copytree(tiny, tmp_path / "model")
    monkeypatch.setenv("RUNS_ON", change.get("runs_on", "cpu"))
    if "architecture" in change:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(
            json.dumps(config | {"architectures": [change["architecture"]]})
        )
    if change.get("file") == "adapter":
        (model / "config.json").rename(model / "adapter_config.json")
    if "package" in change:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    given = [f"{key}={value}" for key, value in change.items() if key.startswith("--")]
    parsed = vars(command_line.make_parser().parse(["MODEL", "--device=cpu", *given]))
    del parsed["models"]
    options = ServeOptions(**parsed)
    paths = {"model.gguf": [str(tmp_path / "model.gguf")], "two": [str(model), str(tiny)]}.get(
        change.get("file", ""), [str(model)]
    )
    assert vllm_server.why_not(paths, options) == says


def test_a_vllm_that_cannot_even_be_asked_is_not_taken(stand_in, tiny, monkeypatch):
    monkeypatch.delenv("RUNS_ON")  # its import fails now
    reason = vllm_server.why_not([str(tiny)], ServeOptions(device="cpu"))
    assert "the installed vLLM does not start" in reason and "RUNS_ON" in reason


# ---- text from tokens


@pytest.fixture(scope="module")
def byte_tokenizer():
    """One token a byte: every character beyond ASCII is several."""
    alphabet = sorted(ByteLevel.alphabet())
    inner = Tokenizer(BPE({c: i for i, c in enumerate([*alphabet, "<end>"])}, []))
    inner.pre_tokenizer, inner.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


@pytest.mark.slow
@given(
    text=st.text("aé√😀 <\n", min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
def test_pieces_are_the_text_and_no_character_is_halved(byte_tokenizer, text, cuts):
    ids = byte_tokenizer(text)["input_ids"]
    stream, pieces, rest = Detokenizer(byte_tokenizer), [], list(ids)
    for cut in [*cuts, *([1] * len(ids))]:
        if rest:
            now, rest = rest[:cut], rest[cut:]
            pieces.append(stream.push(now, "" if rest else "length"))
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def answer_in_bytes(byte_tokenizer, text, **fields):
    """The choice of a response whose tokens are the bytes of a text, in updates of two tokens."""
    served = ModelText("tiny", byte_tokenizer, {byte_tokenizer.eos_token_id}, 257)
    request = parse_request({"model": "tiny", "logprobs": 1, **fields}, "messages" in fields)
    ids = byte_tokenizer(text)["input_ids"]
    job = LiveJob(Request(byte_tokenizer("é=")["input_ids"], [0]), Sampling())
    job.prompt_logprobs = [-1.0, -1.0]
    job.prompt_top_tokens = [[(0, -1.0)], [(0, -1.0)]]
    builder = ResponseBuilder(request, served, [job])
    for start in range(0, len(ids), 2):
        new = ids[start : start + 2]
        finish = "length" if start + 2 >= len(ids) else ""
        logprobs = [-1.0] * len(new)
        builder.add(RowUpdate(0, 0, new, logprobs, [[(7, -1.0)] for _ in new], finish))
    return builder.complete()["choices"][0]


def test_an_event_of_a_stream_is_one_line_for_every_client():
    """httpx and others split the lines of a text at U+0085, U+2028 and U+2029, too."""
    body = {"text": "a\u0085b\u2028c\u2029d\x0b\x1eé😀"}
    (line,) = app_module.event(body).splitlines()[:-1]
    assert json.loads(line.removeprefix("data: ")) == body


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_tokens_point_into_the_text(byte_tokenizer, echo):
    """A character of several tokens counts once."""
    choice = answer_in_bytes(byte_tokenizer, "a😀é1", prompt="x", echo=echo)
    assert choice["text"] == "é=" * echo + "a😀é1"
    own = [0, 1, 1, 1, 1, 2, 2, 3]
    expected = [0, 0, 1, *[2 + offset for offset in own]] if echo else own
    assert choice["logprobs"]["text_offset"] == expected


def test_bytes_of_tokens_give_the_text(byte_tokenizer):
    """OpenAI's field for characters of several tokens: joined, the bytes are the text."""
    messages = [{"role": "user", "content": "x"}]
    choice = answer_in_bytes(
        byte_tokenizer, "a😀é1", messages=messages, logprobs=True, top_logprobs=1
    )
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "a😀é1"
    assert raw_bytes("<0xE2>") == b"\xe2" and raw_bytes("▁a") == b""


def test_byte_fallback_tokens_that_are_not_utf8_raise_nothing():
    """LLaMA's tokenizers have one token per byte; a model may sample bytes that are no text."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "<unk>": 257}
    inner = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    random = Random(0)
    for _ in range(200):
        ids = [random.randrange(257) for _ in range(random.randint(1, 30))]
        detokenizer = Detokenizer(tokenizer)
        for i, token in enumerate(ids, 1):
            detokenizer.push([token], "length" if i == len(ids) else "")


@given(
    text=st.text("ab</x>é", min_size=1, max_size=20),
    stops=st.lists(st.text("ab</x>é", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_in_tokens_and_in_text(byte_tokenizer, text, stops):
    """The row ends with the first token that completes a stop string; the text ends before it."""
    ids = byte_tokenizer(text)["input_ids"]
    found = StopStrings(byte_tokenizer, stops)
    slow = next(
        (
            n
            for n in range(1, len(ids) + 1)
            if any(s in byte_tokenizer.decode(ids[:n]) for s in stops)
        ),
        0,
    )
    assert next((n for n in range(1, len(ids) + 1) if found.find_end(ids[:n], n - 1)), 0) == slow
    for look in (3, 16):  # an engine that looks seldom finds the same token
        looks = ((seen, min(seen + look, len(ids))) for seen in range(0, len(ids), look))
        assert next((n for seen, now in looks if (n := found.find_end(ids[:now], seen))), 0) == slow
    stream = Detokenizer(byte_tokenizer, stops)
    end = slow or len(ids)
    pieces = [
        stream.push([i], "" if n < end else "stop" if slow else "length")
        for n, i in enumerate(ids[:end], 1)
    ]
    first = min(
        (text.find(s) for s in stops if s in byte_tokenizer.decode(ids[:end])), default=len(text)
    )
    assert "".join(pieces) == text[:first]


def test_help_needs_no_model(capsys):
    assert main(["serve", "--help"]) == 0 and "--reload-below" in capsys.readouterr().out
    assert "serve" in postgrad("--help").stdout

"""`postgrad serve` with a stand-in for vLLM: when it is taken, how it starts and ends."""

import json
import os
import shutil
import signal
import socket
import threading
import urllib.request

import pytest
from serve_process import wait_for

from postgrad.cli import serve as command_line
from postgrad.cli.main import main
from postgrad.rollout.served_path import parse_served_path
from postgrad.serving import vllm_server
from postgrad.serving.options import ServeOptions


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


@pytest.mark.slow
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


@pytest.mark.slow
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

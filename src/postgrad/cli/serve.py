"""`postgrad serve MODEL ...`: an OpenAI-compatible model server."""

import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from postgrad.cli.arguments import Port, whole_number
from postgrad.errors import Conflict, RunError, Unreadable, WrongValue

MAX_CONTEXT = 1 << 24  # tokens
MIN_TOKEN_LENGTH = 8  # characters
SWITCH_S = 0.0005  # time that a thread waits for Python's lock; requests wait for the decode thread


def serve(
    models: list[str],
    *,
    host: str = "127.0.0.1",
    port: Port = 8000,
    token_file: str = "",
    name: str = "",
    servers: str = "",
    reload_below: str = "",
    queue: Annotated[int, whole_number(0, 100_000)] = 1024,
    rows: Annotated[int, whole_number(0, 4096)] = 0,
    context: Annotated[int, whole_number(0, MAX_CONTEXT)] = 0,
    time_limit: Annotated[int, whole_number(1, 86_400)] = 600,
    grace: Annotated[int, whole_number(0, 3600)] = 10,
    device: str = "auto",
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    threads: Annotated[int, whole_number(0, 1024)] = 0,
) -> int:
    """Serve models over HTTP with OpenAI's interface: /v1/completions, /v1/chat/completions and
    /v1/responses (with streaming, log-probs and token ids), /v1/models and /health.
    docs/evaluate.md has examples.

    Args:
        models [MODEL]: run folder (its newest checkpoint), checkpoint, model folder, hub id,
            smollm2 or tiny
        --host: address to listen on; any other address requires a token
        --port: port to listen on; 0 takes a free one
        --token-file [FILE]: file with the token that requests must send as
            `Authorization: Bearer TOKEN`; without it a token is made and printed where one is
            needed
        --name [NAMES]: names of the models in requests, separated by commas; default: as given in
            MODEL
        --servers [FILE]: add the models to this file, for method.classmates=FILE#NAME; servers may
            share it
        --reload-below [FOLDER]: allow POST /v1/reload {"folder": ...} to load safetensors weights
            below FOLDER
        --queue [N]: completions that may wait; more are rejected with status 429
        --rows [N]: completions decoded at the same time; 0: 64 on a CPU, 256 elsewhere
        --context [N]: longest prompt plus response, in tokens; 0: the model's limit
        --time-limit [S]: longest time per request, in seconds
        --grace [S]: seconds for running requests when the server stops
        --device: as model.device of a run
        --dtype: as model.dtype of a run
        --threads [N]: as model.threads of a run
    """
    names = check(models, name, servers, reload_below)
    from postgrad.config.schema import ModelConfig
    from postgrad.model.threads import set_threads
    from postgrad.net import server as net
    from postgrad.net.guard import announce_token
    from postgrad.serving.app import make_app
    from postgrad.serving.served_model import end_requests, load_served_model

    token = announce_token(host, read_token(token_file))
    paths = find_paths(models)
    below = Path(reload_below).expanduser() if reload_below else None
    file = Path(servers).expanduser() if servers else None
    server: Any = None
    with net.listen(host, port) as listener:
        if threads:
            set_threads(threads)
        sys.setswitchinterval(SWITCH_S)
        served = [
            load_served_model(
                model_name,
                ModelConfig(path=path, device=device, dtype=dtype),
                rows,
                context,
                queue,
                lambda: server.should_exit,
                num_models=len(models),
            )
            for model_name, path in zip(names, paths, strict=True)
        ]
        app = make_app(served, host, token, below, time_limit)
        server = net.make_server(
            app, grace, connections=queue + 1000, end_requests=lambda: end_requests(served)
        )
        run_until_stopped(server, served, listener, file, bool(token))
    return 0


def check(models: list[str], names_given: str, servers: str, reload_below: str) -> list[str]:
    """Return the models' names. Raises ConfigError for wrong options, before a model is loaded."""
    from postgrad.serving import servers_file

    names = names_given.split(",") if names_given else models
    if len(names) != len(models) or len(set(names)) != len(names) or not all(names):
        raise Conflict(
            f"--name: {len(models)} models need {len(models)} different names, "
            f"got {', '.join(names)}; write --name A,B"
        )
    if servers:
        servers_file.read_servers(Path(servers).expanduser())
    if reload_below and not Path(reload_below).expanduser().is_dir():
        raise Unreadable(f"--reload-below {reload_below}: no such folder")
    return names


def read_token(file: str) -> str:
    """Return the token in the file, "" if `file` is empty. Raises ConfigError."""
    if not file:
        return ""
    try:
        token = Path(file).expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        raise Unreadable(f"--token-file {file} cannot be read: {error}") from error
    has_space = any(character.isspace() for character in token)
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or has_space:
        raise WrongValue(
            f"--token-file {file} must hold one token of at least {MIN_TOKEN_LENGTH} ASCII "
            "characters, without spaces"
        )
    return token


def find_paths(models: list[str]) -> list[str]:
    """Return the path of each model: of a run its newest checkpoint, folders as absolute paths."""
    from postgrad.evaluation.model import find_model

    paths: list[str] = []
    for model in models:
        path = find_model(model).path
        local = Path(path).expanduser()
        paths.append(str(local.absolute()) if local.exists() else path)
    return paths


def curl_line(address: str, model: str, needs_token: bool) -> str:
    """Return a command that asks the server something."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    token = "-H 'Authorization: Bearer TOKEN' " if needs_token else ""
    return (
        f"curl {address}/chat/completions -H 'Content-Type: application/json' "
        f"{token}-d {shlex.quote(json.dumps(body))}"
    )


def run_until_stopped(
    server: Any, served: list[Any], listener: socket.socket, file: Path | None, needs_token: bool
) -> None:
    """Serve the models until Ctrl-C or SIGTERM, then finish running requests."""
    from postgrad.net import server as net
    from postgrad.serving import servers_file

    host, port = listener.getsockname()[:2]
    entries = {
        model.name: servers_file.make_entry(host, port, model.name, index, model.source)
        for index, model in enumerate(served)
    }
    # Signals are handled from here on: a process that reads the file may stop this server
    # before the first request.
    with net.signals_stop(server), servers_file.list_servers(file, entries):
        for model in served:
            print(
                f"{model.name}: {model.worker.capacity} rows of {model.context} tokens, "
                f"{model.worker.queue} may wait",
                flush=True,
            )
        address = f"{net.address_of(listener)}/v1"
        print(f"{address}\n{curl_line(address, served[0].name, needs_token)}", flush=True)
        print("Ctrl-C ends it", flush=True)
        net.run(server, listener)
    ended = [model.worker.end() for model in served]
    if not all(ended):
        raise RunError("a decode step was still running 10 s after the server stopped")

"""`postgrad serve MODEL ...`: an OpenAI-compatible model server."""

import json
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from postgrad.cli.arguments import Parser, port_number, whole_number
from postgrad.errors import ConfigError, RunError
from postgrad.serving.options import ServeOptions

DESCRIPTION = """\
Serves models over HTTP with OpenAI's interface: /v1/completions, /v1/chat/completions and
/v1/responses (with streaming, log-probs and token ids), /v1/models and /health. docs/evaluate.md
has examples."""

MAX_CONTEXT = 1 << 24  # tokens
MIN_TOKEN_LENGTH = 8  # characters
SWITCH_S = 0.0005  # time that a thread waits for Python's lock; requests wait for the decode thread


def make_parser() -> Parser:
    parser = Parser("serve MODEL [MODEL ...] [--port PORT] [--host HOST] ...", DESCRIPTION)
    parser.set_defaults(**vars(ServeOptions()))
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="run folder (its newest checkpoint), checkpoint, model folder, hub id, smollm2 "
        "or tiny",
    )
    _add_address_options(parser)
    _add_limits(parser)
    _add_device_options(parser)
    return parser


def _add_address_options(parser: Parser) -> None:
    parser.add_argument(
        "--host", help="address to listen on (default 127.0.0.1); any other requires a token"
    )
    parser.add_argument(
        "--port", type=port_number, help="port to listen on (default 8000); 0 takes a free one"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token that requests must send as `Authorization: Bearer TOKEN`; "
        "without it a token is made and printed where one is needed",
    )
    parser.add_argument(
        "--name",
        metavar="NAMES",
        help="names of the models in requests, separated by commas; default: as given in MODEL",
    )
    parser.add_argument(
        "--servers",
        metavar="FILE",
        help="add the models to this file, for method.classmates=FILE#NAME; servers may share it",
    )
    parser.add_argument(
        "--reload-below",
        metavar="FOLDER",
        help='allow POST /v1/reload {"folder": ...} to load safetensors weights below FOLDER',
    )


def _add_limits(parser: Parser) -> None:
    parser.add_argument(
        "--queue",
        type=whole_number(0, 100_000),
        metavar="N",
        help="completions that may wait (default 1024); more are rejected with status 429",
    )
    parser.add_argument(
        "--rows",
        type=whole_number(0, 4096),
        metavar="N",
        help="completions decoded at the same time; default: 64 on a CPU, 256 elsewhere",
    )
    parser.add_argument(
        "--context",
        type=whole_number(0, MAX_CONTEXT),
        metavar="N",
        help="longest prompt plus response, in tokens; default: the model's limit",
    )
    parser.add_argument(
        "--time-limit",
        type=whole_number(1, 86_400),
        metavar="S",
        help="longest time per request, in seconds (default 600)",
    )
    parser.add_argument(
        "--grace",
        type=whole_number(0, 3600),
        metavar="S",
        help="seconds for running requests when the server stops (default 10)",
    )


def _add_device_options(parser: Parser) -> None:
    parser.add_argument("--device", help="as model.device of a run")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="as model.dtype of a run"
    )
    parser.add_argument(
        "--threads", type=whole_number(0, 1024), metavar="N", help="as model.threads of a run"
    )


def run(argv: list[str]) -> int:
    arguments = vars(make_parser().parse(argv, help_if_empty=True))
    models = arguments.pop("models")
    options = ServeOptions(**arguments)
    names = check(models, options)
    from postgrad.net.guard import announce_token
    from postgrad.net.server import listen

    token = announce_token(options.host, read_token(options.token_file))
    paths = find_paths(models)
    with listen(options.host, options.port) as listener:
        serve(names, paths, listener, token, options)
    return 0


def check(models: list[str], options: ServeOptions) -> list[str]:
    """Returns the models' names. Raises ConfigError for wrong options, before a model is loaded."""
    from postgrad.serving import servers_file

    names = options.name.split(",") if options.name else models
    if len(names) != len(models) or len(set(names)) != len(names) or not all(names):
        raise ConfigError(
            f"--name: {len(models)} models need {len(models)} different names, "
            f"got {', '.join(names)}; write --name A,B"
        )
    if options.servers:
        servers_file.read_servers(Path(options.servers).expanduser())
    if options.reload_below and not Path(options.reload_below).expanduser().is_dir():
        raise ConfigError(f"--reload-below {options.reload_below}: no such folder")
    return names


def read_token(file: str) -> str:
    """Returns the token in the file, "" if `file` is empty. Raises ConfigError."""
    if not file:
        return ""
    try:
        token = Path(file).expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}") from error
    has_space = any(character.isspace() for character in token)
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or has_space:
        raise ConfigError(
            f"--token-file {file} must hold one token of at least {MIN_TOKEN_LENGTH} ASCII "
            "characters, without spaces"
        )
    return token


def find_paths(models: list[str]) -> list[str]:
    """Returns the path of each model: of a run its newest checkpoint, folders as absolute paths."""
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


def serve(
    names: list[str],
    models: list[str],
    listener: socket.socket,
    token: str,
    options: ServeOptions,
) -> None:
    """Loads the models and serves them until Ctrl-C or SIGTERM, then finishes running requests."""
    from postgrad.config.schema import ModelConfig
    from postgrad.model.threads import set_threads
    from postgrad.net import server as net
    from postgrad.serving import servers_file
    from postgrad.serving.app import make_app
    from postgrad.serving.served_model import end_requests, load_served_model

    if options.threads:
        set_threads(options.threads)
    sys.setswitchinterval(SWITCH_S)
    server: Any = None
    served = [
        load_served_model(
            name,
            ModelConfig(path=path, device=options.device, dtype=options.dtype),
            options.rows,
            options.context,
            options.queue,
            lambda: server.should_exit,
            num_models=len(models),
        )
        for name, path in zip(names, models, strict=True)
    ]
    below = Path(options.reload_below).expanduser() if options.reload_below else None
    app = make_app(served, options.host, token, below, options.time_limit)
    server = net.make_server(
        app,
        options.grace,
        connections=options.queue + 1000,
        end_requests=lambda: end_requests(served),
    )
    file = Path(options.servers).expanduser() if options.servers else None
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
        print(f"{address}\n{curl_line(address, served[0].name, bool(token))}", flush=True)
        print("Ctrl-C ends it", flush=True)
        net.run(server, listener)
    ended = [model.worker.end() for model in served]
    if not all(ended):
        raise RunError("a decode step was still running 10 s after the server stopped")

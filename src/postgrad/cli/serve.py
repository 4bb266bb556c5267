"""`postgrad serve MODEL ...`: models behind OpenAI's HTTP interface."""

import contextlib
import secrets
from pathlib import Path
from typing import Any

from postgrad.errors import ConfigError, RunError

HELP = """usage: postgrad serve MODEL [MODEL ...] [--port PORT] [--host HOST] [--engine auto|native|vllm] [--option VALUE ...]

Serves models over HTTP as OpenAI does: /v1/completions, /v1/chat/completions (both with streaming, log-probs and token ids), /v1/models
and /health. Clients, classmates, judges and other trainers can use it; docs/serve.md has examples.

  MODEL              a run folder (its newest checkpoint), a checkpoint, a model folder, a hub id, smollm2 or tiny
  --engine ENGINE    auto (unless given): vllm, vLLM's own server, where it is installed and can run the model here, else native
  --host HOST        address to listen on, 127.0.0.1 unless given; any other than loopback asks for a token
  --port PORT        port to listen on, 8000 unless given; 0 takes a free one
  --token-file FILE  every request must say Authorization: Bearer TOKEN with the token in this file; made and printed where one is needed
  --name NAMES       names that requests call the models by, with commas between; the words given as MODEL unless said
  --servers FILE     write the models into this mapping file, for method.classmates=FILE#NAME; several servers may share it
  --reload-below DIR allow POST /v1/reload {"folder": ...} to load new weights from safetensors folders below DIR
  --queue N          completions that may wait beside those that decode, 1024 unless given; more are turned away with 429
  --rows N           completions decoded at once; 64 on a CPU, 256 elsewhere unless given
  --context N        longest prompt and answer together, in tokens; the model's own unless given
  --time-limit S     longest time for one answer, 600 seconds unless given
  --grace S          time for running requests when the server is stopped, 10 seconds unless given
  --device, --dtype, --threads   as model.device, model.dtype and model.threads of a run"""

OPTIONS = {
    "--engine": "auto",
    "--host": "127.0.0.1",
    "--port": "8000",
    "--token-file": "",
    "--name": "",
    "--servers": "",
    "--reload-below": "",
    "--queue": "1024",
    "--rows": "0",
    "--context": "0",
    "--time-limit": "600",
    "--grace": "10",
    "--device": "auto",
    "--dtype": "auto",
    "--threads": "0",
}
ENGINES = ("auto", "native", "vllm")
CHOICES = {"--engine": ENGINES, "--dtype": ("auto", "float32", "bfloat16")}
LONGEST = 1 << 24  # tokens


def run(words: list[str]) -> int:
    if not words or "--help" in words or "-h" in words:
        print(HELP)
        return 0
    from postgrad import web

    models, options = web.read_options(words, OPTIONS, "serve")
    names = check(models, options)
    host, port = options["--host"], web.number(options, "--port", 0, 65535)
    token = read_token(options["--token-file"])
    if not token and not web.is_loopback(host):
        token = secrets.token_urlsafe(24)
        print(f"token: {token}", flush=True)
    found = paths(models)
    engine, why = choose_engine(found, options)
    if engine == "vllm":
        from postgrad.model.load import resolve_path
        from postgrad.serving.vllm_server import NotReady, serve_vllm

        print(f"engine: vllm ({why})", flush=True)
        try:
            return serve_vllm(
                dict(zip(names, (resolve_path(path, 0) for path in found), strict=True)),
                host,
                port,
                token,
                options,
            )
        except NotReady as error:
            if options["--engine"] != "auto":
                raise
            why = str(error)
    with web.listen(host, port) as listener:
        print(f"engine: native ({why})", flush=True)
        serve(names, found, listener, token, options)
    return 0


def choose_engine(models: list[str], options: dict[str, str]) -> tuple[str, str]:
    """native or vllm, and why."""
    if options["--engine"] != "auto":
        return options["--engine"], f"--engine {options['--engine']}"
    from postgrad.serving.vllm_server import why_not

    reason = why_not(models, options, OPTIONS)
    return ("native", reason) if reason else ("vllm", "installed, and it can run this model here")


def check(models: list[str], options: dict[str, str]) -> list[str]:
    """The models' names; everything that can be wrong with the words is looked at before a model is loaded. Raises ConfigError."""
    from postgrad import web
    from postgrad.errors import did_you_mean
    from postgrad.serving import mapping
    from postgrad.serving import vllm_server as handover

    if not models:
        raise ConfigError("which model? postgrad serve MODEL [--port PORT]")
    for key, known in CHOICES.items():
        if options[key] not in known:
            raise ConfigError(
                f"{key} {options[key]} is unknown; {did_you_mean(options[key], known)}"
            )
    if options["--engine"] == "vllm" and (key := handover.only_native(options, OPTIONS)):
        raise ConfigError(
            f"{key} is for --engine native, vLLM's server has no such option; leave one of them away"
        )
    bounds = {
        "--queue": (0, 100_000),
        "--rows": (0, 4096),
        "--context": (0, LONGEST),
        "--time-limit": (1, 86_400),
    }
    for key, (least, most) in (bounds | {"--grace": (0, 3600), "--threads": (0, 1024)}).items():
        web.number(options, key, least, most)
    names = options["--name"].split(",") if options["--name"] else models
    if len(names) != len(models) or len(set(names)) != len(names) or not all(names):
        raise ConfigError(
            f"{len(models)} models need as many different names, got {', '.join(names)}; say --name A,B"
        )
    if options["--servers"]:
        mapping.read(Path(options["--servers"]).expanduser())
    if options["--reload-below"] and not Path(options["--reload-below"]).expanduser().is_dir():
        raise ConfigError(f"--reload-below {options['--reload-below']}: no such folder")
    return names


def read_token(file: str) -> str:
    if not file:
        return ""
    try:
        token = Path(file).expanduser().read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {error}") from error
    if len(token) < 8 or not token.isascii() or any(c.isspace() for c in token):
        raise ConfigError(f"--token-file {file} must hold one word of at least 8 plain characters")
    return token


def paths(models: list[str]) -> list[str]:
    """Where each model is: of a run its newest checkpoint, folders as whole paths."""
    from postgrad.evaluation.model import find_model

    found = [find_model(word).path for word in models]
    return [
        str(Path(path).expanduser().absolute()) if Path(path).expanduser().exists() else path
        for path in found
    ]


def serve(
    names: list[str], models: list[str], listener: Any, token: str, options: dict[str, str]
) -> None:
    """Load the models, answer until Ctrl-C or SIGTERM, then let running requests end."""
    from postgrad import web
    from postgrad.config.schema import ModelConfig
    from postgrad.model.device import set_threads
    from postgrad.serving import mapping
    from postgrad.serving.app import make_app
    from postgrad.serving.served_model import load_served

    number = {
        key: int(options[key])
        for key in ("--rows", "--context", "--queue", "--time-limit", "--grace", "--threads")
    }
    if number["--threads"]:
        set_threads(number["--threads"])
    server: Any = None
    served = [
        load_served(
            name, ModelConfig(path=path, device=options["--device"], dtype=options["--dtype"]),
            number["--rows"], number["--context"], number["--queue"], lambda: server.should_exit, share=len(models),
        )
        for name, path in zip(names, models, strict=True)
    ]  # fmt: skip
    below = Path(options["--reload-below"]).expanduser() if options["--reload-below"] else None
    app = make_app(served, options["--host"], token, below, number["--time-limit"])
    server = web.make_server(app, number["--grace"], connections=number["--queue"] + 1000)
    file = Path(options["--servers"]).expanduser() if options["--servers"] else None
    host, port = listener.getsockname()[:2]
    entries = {m.name: mapping.entry(host, port, m.name, i, m.source) for i, m in enumerate(served)}
    # Signals from here on: whoever reads the mapping may stop us before the first request.
    with (
        contextlib.suppress(KeyboardInterrupt),
        web.signals_as_interrupt(),
        mapping.named(file, entries),
    ):
        for m in served:
            print(
                f"{m.name}: {m.worker.capacity} rows of {m.context} tokens, {m.worker.queue} may wait",
                flush=True,
            )
        print(f"{web.address_of(listener)}/v1\nCtrl-C ends it", flush=True)
        web.run(server, listener)
    ended = [m.worker.end() for m in served]
    if not all(ended):
        raise RunError("a decode step did not end within 10 s of the server's end")

"""`postgrad sandbox`: the code sandbox as a server, or one program on the spot."""

import contextlib
import os
import secrets
import signal
import socket
from types import FrameType

from postgrad.errors import ConfigError, RunError, did_you_mean

HELP = """usage: postgrad sandbox [--host HOST] [--port PORT] [--token TOKEN] [--workers N] [--queue N] [--memory MB]

Serves the sandbox over HTTP for verifiers on other machines: GET /health, POST /test_program (asserts) and POST /test_program_stdio
(inputs and outputs); docs/verifiers.md has the formats. It refuses to start where the sandbox does not hold.

  --host HOST     address to listen on, 127.0.0.1 unless given; any other than loopback asks for a token
  --port PORT     port to listen on, 1234 unless given; 0 takes a free one
  --token TOKEN   every request must say Authorization: Bearer TOKEN; POSTGRAD_SANDBOX_TOKEN if not given, a random one where one is needed
  --workers N     programs at a time, one for each core unless given
  --queue N       requests that may wait, 64 unless given; more are turned away with 429
  --memory MB     memory of one program, 512 unless given"""

OPTIONS = {"--host": "127.0.0.1", "--port": "1234", "--token": "", "--workers": "", "--queue": "64", "--memory": "512"}


def run(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        print(HELP)
        return 0
    options = read(words)
    port = number(options, "--port", 0, 65535)
    waiting, memory = number(options, "--queue", 0, 100_000), number(options, "--memory", 64, 1 << 20)
    workers = number(options, "--workers", 1, 1024) if options["--workers"] else len(os.sched_getaffinity(0))
    host, token = options["--host"], options["--token"] or os.environ.get("POSTGRAD_SANDBOX_TOKEN", "")
    from postgrad.rewards.sandbox import Limits, Sandbox, SandboxError
    from postgrad.rewards.sandbox_server import make_app

    try:
        sandbox = Sandbox(Limits(memory_mb=memory))
    except SandboxError as error:
        raise RunError(str(error)) from error
    if not token and not is_loopback(host):
        token = secrets.token_urlsafe(24)
        print(f"token: {token}", flush=True)
    serve(make_app(sandbox, token, workers, waiting), listen(host, port), str(sandbox.level))
    return 0


def read(words: list[str]) -> dict[str, str]:
    """The options with their defaults; both --port 80 and --port=80 are understood."""
    options, waiting = dict(OPTIONS), list(words)
    while waiting:
        key, equals, value = waiting.pop(0).partition("=")
        if key not in OPTIONS:
            raise ConfigError(f"sandbox does not know {key}; {did_you_mean(key, OPTIONS)}")
        if not equals:
            if not waiting:
                raise ConfigError(f"{key} needs a value")
            value = waiting.pop(0)
        options[key] = value
    return options


def number(options: dict[str, str], key: str, least: int, most: int) -> int:
    value = options[key]
    if not value.isdigit() or not least <= int(value) <= most:
        raise ConfigError(f"{key} {value} is not a number from {least} to {most}")
    return int(value)


def is_loopback(host: str) -> bool:
    import ipaddress

    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; choose with --host and --port") from error


def serve(app: object, listener: socket.socket, level: str) -> None:
    """Answer until Ctrl-C or SIGTERM; what runs then has two seconds, and its sandbox ends with this process."""
    import uvicorn

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    host, port = listener.getsockname()[:2]
    print(f"{level}\nhttp://{f'[{host}]' if ':' in host else host}:{port}\nCtrl-C ends it", flush=True)
    settings = {"log_level": "warning", "access_log": False, "server_header": False, "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(app, limit_concurrency=1000, **settings))  # pyright: ignore[reportArgumentType]
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        signal.signal(signal.SIGTERM, before)

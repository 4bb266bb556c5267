"""`postgrad sandbox`: the code sandbox as a server, or one program on the spot."""

import os
import secrets

from postgrad.errors import ConfigError, RunError, did_you_mean

HELP = """usage: postgrad sandbox [--host HOST] [--port PORT] [--token TOKEN] [--workers N] [--queue N] [--memory MB]

Serves the sandbox over HTTP for verifiers on other machines: GET /health, POST /test_program (asserts), POST /test_program_stdio
(inputs and outputs) and POST /run_code (one Python program, as Sandbox Fusion has it: what verl's sandbox_fusion.url asks);
docs/verifiers.md has the formats. It refuses to start where the sandbox does not hold.

  --host HOST     address to listen on, 127.0.0.1 unless given; any other than loopback asks for a token
  --port PORT     port to listen on, 1234 unless given; 0 takes a free one
  --token TOKEN   every request must say Authorization: Bearer TOKEN; POSTGRAD_SANDBOX_TOKEN if not given, a random one where one is needed
  --workers N     programs at a time, one for each core unless given
  --queue N       requests that may wait, 64 unless given; more are turned away with 429
  --memory MB     memory of one program, 512 unless given"""

OPTIONS = {
    "--host": "127.0.0.1",
    "--port": "1234",
    "--token": "",
    "--workers": "",
    "--queue": "64",
    "--memory": "512",
}
GRACE_S = 2  # for what runs when it ends; its sandbox ends with the process


def run(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        print(HELP)
        return 0
    from postgrad import web

    plain, options = web.read_options(words, OPTIONS, "sandbox")
    if plain:
        raise ConfigError(f"sandbox does not know {plain[0]}; {did_you_mean(plain[0], OPTIONS)}")
    port = web.number(options, "--port", 0, 65535)
    waiting, memory = (
        web.number(options, "--queue", 0, 100_000),
        web.number(options, "--memory", 64, 1 << 20),
    )
    workers = (
        web.number(options, "--workers", 1, 1024)
        if options["--workers"]
        else len(os.sched_getaffinity(0))
    )
    host, token = (
        options["--host"],
        options["--token"] or os.environ.get("POSTGRAD_SANDBOX_TOKEN", ""),
    )
    from postgrad.sandbox.local import Sandbox
    from postgrad.sandbox.outcome import Limits, SandboxError
    from postgrad.sandbox.server import make_app

    try:
        sandbox = Sandbox(Limits(memory_mb=memory))
    except SandboxError as error:
        raise RunError(str(error)) from error
    if not token and not web.is_loopback(host):
        token = secrets.token_urlsafe(24)
        print(f"token: {token}", flush=True)
    listener = web.listen(host, port)
    print(f"{sandbox.level}\n{web.address_of(listener)}\nCtrl-C ends it", flush=True)
    web.run(web.make_server(make_app(sandbox, token, workers, waiting), GRACE_S), listener)
    return 0

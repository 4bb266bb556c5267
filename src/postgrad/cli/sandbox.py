"""`postgrad sandbox`: serves the code sandbox over HTTP."""

import os
from typing import Annotated

from postgrad.cli.arguments import Port, whole_number
from postgrad.errors import RunError
from postgrad.machine import available_cores

GRACE_S = 2  # seconds that running requests get when the server stops


def sandbox(
    *,
    host: str = "127.0.0.1",
    port: Port = 1234,
    token: str = "",
    workers: Annotated[int, whole_number(1, 1024)] | None = None,
    queue: Annotated[int, whole_number(0, 100_000)] = 64,
    memory: Annotated[int, whole_number(64, 1 << 20)] = 512,
) -> int:
    """Serve the sandbox over HTTP for verifiers on other machines: GET /health, POST /test_program
    (asserts), POST /test_program_stdio (inputs and outputs) and POST /run_code (one Python program,
    in the format of Sandbox Fusion, which verl's sandbox_fusion.url expects). docs/rewards.md has
    the formats. It refuses to start if the machine cannot isolate programs.

    Args:
        --host: address to listen on; any other address requires a token
        --port: port to listen on; 0 takes a free one
        --token: token that requests must send as `Authorization: Bearer TOKEN`; default:
            POSTGRAD_SANDBOX_TOKEN, or a random one where one is needed
        --workers [N]: programs that run at the same time; default: one per core
        --queue [N]: requests that may wait; more are rejected with status 429
        --memory [MB]: memory limit of one program
    """
    from postgrad.net import server as net
    from postgrad.net.guard import announce_token
    from postgrad.sandbox.local import Sandbox
    from postgrad.sandbox.outcome import Limits, SandboxError
    from postgrad.sandbox.server import make_app

    try:
        box = Sandbox(Limits(memory_mb=memory))
    except SandboxError as error:
        raise RunError(str(error)) from error
    token = announce_token(host, token or os.environ.get("POSTGRAD_SANDBOX_TOKEN", ""))
    listener = net.listen(host, port)
    print(f"{box.level}\n{net.address_of(listener)}\nCtrl-C ends it", flush=True)
    app = make_app(box, token, workers or available_cores(), queue, host)
    net.run(net.make_server(app, GRACE_S), listener)
    return 0

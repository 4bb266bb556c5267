"""`postgrad sandbox`: serves the code sandbox over HTTP."""

import os

from postgrad.cli.arguments import Parser, whole_number
from postgrad.errors import RunError
from postgrad.machine import available_cores

DESCRIPTION = """\
Serves the sandbox over HTTP for verifiers on other machines: GET /health, POST /test_program
(asserts), POST /test_program_stdio (inputs and outputs) and POST /run_code (one Python program, in
the format of Sandbox Fusion, which verl's sandbox_fusion.url expects). docs/rewards.md has the
formats. It refuses to start if the machine cannot isolate programs."""

GRACE_S = 2  # seconds that running requests get when the server stops


def make_parser() -> Parser:
    parser = Parser(
        "sandbox [--host HOST] [--port PORT] [--token TOKEN] [--workers N] [--queue N] "
        "[--memory MB]",
        DESCRIPTION,
    )
    parser.add_address(port=1234)
    parser.add_argument(
        "--token",
        default="",
        help="token that requests must send as `Authorization: Bearer TOKEN`; default: "
        "POSTGRAD_SANDBOX_TOKEN, or a random one where one is needed",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(1, 1024),
        default=available_cores(),
        metavar="N",
        help="programs that run at the same time; default: one per core",
    )
    parser.add_argument(
        "--queue",
        type=whole_number(0, 100_000),
        default=64,
        metavar="N",
        help="requests that may wait (default 64); more are rejected with status 429",
    )
    parser.add_argument(
        "--memory",
        type=whole_number(64, 1 << 20),
        default=512,
        metavar="MB",
        help="memory limit of one program (default 512)",
    )
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv)
    given = arguments.token or os.environ.get("POSTGRAD_SANDBOX_TOKEN", "")
    from postgrad.net import server as net
    from postgrad.net.guard import announce_token
    from postgrad.sandbox.local import Sandbox
    from postgrad.sandbox.outcome import Limits, SandboxError
    from postgrad.sandbox.server import make_app

    try:
        sandbox = Sandbox(Limits(memory_mb=arguments.memory))
    except SandboxError as error:
        raise RunError(str(error)) from error
    token = announce_token(arguments.host, given)
    listener = net.listen(arguments.host, arguments.port)
    print(f"{sandbox.level}\n{net.address_of(listener)}\nCtrl-C ends it", flush=True)
    app = make_app(sandbox, token, arguments.workers, arguments.queue, arguments.host)
    net.run(net.make_server(app, GRACE_S), listener)
    return 0

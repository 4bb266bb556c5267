"""`postgrad environment`: serves an environment class over OpenEnv's wire."""

import os
from typing import Any

import yaml

from postgrad.cli.arguments import Parser, whole_number
from postgrad.errors import ConfigError

DESCRIPTION = """\
Serves an environment for runs on other machines: environment=http://HOST:PORT. CLASS is guess,
file.py:Class or package.module:Class; NAME=VALUE pairs are its arguments. The server speaks the
wire of OpenEnv: one WebSocket per trajectory with reset, step and state (docs/environments.md)."""

GRACE_S = 2  # seconds that running calls get when the server stops


def make_parser() -> Parser:
    parser = Parser(
        "environment CLASS [NAME=VALUE ...] [--host HOST] [--port PORT] [--token TOKEN] "
        "[--sessions N] [--timeout S]",
        DESCRIPTION,
    )
    parser.add_argument("environment", metavar="CLASS", help="the environment class")
    parser.add_overrides("arguments of the class")
    parser.add_address(port=8000)
    parser.add_argument(
        "--token",
        default="",
        help="token that clients must send; default: POSTGRAD_ENVIRONMENT_TOKEN, which clients "
        "read too, or a random one where one is needed",
    )
    parser.add_argument(
        "--sessions",
        type=whole_number(1, 4096),
        default=256,
        metavar="N",
        help="trajectories at the same time (default 256)",
    )
    parser.add_argument(
        "--timeout",
        type=whole_number(1, 86_400),
        default=30,
        metavar="S",
        help="time limit per call of the environment, in seconds (default 30)",
    )
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv, help_if_empty=True)

    from postgrad import web
    from postgrad.environments.lookup import check_options, find_environment
    from postgrad.environments.remote import TOKEN_VARIABLE, is_url
    from postgrad.environments.server import make_app
    from postgrad.environments.session import SessionSpec, load_environment

    if is_url(arguments.environment):
        raise ConfigError(f"environment {arguments.environment} is a server already; name a class")
    path = find_environment(arguments.environment)
    options = _read_options(arguments.overrides)
    check_options(load_environment(path), options, path)
    given = arguments.token or os.environ.get(TOKEN_VARIABLE, "")
    token = web.announce_token(arguments.host, given)
    spec = SessionSpec(path, options, timeout_s=arguments.timeout)
    app = make_app(spec, arguments.host, token, arguments.sessions)
    listener = web.listen(arguments.host, arguments.port)
    print(f"{web.address_of(listener)}\nCtrl-C ends it", flush=True)
    connections = arguments.sessions + 1000
    web.run(web.make_server(app, GRACE_S, connections, websockets=True), listener)
    return 0


def _read_options(pairs: list[str]) -> dict[str, Any]:
    """Return NAME=VALUE pairs as arguments; a value is read as YAML, like a setting of a run."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair} is not an argument of the class; write NAME=VALUE")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{pair} is not YAML; put the value into quotes") from error
    return options

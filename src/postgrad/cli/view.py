"""`postgrad view [RUNS]`: the web page over run folders."""

import secrets
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from postgrad.cli.arguments import Parser, port_number
from postgrad.view import FIRST_PORT, PORTS

if TYPE_CHECKING:
    from postgrad.view.folder import Folder

DESCRIPTION = """\
Serves a web page with the runs, rollouts and evaluations below a folder: live while a
run is running, complete afterwards from its files. It only reads, and only below that folder."""


def make_parser() -> Parser:
    parser = Parser(
        "view [RUNS] [--host HOST] [--port PORT] [--token TOKEN] [--no-browser]", DESCRIPTION
    )
    parser.add_argument(
        "folder", nargs="?", default="runs", metavar="RUNS", help="folder of runs (default: runs)"
    )
    parser.add_host()
    parser.add_argument(
        "--port",
        type=port_number,
        help=f"port to listen on; default: the first free one from {FIRST_PORT} on",
    )
    parser.add_argument(
        "--token", default="", help="required token; a random one is made where one is needed"
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="print the address, open no browser"
    )
    return parser


def run(argv: list[str]) -> int:
    arguments = make_parser().parse(argv)
    from postgrad.net.guard import is_loopback
    from postgrad.net.server import listen
    from postgrad.view.folder import Folder

    root = Folder(Path(arguments.folder))
    token = arguments.token
    if not token and not is_loopback(arguments.host):
        token = secrets.token_urlsafe(24)
    ports = PORTS if arguments.port is None else (arguments.port,)
    listener = listen(arguments.host, *ports)
    serve(root, arguments.host, token, listener, not arguments.no_browser)
    return 0


def serve(
    root: "Folder", host: str, token: str, listener: socket.socket, open_browser: bool
) -> None:
    """Prints the address and serves the page until Ctrl-C."""
    from postgrad.net.server import run as run_server
    from postgrad.view.server import make_server

    port = listener.getsockname()[1]
    address = f"http://{_host_in_url(host)}:{port}/"
    if token:
        address += f"?token={token}"
    print(f"{root.root}\n{address}\nCtrl-C ends it", flush=True)
    if open_browser and sys.stdout.isatty():
        threading.Timer(0.5, webbrowser.open, [address]).start()
    run_server(make_server(root, host, token), listener)


def _host_in_url(host: str) -> str:
    if ":" in host:
        return f"[{host}]"
    return socket.gethostname() if host == "0.0.0.0" else host

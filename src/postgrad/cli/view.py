"""`postgrad view [RUNS]`: the web page over run folders."""

import secrets
import socket
import sys
import threading
import webbrowser
from pathlib import Path

from postgrad.cli.arguments import Port
from postgrad.view import PORTS


def view(
    folder: Path = Path("runs"),
    *,
    host: str = "127.0.0.1",
    port: Port | None = None,
    token: str = "",
    no_browser: bool = False,
) -> int:
    """Serve a web page with the runs, rollouts and evaluations below a folder: live while a run is
    running, complete afterwards from its files. It only reads, and only below that folder.

    Args:
        folder [RUNS]: folder of runs
        --host: address to listen on; any other address requires a token
        --port: port to listen on; default: the first free one from 8765 on
        --token: required token; a random one is made where one is needed
        --no-browser: print the address, open no browser
    """
    from postgrad.net.guard import is_loopback
    from postgrad.net.server import listen, run
    from postgrad.view.folder import Folder
    from postgrad.view.server import make_server

    root = Folder(folder)
    if not token and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    listener = listen(host, *(PORTS if port is None else (port,)))
    address = f"http://{_host_in_url(host)}:{listener.getsockname()[1]}/"
    if token:
        address += f"?token={token}"
    print(f"{root.root}\n{address}\nCtrl-C ends it", flush=True)
    if not no_browser and sys.stdout.isatty():
        threading.Timer(0.5, webbrowser.open, [address]).start()
    run(make_server(root, host, token), listener)
    return 0


def _host_in_url(host: str) -> str:
    if ":" in host:
        return f"[{host}]"
    return socket.gethostname() if host == "0.0.0.0" else host

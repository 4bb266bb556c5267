"""`postgrad view [RUNS]`: the page over run folders."""

import secrets
import socket
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from postgrad.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from postgrad.view.folder import Folder

HELP = """usage: postgrad view [RUNS] [--host HOST] [--port PORT] [--token TOKEN] [--no-browser]

Opens a page over the runs, rollouts and evaluations below a folder (runs unless given): live while a run goes on, complete afterwards
from its files alone. It reads only, and only below that folder.

  --host HOST     address to listen on, 127.0.0.1 unless given; any other than loopback asks every visitor for a token
  --port PORT     port to listen on; the first free one from 8765 on unless given
  --token TOKEN   ask for this token; a random one is made where one is needed
  --no-browser    print the address only"""

PORT = 8765
OPTIONS = ("--host", "--port", "--token", "--no-browser")


def run(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        print(HELP)
        return 0
    folder, options = read(words)
    from postgrad.view.folder import Folder
    from postgrad.web import is_loopback

    root = Folder(Path(folder))
    host = options.get("--host", "127.0.0.1")
    token = options.get("--token", "") or ("" if is_loopback(host) else secrets.token_urlsafe(24))
    listener = listen(host, options.get("--port"))
    serve(root, host, token, listener, "--no-browser" not in options)
    return 0


def read(words: list[str]) -> tuple[str, dict[str, str]]:
    """The folder and the options; both --port 80 and --port=80 are understood."""
    folders: list[str] = []
    options: dict[str, str] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            folders.append(word)
            continue
        key, equals, value = word.partition("=")
        if key not in OPTIONS:
            raise ConfigError(f"view does not know {key}; {did_you_mean(key, OPTIONS)}")
        if key != "--no-browser" and not equals:
            if not waiting:
                raise ConfigError(f"{key} needs a value")
            value = waiting.pop(0)
        options[key] = value
    if len(folders) > 1:
        raise ConfigError(
            f"view takes one folder, got {' and '.join(folders)}; give the folder that holds them"
        )
    return folders[0] if folders else "runs", options


def listen(host: str, port: str | None) -> socket.socket:
    """A listening socket: on the port that was asked for, or on the first free one."""
    if port is not None and not (port.isdigit() and int(port) < 65536):
        raise ConfigError(f"--port {port} is not a port; give a number from 0 to 65535")
    try:
        family, _, _, _, _ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    tried = [int(port)] if port is not None else [*range(PORT, PORT + 20), 0]
    for number in tried:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            if number == tried[-1]:
                raise ConfigError(
                    f"cannot listen on {host} port {number}: {error.strerror}; choose another with --port"
                ) from error
    raise AssertionError("a port was found or an error raised")


def serve(root: "Folder", host: str, token: str, listener: socket.socket, browse: bool) -> None:
    """Answer until Ctrl-C."""
    from postgrad.view.server import make_server
    from postgrad.web import run as run_server

    port = listener.getsockname()[1]
    name = f"[{host}]" if ":" in host else socket.gethostname() if host == "0.0.0.0" else host
    address = f"http://{name}:{port}/" + (f"?token={token}" if token else "")
    print(f"{root.root}\n{address}\nCtrl-C ends it", flush=True)
    if browse and sys.stdout.isatty():
        threading.Timer(0.5, webbrowser.open, [address]).start()
    run_server(make_server(root, host, token), listener)

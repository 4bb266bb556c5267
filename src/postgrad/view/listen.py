"""The port that the page listens on."""

import socket

from postgrad.errors import ConfigError

FIRST_PORT = 8765
NUM_PORTS = 20  # ports that are tried before any free one is taken


def listen(host: str, port: int | None) -> socket.socket:
    """Returns a listening socket on `port`, or on the first free port if it is None."""
    try:
        family, _, _, _, _ = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    ports = [*range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 0] if port is None else [port]
    for number in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            if number == ports[-1]:
                raise ConfigError(
                    f"cannot listen on {host} port {number}: {error.strerror}; "
                    "choose another with --port"
                ) from error
    raise AssertionError("the loop returns or raises")

"""Messages over a socket: eight bytes of length, then the message."""

import select
import signal
import socket

# The driver handles these signals. A terminal sends them to all processes of a run.
DRIVER_SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAX_CHUNK = 1 << 20  # bytes per read


def send(connection: socket.socket, data: bytes) -> None:
    """Sends one message. Raises OSError."""
    connection.sendall(len(data).to_bytes(8, "little") + data)


def receive(connection: socket.socket, timeout_s: float | None) -> bytes | None:
    """Returns one message; None if the peer closed or sent nothing for `timeout_s` seconds."""
    connection.settimeout(timeout_s)
    try:
        header = _read(connection, 8)
        if header is None:
            return None
        return _read(connection, int.from_bytes(header, "little"))
    except OSError:
        return None


def is_readable(connection: socket.socket) -> bool:
    """Returns whether data, or the end of the connection, can be read without waiting."""
    readable, _, _ = select.select([connection], [], [], 0)
    return bool(readable)


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Returns exactly `size` bytes; None if the peer closed before."""
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), MAX_CHUNK))
        if not chunk:
            return None
        data += chunk
    return bytes(data)

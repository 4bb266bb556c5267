"""Messages over a socket: eight bytes of length, then the message. Values are JSON."""

import contextlib
import json
import socket
from typing import Any

MAX_CHUNK = 1 << 20  # bytes per read


class Channel:
    """One end of a socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.stream = connection.makefile("rb")

    def send(self, data: bytes) -> None:
        """Send one message. Raises OSError."""
        self.connection.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self) -> bytes | None:
        """Wait for one message; None if the peer is gone, also in the middle of a message."""
        try:
            header = self.stream.read(8)
            size = int.from_bytes(header, "little")
            data = bytearray()
            while len(data) < size:
                chunk = self.stream.read(min(size - len(data), MAX_CHUNK))
                if not chunk:
                    return None
                data += chunk
        except OSError:
            return None
        return bytes(data) if len(header) == 8 else None

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """End the connection; the peer and a waiting `receive` notice. Any thread may call it."""
        with contextlib.suppress(OSError):  # it has ended already
            self.connection.shutdown(how)

    def close(self) -> None:
        """Close the socket; only the thread that receives may do this."""
        self.stream.close()
        self.connection.close()


def to_json(message: Any) -> bytes:
    """Return the message as JSON.

    Arrays and scalars of NumPy become lists and numbers; other values that JSON does not have
    become text.
    """
    return json.dumps(message, skipkeys=True, default=as_json_value).encode()


def as_json_value(value: Any) -> Any:
    """Return what stands for a value that JSON does not have: lists and numbers, or its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)

"""Requests and replies over a socket, as JSON lines.

Each end may ask the other one to do something, and serves the other end's requests while it waits
for its reply. Every request has a random id that its reply repeats. What an end does for the other
end is decided by `perform` of the subclass, and what becomes of a value that is not plain by
`encode_other` and `decode_other`.
"""

import builtins
import json
import os
import socket
from typing import Any

from . import plain

MAX_LINE = 32 << 20  # bytes of one message
NOTHING = object()  # the result of `next` at the end, and of `getattr` for a missing attribute


class ChannelClosed(BaseException):
    """The other end has closed the socket. Not an Exception, so that tests do not catch it."""


class Channel:
    """One end of the connection between the test runner and the program runner."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.reader = connection.makefile("rb")

    # ---- messages

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Raises ChannelClosed."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed from error

    def receive(self) -> dict[str, Any]:
        """Wait for the next message and return it.

        Raises:
            ChannelClosed: there is none.
            ValueError: it is not a JSON object.
        """
        try:
            line = self.reader.readline(MAX_LINE)
        except OSError as error:
            raise ChannelClosed from error
        if not line.endswith(b"\n"):
            raise ChannelClosed
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("the message is not an object")
        return message

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Have the other end perform an operation and return its result, or NOTHING.

        Lists, dicts and other mutable arguments that the other end changed are changed here too.
        What it raised is raised here.
        """
        request_id = os.urandom(8).hex()
        request = {
            "do": operation,
            "id": request_id,
            "arguments": [self.encode(value) for value in arguments],
            "keywords": {name: self.encode(value) for name, value in keywords.items()},
        }
        self.send(request)
        message = self.receive()
        while "do" in message:
            self.serve(message)
            message = self.receive()
        return self.read_reply(message, request_id, arguments)

    def read_reply(
        self, message: dict[str, Any], request_id: str, arguments: tuple[Any, ...]
    ) -> Any:
        """Return the value of a reply; raises what the other end raised."""
        if message.get("reply") != request_id:
            raise ValueError("this is not the reply to the last request")
        if "raised" in message:
            raise self.decode_error(message["raised"])
        for index, changed in message["changed"]:
            plain.rewrite(arguments[index], self.decode(changed))
        return self.decode(message["value"]) if "value" in message else NOTHING

    def serve(self, request: dict[str, Any]) -> None:
        """Perform what the other end asks for, and reply, whatever it raises."""
        reply: dict[str, Any] = {"reply": request["id"]}
        try:
            arguments = [self.decode(value) for value in request["arguments"]]
            keywords = {name: self.decode(value) for name, value in request["keywords"].items()}
            value = self.perform(request["do"], arguments, keywords)
            if value is not NOTHING:
                reply["value"] = self.encode(value)
            reply["changed"] = self.changed_arguments(request["arguments"], arguments)
        except ChannelClosed:
            raise
        except BaseException as error:  # SystemExit too: the program must not end its test this way
            reply = {"reply": request["id"], "raised": self.encode_error(error)}
        self.send(reply)

    def changed_arguments(self, encoded: list[Any], arguments: list[Any]) -> list[Any]:
        """Return [index, content] for each mutable argument that the operation changed."""
        changed = []
        for index, argument in enumerate(arguments):
            if not plain.is_mutable(argument):
                continue
            content = self.encode(argument)
            if content != encoded[index]:
                changed.append([index, content])
        return changed

    def perform(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Perform an operation that the other end asked for; returns its result or NOTHING."""
        raise NotImplementedError("a subclass performs operations")

    # ---- values

    def encode(self, value: Any) -> Any:
        """Return a value as JSON."""
        if value is None or value is True or value is False:
            return value
        data = plain.write(value, self.encode)
        return self.encode_other(value) if data is None else data

    def decode(self, data: Any) -> Any:
        """Rebuild a value from JSON."""
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        kind = data["type"]
        if kind in plain.READERS:
            return plain.READERS[kind](data["value"], self.decode)
        return self.decode_other(kind, data["value"], data)

    def encode_other(self, value: Any) -> Any:
        """Return a value that has no plain form as JSON."""
        raise NotImplementedError("a subclass encodes other values")

    def decode_other(self, kind: str, value: Any, data: dict[str, Any]) -> Any:
        """Rebuild what encode_other of the other end returned."""
        raise NotImplementedError("a subclass decodes other values")

    # ---- exceptions

    def encode_error(self, error: BaseException) -> list[Any]:
        """Return the names of an exception's classes, the most special one first, and its text."""
        return [[kind.__name__ for kind in type(error).__mro__], error_text(error)]

    def decode_error(self, data: Any) -> BaseException:
        """Return the exception to raise for one that the other end raised."""
        names, text = data
        kinds = [vars(builtins).get(name) for name in names]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    return kind(str(text))
                except TypeError:  # UnicodeDecodeError and others need more arguments
                    break
        return RuntimeError(f"{names[0]}: {text}")


def error_text(error: BaseException) -> str:
    """Return an exception's message, at most 500 characters."""
    try:
        return str(error)[:500]
    except Exception:  # __str__ of an exception may raise
        return ""

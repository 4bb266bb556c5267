"""Tools of servers that speak the Model Context Protocol (package mcp).

A server is a command, which is started and spoken to over its pipes, or a URL. Each process that
runs sessions has one connection per server.
"""

import asyncio
import atexit
import contextlib
import shlex
import threading
from concurrent.futures import Future
from functools import cache
from typing import Any

from postgrad.errors import ConfigError
from postgrad.verifiers.port import one_line

PREFIX = "mcp:"
START_S = 60.0  # for a server to start and to list its tools
CALL_S = 600.0  # a call that its caller no longer waits for ends then
CLOSE_S = 10.0  # for a server to end


class McpTool:
    """One tool of a server; called with its arguments, it returns the result as text."""

    def __init__(self, server: "McpServer", tool: Any) -> None:
        self.server = server
        self.__name__ = str(tool.name)
        self.schema = {
            "type": "function",
            "function": {
                "name": str(tool.name),
                "description": tool.description or "",
                "parameters": dict(tool.input_schema),
            },
        }

    def __call__(self, **arguments: Any) -> str:
        return self.server.call(self.__name__, arguments)


class McpServer:
    """A connection to a server, held open by a thread with an event loop until the process ends.

    Raises:
        ConfigError: the package is missing, or the server does not answer.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.loop = asyncio.new_event_loop()
        self.started: Future[list[Any]] = Future()
        self.client: Any = None
        self.task = self.loop.create_task(self._serve())
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        try:
            self.tools = self.started.result(START_S)
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise  # Ctrl-C
            raise ConfigError(
                f"rollout.tools: the MCP server {target!r} does not answer ({_reason(error)}); "
                "check its command or URL"
            ) from error
        atexit.register(self.close)

    def close(self) -> None:
        """Close the connection. A server that was started as a command is stopped."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join(CLOSE_S)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's result. Raises RuntimeError if the tool failed."""
        if not self.thread.is_alive():
            raise RuntimeError("the MCP server has ended")
        request = self.client.call_tool(name, arguments, read_timeout_seconds=CALL_S)
        result = asyncio.run_coroutine_threadsafe(request, self.loop).result(CALL_S)
        texts = [str(part.text) for part in result.content if part.type == "text"]
        if result.is_error:
            raise RuntimeError(" ".join(texts) or "the tool failed")
        return "\n".join(texts)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        with contextlib.closing(self.loop), contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.task)

    async def _serve(self) -> None:
        try:
            from mcp import Client, StdioServerParameters

            server: Any = self.target
            if not self.target.startswith(("http://", "https://")):
                command, *arguments = shlex.split(self.target)
                server = StdioServerParameters(command=command, args=arguments)
            async with Client(server) as client:
                self.client = client
                listed = await client.list_tools()
                self.started.set_result(list(listed.tools))
                await asyncio.Event().wait()  # the connection stays open
        except BaseException as error:
            if not self.started.done():
                self.started.set_exception(error)


@cache
def connect(target: str) -> McpServer:
    """Return this process's connection to a server. Raises ConfigError."""
    return McpServer(target)


def find_mcp_tools(name: str) -> list[McpTool]:
    """Return the tools of `mcp:COMMAND` or `mcp:URL`. Raises ConfigError."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"rollout.tools: {name} needs the package mcp; pip install 'postgrad[mcp]'"
        ) from error
    server = connect(name.removeprefix(PREFIX).strip())
    if not server.tools:
        raise ConfigError(f"rollout.tools: {name} has no tools")
    return [McpTool(server, tool) for tool in server.tools]


def _reason(error: BaseException) -> str:
    """Return the first cause of a group of errors in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)

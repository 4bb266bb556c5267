"""Tools of servers that speak the Model Context Protocol (package mcp).

A server is a command, which is started and spoken to over its pipes, or a URL. Each run has
connections of its own: with `mcp:` one per process that runs sessions, with `mcp_session:` one per
trajectory, which is opened by its first call. The toolbox of a run ends them (tools.py).
"""

import asyncio
import atexit
import contextlib
import shlex
import threading
from concurrent.futures import Future
from typing import Any

from postgrad.errors import Missing, NotInstalled, Unreachable
from postgrad.verifiers.port import one_line

PREFIX = "mcp:"
SESSION_PREFIX = "mcp_session:"
PREFIXES = (PREFIX, SESSION_PREFIX)
START_S = 60.0  # for a server to start and to list its tools
CALL_S = 600.0  # a call that its caller no longer waits for ends then
CLOSE_S = 10.0  # for a server to end


class McpTool:
    """One tool of a server; called with its arguments, it returns the result as text."""

    def __init__(self, server: "McpServer | SessionServer", schema: dict[str, Any]) -> None:
        self.server = server
        self.schema = schema
        self.__name__ = str(schema["function"]["name"])

    def __call__(self, **arguments: Any) -> Any:
        return self.server.call(self.__name__, arguments)


class SessionServer:
    """A server to which each trajectory has its own connection, opened by the first call.

    `opened` are the connections of all trajectories.
    """

    def __init__(self, target: str, opened: "set[McpServer] | None" = None) -> None:
        self.target = target
        self.opened = set() if opened is None else opened
        self._server: McpServer | None = None
        self._lock = threading.Lock()

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return a tool's result, as McpServer does. Raises RuntimeError if the tool failed."""
        with self._lock:
            if self._server is None:
                self._server = McpServer(self.target)
                self.opened.add(self._server)
        return self._server.call(name, arguments)

    def copy(self) -> "SessionServer":
        """Return the same server without a connection, for another trajectory."""
        return SessionServer(self.target, self.opened)

    def close(self) -> None:
        """End the trajectory's connection, if there is one."""
        with self._lock:
            if self._server is not None:
                self.opened.discard(self._server)
                self._server.close()
                self._server = None

    def stop(self) -> None:
        """Ask the connections of all trajectories to end; join() waits for them."""
        for server in list(self.opened):
            server.stop()

    def join(self) -> None:
        while self.opened:
            self.opened.pop().join()


class McpServer:
    """A connection to a server, held open by a thread with an event loop until close().

    Raises:
        ConfigError: the package is missing, or the server does not answer.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.loop = asyncio.new_event_loop()
        self.started: Future[list[Any]] = Future()
        self.client: Any = None
        self.is_stopped = False
        self.task = self.loop.create_task(self._serve())
        self.thread = threading.Thread(target=self._run, name=f"mcp {target}", daemon=True)
        self.thread.start()
        try:
            self.tools = self.started.result(START_S)
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise  # Ctrl-C
            raise Unreachable(
                f"rollout.tools: the MCP server {target!r} does not answer ({_reason(error)}); "
                "check its command or URL"
            ) from error
        atexit.register(self.close)

    def close(self) -> None:
        """Close the connection. A server that was started as a command is stopped."""
        self.stop()
        self.join()

    def stop(self) -> None:
        """Ask the connection to end; join() waits for it."""
        self.is_stopped = True
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.task.cancel)

    def join(self) -> None:
        """Wait until the connection has ended, at most a few seconds."""
        self.thread.join(CLOSE_S)

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return a tool's result: its text, or parts if there are pictures.

        Raises RuntimeError if the tool failed.
        """
        if self.is_stopped or not self.thread.is_alive():
            raise RuntimeError("the connection to the MCP server has ended")
        request = self.client.call_tool(name, arguments, read_timeout_seconds=CALL_S)
        result = asyncio.run_coroutine_threadsafe(request, self.loop).result(CALL_S)
        texts = [str(part.text) for part in result.content if part.type == "text"]
        if result.is_error:
            raise RuntimeError(" ".join(texts) or "the tool failed")
        if all(part.type != "image" for part in result.content):
            return "\n".join(texts)
        return [
            {"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"}
            if part.type == "image"
            else {"type": "text", "text": str(part.text)}
            for part in result.content
            if part.type in ("text", "image")
        ]

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


def find_mcp_tools(name: str) -> list[McpTool]:
    """Return the tools of `mcp:TARGET` or `mcp_session:TARGET`. Raises ConfigError.

    TARGET is a command or a URL.
    """
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise NotInstalled(
            f"rollout.tools: {name} needs the package mcp; pip install 'postgrad[mcp]'"
        ) from error
    target = name.removeprefix(SESSION_PREFIX).removeprefix(PREFIX).strip()
    server = McpServer(target)
    schemas = _schemas(server, name)
    if not name.startswith(SESSION_PREFIX):
        return [McpTool(server, schema) for schema in schemas]
    server.close()  # the list of tools needs it no more
    session = SessionServer(target)
    return [McpTool(session, schema) for schema in schemas]


def _schemas(server: McpServer, name: str) -> list[dict[str, Any]]:
    """Return the tools' descriptions in OpenAI's form. Raises ConfigError if there are none."""
    if not server.tools:
        raise Missing(f"rollout.tools: {name} has no tools")
    schemas: list[dict[str, Any]] = []
    for tool in server.tools:
        function = {
            "name": str(tool.name),
            "description": tool.description or "",
            "parameters": dict(tool.input_schema),
        }
        schemas.append({"type": "function", "function": function})
    return schemas


def _reason(error: BaseException) -> str:
    """Return the first cause of a group of errors in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return one_line(error)

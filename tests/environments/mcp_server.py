"""A real MCP server over its pipes, for the tests."""

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
STOCK = {"apples": 3}


@server.tool()
def buy(item: str, count: int = 1) -> str:
    """Buy something.

    Args:
        item: what to buy
        count: how many
    """
    if STOCK.get(item, 0) < count:
        raise ToolError(f"not enough {item}")
    STOCK[item] -= count
    return f"{STOCK[item]} {item} left"


if __name__ == "__main__":
    server.run()

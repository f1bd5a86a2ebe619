"""A small server of the Model Context Protocol, written with its SDK: python mcp_server.py [PORT]."""

import asyncio
import os
import sys

from mcp.server import MCPServer

server = MCPServer("sums", log_level="CRITICAL")
total = 0


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def remember(number: int) -> str:
    """Add to what this server was told so far."""
    global total
    total += number
    return str(total)


@server.tool()
def long(length: int) -> str:
    """So many characters."""
    return "x" * length


@server.tool()
async def wait(seconds: float) -> str:
    """Answer late."""
    await asyncio.sleep(seconds)
    return "late"


@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("this tool always fails")


@server.tool()
def crash() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")

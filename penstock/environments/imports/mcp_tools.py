"""Sessions whose tools are those of a server of the Model Context Protocol.

A turn with tool calls is answered with their results, a tool message each; a turn without one ends the session, which
the run's reward model scores. What the server says of a call (an error of the tool, wrong arguments) is for the model;
what the server fails at ends the sample as `sandbox_error`. A session has a connection of its own, begun at its first
call, unless the server is `shared`; when it breaks, another one is begun and all calls so far are made again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcp_types import CallToolResult, EmbeddedResource, TextContent, TextResourceContents, Tool

from penstock.environments.environment import Environment
from penstock.environments.imports.mcp_connection import (
    McpConnection,
    McpLostError,
    McpRefusedError,
    McpServer,
    McpServerError,
)
from penstock.environments.types import Action, Message, Outcome, ScoreStatus, Task, ToolCall

MAX_CALLS_A_TURN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class McpLimits:
    """What a session may do."""

    max_calls: int
    """Of a session."""
    max_characters: int
    """Of a result; the rest is cut off, and the model sees that it was."""


class McpTools:
    """The tools of one server, and the connection of its sessions if they share one."""

    def __init__(self, server: McpServer, tools: Sequence[Tool], limits: McpLimits, *, is_shared: bool) -> None:
        self.server, self.limits, self.is_shared = server, limits, is_shared
        self.names = frozenset(tool.name for tool in tools)
        self.described = [_described(tool) for tool in tools]
        """In the form of OpenAI's `tools`."""
        self._shared: McpConnection | None = None
        self._lock = asyncio.Lock()

    async def connected(self) -> McpConnection:
        """The connection that sessions share, or another one for the caller alone. Raises McpServerError."""
        if not self.is_shared:
            return await self._opened()
        async with self._lock:
            if self._shared is not None and not self._shared.is_open:
                await self._shared.close()
                self._shared = None
            self._shared = self._shared or await self._opened()
            return self._shared

    async def _opened(self) -> McpConnection:
        connection = McpConnection(self.server)
        await connection.open()
        return connection


class McpSession(Environment):
    """One session."""

    def __init__(self, tools: McpTools) -> None:
        self._tools = tools
        self._connection: McpConnection | None = None
        self._made: list[tuple[str, dict[str, Any]]] = []
        """Calls that the server took."""

    def reset(self, task: Task) -> None:
        """Begin; the server hears of it at the first call."""

    async def step(self, action: Action) -> Outcome:
        """Make the turn's calls, or end."""
        if not action.tool_calls or action.is_truncated:
            return Outcome(is_done=True)
        try:
            return Outcome(messages=[await self._answered(call) for call in action.tool_calls[:MAX_CALLS_A_TURN]])
        except McpServerError as error:
            return Outcome(status=ScoreStatus.SANDBOX_ERROR, message=str(error))

    async def close(self) -> None:
        """End the session's own connection."""
        if self._connection is not None and not self._tools.is_shared:
            await self._connection.close()

    async def _answered(self, call: ToolCall) -> Message:
        limits, arguments = self._tools.limits, _arguments(call)
        if call.name not in self._tools.names:
            said = f"there is no tool {call.name!r:.80}; there are {', '.join(sorted(self._tools.names))}"
        elif arguments is None:
            said = "the arguments must be one JSON object"
        elif len(self._made) >= limits.max_calls:
            said = f"no calls are left: {limits.max_calls} were made; answer without tools"
        else:
            said = await self._said(call.name, arguments)
        if len(said) > limits.max_characters:
            said = f"{said[: limits.max_characters]}\n[{len(said) - limits.max_characters} characters are cut off]"
        return Message(role="tool", content=said)

    async def _said(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            result = await self._called(name, arguments)
        except McpRefusedError as error:
            return str(error)
        self._made.append((name, arguments))
        return _text(result)

    async def _called(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """The result, if need be over another connection, on which a session's own calls were made again."""
        try:
            self._connection = self._connection or await self._tools.connected()
            return await self._connection.call(name, arguments)
        except McpLostError:
            await self.close()
        self._connection = await self._tools.connected()
        for each in () if self._tools.is_shared else self._made:
            await self._connection.call(*each)
        return await self._connection.call(name, arguments)


def _described(tool: Tool) -> dict[str, Any]:
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _arguments(call: ToolCall) -> dict[str, Any] | None:
    try:
        found = json.loads(call.arguments_json)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(result: CallToolResult) -> str:
    """What the model reads of a result: its texts, or its structure; of anything else, that it was there."""
    parts: list[str] = []
    for block in result.content:
        if isinstance(block, TextContent):
            parts.append(block.text)
        elif isinstance(block, EmbeddedResource) and isinstance(block.resource, TextResourceContents):
            parts.append(block.resource.text)
        else:
            parts.append(f"[{block.type}: not shown]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts) or ("the tool failed" if result.is_error else "done")

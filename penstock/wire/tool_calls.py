"""Parses tool calls in a model's text, as Hermes and Qwen models write them. Pure.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Anything else, malformed blocks included, stays content: none of the model's text is lost.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

OPENING = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call."""

    call_id: str
    name: str
    arguments: str
    """A JSON object, as the model wrote it if possible."""

    def as_json(self) -> dict[str, object]:
        """OpenAI's form."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def find_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The text without its calls, and the calls in order."""
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _read(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    return _BLOCK.sub(take, text), calls


def _read(block: str) -> ToolCall | None:
    try:
        # strict=False: models write line breaks into strings.
        found = json.loads(block, strict=False)
    except (ValueError, RecursionError):
        return None
    name, arguments = found.get("name"), found.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(
        call_id=f"call_{secrets.token_hex(12)}", name=name, arguments=json.dumps(arguments, ensure_ascii=False)
    )

"""Sessions of a resource server of NeMo Gym, over HTTP with a cookie for each session.

    POST /seed_session    the row
    POST /TOOL            a tool call's arguments, for each call that the model makes
    POST /verify          the row with `response`, all that the model did in the form of OpenAI's Responses -> `reward`

A row has `responses_create_params` (`input`, `tools`) and whatever the verifier reads; it is sent back as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.environments.environment import Environment
from penstock.environments.imports.server_options import checked_timeout, http_address
from penstock.environments.types import Action, Message, Outcome, ScoreStatus, Task, ToolCall, UnplayableError

if TYPE_CHECKING:
    import aiohttp

MAX_ANSWER_BYTES = 1024 * 1024
MAX_CALLS_A_TURN = 16
MAX_COMPONENTS = 16
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_OWN_ROUTES = ("seed_session", "verify")


class NeMoGymError(Exception):
    """The server broke its protocol, or went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeMoGymOptions:
    """A server."""

    url: str
    """http(s)://HOST:PORT/PATH, without a slash at its end."""
    timeout_s: float
    """Of each answer."""


def nemo_gym_options(address: str, options: Mapping[str, Any]) -> NeMoGymOptions:
    """Check an address and its options. Raises ValueError."""
    for name in options:
        if name != "timeout_s":
            raise ValueError(f"{name}: unknown; the only option is timeout_s")
    return NeMoGymOptions(url=http_address(address), timeout_s=checked_timeout(options))


class NeMoGymSession(Environment):
    """One session."""

    def __init__(self, options: NeMoGymOptions) -> None:
        self._options = options
        self._http: aiohttp.ClientSession | None = None
        self._row: Mapping[str, Any] = {}
        self._tools: frozenset[str] = frozenset()
        self._output: list[dict[str, Any]] = []
        self._name = ""

    async def reset(self, task: Task) -> None:
        """Seed the session with the row."""
        import aiohttp

        params = task.metadata.get("responses_create_params")
        if not isinstance(params, Mapping):
            raise UnplayableError("responses_create_params: the row has no such object; is it a row of NeMo Gym?")
        self._row, self._name = dict(task.metadata), task.session_id[-48:]
        named = [tool.get("name") for tool in params.get("tools") or () if isinstance(tool, Mapping)]
        self._tools = frozenset(str(name) for name in named if _is_tool(name))
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._options.timeout_s), cookie_jar=aiohttp.CookieJar(unsafe=True)
        )
        status, said = await self._post("seed_session", self._row)
        if status != 200:
            raise UnplayableError(f"seed_session: {status}: {said[:300]}")
        if isinstance(seeded := _parsed(said), dict) and seeded.get("mcp"):
            raise UnplayableError("seed_session: tools over MCP are not offered; serve them as routes")

    async def step(self, action: Action) -> Outcome:
        """Call the tools that the turn calls, or have the whole verified."""
        self._note(action)
        try:
            if action.tool_calls and not action.is_truncated:
                calls = action.tool_calls[:MAX_CALLS_A_TURN]
                return Outcome(messages=[await self._called(call, index) for index, call in enumerate(calls)])
            return await self._verified()
        except (NeMoGymError, TimeoutError) as error:
            said = f"{self._options.url}: {error or 'no answer in time'}"
            return Outcome(status=ScoreStatus.SANDBOX_ERROR, message=said)

    async def close(self) -> None:
        """End the connection; servers forget sessions by themselves."""
        if self._http is not None:
            await self._http.close()

    def _note(self, action: Action) -> None:
        if action.text:
            content = [{"type": "output_text", "text": action.text, "annotations": []}]
            item = {"type": "message", "role": "assistant", "status": "completed", "content": content}
            self._output.append({"id": f"msg_{len(self._output)}", **item})
        for index, call in enumerate(action.tool_calls[:MAX_CALLS_A_TURN]):
            said = {"name": call.name, "arguments": call.arguments_json}
            self._output.append({"type": "function_call", "call_id": _call_id(action.turn, index), **said})
        self._turn = action.turn

    async def _called(self, call: ToolCall, index: int) -> Message:
        if call.name in self._tools:
            _, said = await self._post(call.name, _parsed(call.arguments_json))
        else:
            said = f"there is no tool {call.name!r:.80}; there are {', '.join(sorted(self._tools)) or 'none'}"
        self._output.append({"type": "function_call_output", "call_id": _call_id(self._turn, index), "output": said})
        return Message(role="tool", content=said)

    async def _verified(self) -> Outcome:
        params = self._row["responses_create_params"]
        response = {
            "id": f"resp_{self._name}",
            "created_at": 0,
            "model": str(params.get("model") or "policy"),
            "object": "response",
            "output": self._output,
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": params.get("tools") or [],
            "status": "completed",
        }
        status, said = await self._post("verify", {**self._row, "response": response})
        found = _parsed(said)
        if status != 200 or not isinstance(found, dict):
            raise NeMoGymError(f"verify: {status}: {said[:300]}")
        if not _is_number(found.get("reward")):
            raise NeMoGymError(f"verify: reward: {found.get('reward')!r:.80}; must be a finite number")
        parts = {name: float(value) for name, value in found.items() if name != "reward" and _is_number(value)}
        return Outcome(reward=float(found["reward"]), is_done=True, components=dict([*parts.items()][:MAX_COMPONENTS]))

    async def _post(self, route: str, body: Any) -> tuple[int, str]:
        """Status and text. Raises NeMoGymError, TimeoutError."""
        import aiohttp

        assert self._http is not None
        try:
            async with self._http.post(f"{self._options.url}/{route}", json=body, allow_redirects=False) as answer:
                read = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(read) <= MAX_ANSWER_BYTES and (more := await answer.content.read(MAX_ANSWER_BYTES)):
                    read += more
        except aiohttp.ClientError as error:
            raise NeMoGymError(f"{route}: {type(error).__name__}: {error}") from error
        if len(read) > MAX_ANSWER_BYTES:
            raise NeMoGymError(f"{route}: an answer of more than {MAX_ANSWER_BYTES} bytes")
        return answer.status, read.decode("utf-8", "replace")


def _is_tool(name: object) -> bool:
    return isinstance(name, str) and _TOOL_NAME.fullmatch(name) is not None and name not in _OWN_ROUTES


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _call_id(turn: int, index: int) -> str:
    return f"call_{turn}_{index}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}

"""Sessions of an OpenEnv server (openenv-core 0.3), over its WebSocket protocol: one connection a session.

    {"type": "reset", "data": {"seed", "episode_id", ...}}    {"type": "observation",
    {"type": "step", "data": ACTION}                            "data": {"observation", "reward", "done"}}
    {"type": "close"}                                         {"type": "error", "data": {"message", "code"}}

What the model writes becomes an action: a tool call; a JSON object; or else the text as the action's one required
field, or the one that the option `action` names. What it sees is the text of the observation that the option
`observation` names, or its only text, or else all of it as JSON. A session whose connection broke is played again from
its turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.environments import metrics
from penstock.environments.environment import Environment
from penstock.environments.imports.server_options import checked_timeout, http_address
from penstock.environments.types import Action, Message, Opening, Outcome, ScoreStatus, Task, UnplayableError
from penstock.errors import QueueFullError
from penstock.network.rpc import backoff_s

if TYPE_CHECKING:
    import aiohttp

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_SEED = 2**31
CAPACITY_WAIT_S = 2.0
"""A server with as many sessions as it holds is asked again for this long. Then the caller is told, who waits longer
than a call may last."""
_UNASKED_WAIT_S = 0.001
"""Enough to be handed what has arrived."""
_OPTIONS = ("action", "observation", "timeout_s")


class OpenEnvError(Exception):
    """The server broke its protocol, or went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvOptions:
    """A server, and how its messages are read."""

    url: str
    """http(s)://HOST:PORT/PATH, without a slash at its end."""
    action: str | None = None
    """Field of an action that takes the model's text."""
    observation: str | None = None
    """Field of an observation that the model sees."""
    timeout_s: float = 60.0
    """Of each answer."""


def openenv_options(address: str, options: Mapping[str, Any]) -> OpenEnvOptions:
    """Check an address and its options. Raises ValueError."""
    for name in options:
        if name not in _OPTIONS:
            raise ValueError(f"{name}: unknown; options are {', '.join(_OPTIONS)}")
    names = {name: str(options[name]) for name in ("action", "observation") if name in options}
    return OpenEnvOptions(url=http_address(address), timeout_s=checked_timeout(options), **names)


class OpenEnvSession(Environment):
    """One session."""

    opens = True

    def __init__(self, options: OpenEnvOptions) -> None:
        self._options = options
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._schema: Mapping[str, Any] = {}
        self._sent: list[Mapping[str, Any]] = []

    async def reset(self, task: Task) -> Opening:
        """Connect, and begin with the row's column `reset` beside the seed."""
        data = {"seed": task.seed % MAX_SEED, "episode_id": task.session_id}
        columns = task.metadata.get("reset", {})
        if not isinstance(columns, Mapping):
            raise UnplayableError(f"reset: {type(columns).__name__}; must be an object that the server's reset takes")
        self._sent = [{"type": "reset", "data": {**data, **columns}}]
        answer = await self._opened(self._sent[0])
        if (fault := _fault(answer)) is not None:
            raise UnplayableError(fault[1])
        observation, _, is_done = _observed(answer)
        if is_done:
            raise UnplayableError("the session was done before the first turn")
        return Opening(messages=[self._message(observation)])

    async def step(self, action: Action) -> Outcome:
        """Send the turn as an action."""
        request = {"type": "step", "data": self._action(action)}
        try:
            answer = await self._answered(request)
        except (OpenEnvError, QueueFullError, TimeoutError) as error:
            said = f"{self._options.url}: {error or 'no answer in time'}"
            return Outcome(status=ScoreStatus.SANDBOX_ERROR, message=said)
        self._sent.append(request)
        if (fault := _fault(answer)) is not None:
            code, said = fault
            if code != "VALIDATION_ERROR":
                return Outcome(status=ScoreStatus.FAILED, message=said)
            # The model's own mistake: it may do better at its next turn.
            return Outcome(messages=[Message(role="user", content=f"This is no action: {said}"[:4096])])
        observation, reward, is_done = _observed(answer)
        return Outcome(messages=[] if is_done else [self._message(observation)], reward=reward, is_done=is_done)

    async def close(self) -> None:
        """End the session."""
        socket, http = self._socket, self._http
        self._socket = self._http = None
        if socket is not None and not socket.closed:
            with contextlib.suppress(ConnectionError):
                await socket.send_json({"type": "close"})
            await socket.close()
        if http is not None:
            await http.close()

    async def _answered(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer, if need be over another connection on which all before was said again."""
        try:
            return await self._ask(request)
        except (OpenEnvError, TimeoutError):
            await self.close()
        await self._opened(self._sent[0])
        for sent in self._sent[1:]:
            await self._ask(sent)
        return await self._ask(request)

    async def _opened(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a reset, once the server has a place. Raises QueueFullError if it has none for long."""
        import aiohttp

        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._options.timeout_s))
        until_s = asyncio.get_running_loop().time() + CAPACITY_WAIT_S
        for delay_s in backoff_s():
            try:
                self._schema = await self._action_schema(self._http)
                socket = await self._http.ws_connect(f"{self._options.url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
                self._socket = socket
                answer = await self._first_answer(socket, request)
                if _code(answer) != "CAPACITY_REACHED":
                    return answer
            except (aiohttp.ClientError, OpenEnvError) as error:
                raise OpenEnvError(str(error)) from error
            metrics.FULL.inc()
            await socket.close()
            if asyncio.get_running_loop().time() + delay_s > until_s:
                said = f"{self._options.url} has no room for another session: {answer['data'].get('message')}"
                raise QueueFullError(said[:500])
            await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: backoff_s never ends")

    async def _action_schema(self, http: aiohttp.ClientSession) -> Mapping[str, Any]:
        async with http.get(f"{self._options.url}/schema") as response:
            if response.status != 200:
                return {}
            found = json.loads(await response.content.read(MAX_MESSAGE_BYTES))
        action = found.get("action") if isinstance(found, dict) else None
        return action if isinstance(action, dict) else {}

    async def _first_answer(
        self, socket: aiohttp.ClientWebSocketResponse, request: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The answer to a connection's first request: a full server gives it before it is asked, and hangs up."""
        import aiohttp

        with contextlib.suppress(TimeoutError):
            said = _answer(await socket.receive(timeout=_UNASKED_WAIT_S))
            if _code(said) is not None:
                return said
            raise OpenEnvError(f"the server spoke unasked: {json.dumps(said)[:200]}")
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            # Where the server has hung up, its reason may still be there to read.
            await socket.send_json(request)
        return _answer(await socket.receive(timeout=self._options.timeout_s))

    async def _ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        import aiohttp

        socket = self._socket
        if socket is None or socket.closed:
            raise OpenEnvError("the connection is closed")
        try:
            await self._refuse_unasked(socket)
            await socket.send_json(request)
            return _answer(await socket.receive(timeout=self._options.timeout_s))
        except (aiohttp.ClientError, ConnectionError) as error:
            raise OpenEnvError(str(error)) from error

    async def _refuse_unasked(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Raises OpenEnvError if something came since the last answer: it would be taken for that to the next turn."""
        with contextlib.suppress(TimeoutError):
            said = await socket.receive(timeout=_UNASKED_WAIT_S)
            what = "ended the connection" if said.data is None or isinstance(said.data, int) else "spoke unasked"
            raise OpenEnvError(f"the server {what} ({said.type.name}: {said.data!r:.200})")

    def _action(self, action: Action) -> Mapping[str, Any]:
        if action.tool_calls:
            return {"type": "call_tool", "tool_name": action.tool_calls[0].name, "arguments": _arguments(action)}
        if self._options.action is not None:
            return {self._options.action: action.text}
        try:
            found = json.loads(action.text)
            if isinstance(found, dict):
                return found
        except (ValueError, RecursionError):
            pass
        return {self._text_field(): action.text}

    def _text_field(self) -> str:
        fields = self._schema.get("properties") or {}
        wanted = self._schema.get("required") or [name for name in fields if name != "metadata"]
        return str(wanted[0]) if wanted else "message"

    def _message(self, observation: Mapping[str, Any]) -> Message:
        name = self._options.observation
        if name is not None:
            if not isinstance(observation.get(name), str):
                raise OpenEnvError(f"the observation has no text {name!r}; it has {', '.join(observation)}"[:500])
            return Message(role="user", content=observation[name])
        texts = [value for value in observation.values() if isinstance(value, str) and value]
        return Message(
            role="user", content=texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)
        )


def _answer(message: aiohttp.WSMessage) -> Mapping[str, Any]:
    """What the server said. Raises OpenEnvError if it hung up, or said nothing that can be read."""
    import aiohttp

    if message.type is not aiohttp.WSMsgType.TEXT:
        raise OpenEnvError(f"the server closed the connection ({message.type.name}: {message.data or message.extra})")
    try:
        found = json.loads(message.data)
    except (ValueError, RecursionError) as error:
        raise OpenEnvError(f"the server's answer is no JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("data"), dict):
        raise OpenEnvError(f"the server's answer has no data: {message.data[:200]}")
    return found


def _arguments(action: Action) -> Any:
    try:
        return json.loads(action.tool_calls[0].arguments_json)
    except (ValueError, RecursionError):
        return {}


def _code(answer: Mapping[str, Any]) -> str | None:
    return str(answer["data"].get("code", "UNKNOWN")) if answer.get("type") == "error" else None


def _fault(answer: Mapping[str, Any]) -> tuple[str, str] | None:
    """Code and text of an error; None if it is none."""
    code = _code(answer)
    if code is None:
        return None
    data = answer["data"]
    details = "; ".join(
        f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}"
        for each in data.get("errors") or ()
        if isinstance(each, dict)
    )
    return code, f"{data.get('message')} ({code})"[:500] + (f": {details[:1000]}" if details else "")


def _observed(answer: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None, bool]:
    """Observation, reward and end. Raises OpenEnvError."""
    data = answer["data"]
    observation, reward, is_done = data.get("observation"), data.get("reward"), data.get("done", False)
    if answer.get("type") != "observation" or not isinstance(observation, dict) or not isinstance(is_done, bool):
        raise OpenEnvError(f"the server's answer is no observation: {json.dumps(answer)[:200]}")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise OpenEnvError(f"reward: {reward!r}; must be a finite number")
    return observation, None if reward is None else float(reward), is_done

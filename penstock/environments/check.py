"""Checks whether a server keeps the contract of EnvironmentService, by calling it: `penstock env check HOST:PORT`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from penstock.environments.environment_messages import MAX_TURNS, answer_problem, messages_problem, read_tools
from penstock.errors import (
    DeadlineError,
    InvalidFieldError,
    NotOfferedError,
    PenstockError,
    TurnConflictError,
    UnknownSessionError,
)
from penstock.network.rpc import call, open_channel
from penstock.rewards.verdicts import (
    CheckResult,
    CheckStatus,
    Note,
    ViolationError,
    health,
    reaching,
    reflection,
    run_check,
)
from penstock.security import NO_SECURITY, Security
from penstock.v1 import environment_pb2, environment_pb2_grpc, types_pb2

SERVICE_NAME = "penstock.v1.EnvironmentService"
MAX_CHECKED_TURNS = 8
_Answer = TypeVar("_Answer")
_COLUMNS = ("prompt", "answer")
_OK = (types_pb2.SCORE_STATUS_UNSPECIFIED, types_pb2.SCORE_STATUS_OK)


async def check_server(
    target: str,
    *,
    row: Mapping[str, Any],
    say: Sequence[str] = (),
    timeout_s: float = 30.0,
    run_id: str = "check",
    security: Security = NO_SECURITY,
) -> list[CheckResult]:
    """Call the server at `target` (host:port) in every way that the contract covers.

    Args:
        target: Its address.
        row: A data row that it can play: `prompt` (text or messages), `answer`, other columns.
        say: What the model says, turn by turn; after that "1".
        timeout_s: Of each call, seconds.
        run_id: The run in whose name it calls; a certificate of one run opens no other.
        security: Credentials to show.

    Returns:
        One result per check, in order; the server conforms if none is FAILED. One result if it cannot be reached.
    """
    async with open_channel(target, security) as channel:
        server = _Checked(channel, target, timeout_s, row, say, run_id)
        first = await run_check("answers", server.opens)
        if first.status is CheckStatus.FAILED:
            return [first]
        checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("health", lambda: health(channel, SERVICE_NAME, timeout_s=timeout_s)),
            ("reflection", lambda: reflection(channel, timeout_s=timeout_s)),
            ("description", server.describes_itself),
            ("turns", server.takes_turns),
            ("repeated turns", server.repeats_turns),
            ("repeated opening", server.repeats_opening),
            ("another text for a taken turn", server.refuses_another_text),
            ("turns out of order", server.refuses_skipped_turns),
            ("close", server.closes),
            ("replay", server.replays),
            ("sessions side by side", server.keeps_sessions_apart),
            ("odd texts", server.survives_odd_texts),
            ("deadline", server.survives_deadline),
        ]
        return [first, *[await run_check(name, check) for name, check in checks]]


class _Checked:
    def __init__(
        self,
        channel: grpc.aio.Channel,
        target: str,
        timeout_s: float,
        row: Mapping[str, Any],
        say: Sequence[str],
        run_id: str,
    ) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        self._row, self._say, self._run_id = row, say, run_id
        self._name = f"check-{uuid.uuid4().hex[:12]}"
        self._opening = environment_pb2.ResetResponse()
        self._opens = False
        self._answers: list[environment_pb2.StepResponse] = []

    async def opens(self) -> str:
        try:
            with reaching(self._target, SERVICE_NAME):
                self._opening = await self._reset(self._name)
        except InvalidFieldError as error:
            raise ViolationError(f"{error}; name a row that it can play with --row") from error
        if problem := messages_problem(self._opening.messages, is_needed=False):
            raise ViolationError(f"reset: {problem}")
        if self._opening.max_turns > MAX_TURNS:
            raise ViolationError(f"max_turns: {self._opening.max_turns}; must be at most {MAX_TURNS}")
        return f"opens a session with {len(self._opening.messages)} messages"

    async def describes_itself(self) -> str:
        request = environment_pb2.GetEnvironmentRequest()
        try:
            said = await self._call(self._stub.GetEnvironment, request)
        except NotOfferedError as error:
            raise Note("GetEnvironment is not offered; an environment without tools is assumed") from error
        tools = read_tools(said.tools_json) or []
        self._opens = said.opens
        if self._opening.messages and not said.opens:
            raise ViolationError("Reset answers with messages, but `opens` is not set")
        return f"name {said.name or self._target!r}, {len(tools)} tools, {said.max_sessions or 'unknown'} sessions"

    async def takes_turns(self) -> str:
        for turn in range(MAX_CHECKED_TURNS):
            answer = await self._step(self._name, turn)
            self._answers.append(answer)
            if answer.done or answer.status not in _OK:
                break
        last = self._answers[-1]
        if last.status not in _OK:
            status = types_pb2.ScoreStatus.Name(last.status).removeprefix("SCORE_STATUS_")
            raise Note(f"turn {len(self._answers) - 1}: {status}: {last.message}; say something else with --say")
        rewards = [f"{answer.reward:.6g}" if answer.HasField("reward") else "none" for answer in self._answers]
        end = "done" if last.done else "not done"
        return f"{end} after {len(self._answers)} turns, rewards {', '.join(rewards)}"

    async def repeats_turns(self) -> str:
        for turn, answer in enumerate(self._answers):
            if await self._step(self._name, turn) != answer:
                raise ViolationError(f"turn {turn}: a repeated call got another answer than the first one")
        return f"{len(self._answers)} turns are answered as before"

    async def repeats_opening(self) -> str:
        if await self._reset(self._name) != self._opening:
            raise ViolationError("Reset of an open session got another answer than the first one")
        if await self._step(self._name, 0) != self._answers[0]:
            raise ViolationError("Reset of an open session has changed its turns")
        return "an open session stays as it is"

    async def refuses_another_text(self) -> str:
        await self._must_refuse(TurnConflictError, "FAILED_PRECONDITION", self._name, 0, "something else entirely")
        return "FAILED_PRECONDITION"

    async def refuses_skipped_turns(self) -> str:
        await self._must_refuse(TurnConflictError, "FAILED_PRECONDITION", self._name, len(self._answers) + 3, "1")
        return "FAILED_PRECONDITION"

    async def closes(self) -> str:
        for _ in range(2):
            await self._call(self._stub.Close, environment_pb2.CloseRequest(session_id=self._name))
        await self._must_refuse(UnknownSessionError, "NOT_FOUND", self._name, 0, self._text(0))
        await self._must_refuse(UnknownSessionError, "NOT_FOUND", f"{self._name}-never", 0, self._text(0))
        return "a closed session is NOT_FOUND"

    async def replays(self) -> str:
        await self._compare(self._name)
        return f"{len(self._answers)} turns are answered alike by a fresh session"

    async def keeps_sessions_apart(self) -> str:
        names = [f"{self._name}-{side}" for side in "ab"]
        for name in names:
            await self._reset(name)
        for turn, answer in enumerate(self._answers):
            for name in names:
                if await self._step(name, turn) != answer:
                    raise ViolationError(f"turn {turn} of a session is answered otherwise while another is open")
        return "two sessions do not disturb each other"

    async def survives_odd_texts(self) -> str:
        for number, text in enumerate(("", "\u00fc\u4e2d\U0001f600\x00", "word " * 20_000, "{" * 500)):
            name = f"{self._name}-odd{number}"
            await self._reset(name)
            await self._step(name, 0, text)
            await self._call(self._stub.Close, environment_pb2.CloseRequest(session_id=name))
        return "empty, beyond ASCII, 100,000 characters, unbalanced"

    async def survives_deadline(self) -> str:
        name = f"{self._name}-late"
        await self._reset(name)
        with suppress(DeadlineError):
            await call(self._stub.Step, self._turn(name, 0), peer=self._target, timeout_s=0.001)
        if await self._step(name, 0) != self._answers[0]:
            raise ViolationError("a turn whose caller gave up is answered otherwise when it is repeated")
        return "a turn whose caller gave up is answered when it is repeated"

    async def _compare(self, name: str) -> None:
        if await self._reset(name) != self._opening:
            raise ViolationError("a fresh session of the same task opens otherwise; is chance drawn from the seed?")
        for turn, answer in enumerate(self._answers):
            if await self._step(name, turn) != answer:
                raise ViolationError(
                    f"turn {turn} of a fresh session is answered otherwise; a session whose server died could not go on"
                )

    async def _must_refuse(self, kind: type[PenstockError], code: str, name: str, turn: int, text: str) -> None:
        try:
            await self._step(name, turn, text)
        except kind:
            return
        except PenstockError as error:
            raise ViolationError(f"must be refused with {code}, not: {error}") from error
        raise ViolationError(f"must be refused with {code}, but was answered")

    def _text(self, turn: int) -> str:
        return self._say[turn] if turn < len(self._say) else "1"

    async def _reset(self, name: str) -> environment_pb2.ResetResponse:
        prompt = self._row.get("prompt", "")
        columns = {key: value for key, value in self._row.items() if key not in _COLUMNS}
        request = environment_pb2.ResetRequest(
            session_id=name,
            seed=7,
            prompt_text=prompt if isinstance(prompt, str) else "",
            messages=[] if isinstance(prompt, str) else [types_pb2.ChatMessage(**turn) for turn in prompt],
            answer=str(self._row.get("answer", "")),
            metadata_json=json.dumps(columns) if columns else "",
            purpose=types_pb2.PURPOSE_TRAIN,
            run_id=self._run_id,
        )
        return await self._call(self._stub.Reset, request)

    async def _step(self, name: str, turn: int, text: str | None = None) -> environment_pb2.StepResponse:
        answer = await self._call(self._stub.Step, self._turn(name, turn, text))
        if problem := answer_problem(answer):
            raise ViolationError(f"turn {turn}: {problem}")
        return answer

    def _turn(self, name: str, turn: int, text: str | None = None) -> environment_pb2.StepRequest:
        return environment_pb2.StepRequest(
            session_id=name,
            turn=turn,
            text=self._text(turn) if text is None else text,
            finish_reason=types_pb2.FINISH_REASON_STOP,
        )

    async def _call(self, method: Callable[..., Awaitable[_Answer]], request: Any) -> _Answer:
        return await call(method, request, peer=self._target, timeout_s=self._timeout_s)

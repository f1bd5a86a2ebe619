"""Checks whether a server keeps the contract of RewardService, by calling it: `penstock reward check HOST:PORT`."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import grpc

from penstock.errors import (
    DeadlineError,
    InvalidFieldError,
    NotOfferedError,
    PenstockError,
)
from penstock.network.rpc import call, open_channel
from penstock.rewards.model import DEFAULT_MAX_BATCH_SIZE
from penstock.rewards.score_messages import (
    ASSISTANT,
    ENVIRONMENT,
    GRADER_ERRORS,
    check_score,
    write_item,
)
from penstock.rewards.types import RewardItem, Turn
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
from penstock.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from penstock.wire.codec import int32_bytes

SERVICE_NAME = "penstock.v1.RewardService"
LONG_COMPLETION_CHARACTERS = 300_000
MAX_PROBED_BATCH_SIZE = 4096
_SESSION = (
    Turn(role=ASSISTANT, content="5"),
    Turn(role=ENVIRONMENT, content="No. Try again."),
    Turn(role=ASSISTANT, content="4"),
)


async def check_server(target: str, *, timeout_s: float = 30.0, security: Security = NO_SECURITY) -> list[CheckResult]:
    """Call the server at `target` (host:port) in every way that the contract covers.

    Returns:
        One result per check, in order; the server conforms if none is FAILED. One result if it cannot be
        reached.
    """
    async with open_channel(target, security) as channel:
        server = _Checked(channel, target, timeout_s)
        first = await run_check("answers", server.answers)
        if first.status is CheckStatus.FAILED:
            return [first]
        checks: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("health", server.reports_health),
            ("reflection", server.offers_reflection),
            ("description", server.describes_itself),
            ("verdicts", server.gives_verdicts),
            ("one score per item, in order", server.keeps_order),
            ("repeatable", server.repeats_itself),
            ("odd samples", server.survives_odd_samples),
            ("long completion", server.takes_long_completion),
            ("empty batch refused", server.refuses_empty_batch),
            ("oversized batch", server.handles_oversized_batch),
            ("deadline", server.survives_deadline),
        ]
        return [first, *[await run_check(name, check) for name, check in checks]]


class _Checked:
    def __init__(self, channel: grpc.aio.Channel, target: str, timeout_s: float) -> None:
        self._channel = channel
        self._target = target
        self._timeout_s = timeout_s
        self._stub = reward_pb2_grpc.RewardServiceStub(channel)
        self._max_batch_size = DEFAULT_MAX_BATCH_SIZE
        self._wants_token_ids = False

    async def answers(self) -> str:
        with reaching(self._target, SERVICE_NAME):
            await self._score([_item(1)])
        return "scores a sample"

    async def reports_health(self) -> str:
        return await health(self._channel, SERVICE_NAME, timeout_s=self._timeout_s)

    async def offers_reflection(self) -> str:
        return await reflection(self._channel, timeout_s=self._timeout_s)

    async def describes_itself(self) -> str:
        request = reward_pb2.GetRewardModelRequest()
        try:
            answer = await call(self._stub.GetRewardModel, request, peer=self._target, timeout_s=self._timeout_s)
        except NotOfferedError as error:
            raise Note(f"GetRewardModel is not offered; batches of {DEFAULT_MAX_BATCH_SIZE} are assumed") from error
        self._max_batch_size = answer.max_batch_size or DEFAULT_MAX_BATCH_SIZE
        self._wants_token_ids = answer.wants_token_ids
        parts = ", ".join(f"{part.weight:g} {part.name}" for part in answer.parts)
        total = f"; adds up {parts}" if parts else ""
        return f"name {answer.name or self._target!r}, at most {self._max_batch_size} items a batch{total}"

    async def gives_verdicts(self) -> str:
        scores = await self._score([_item(number) for number in range(min(8, self._max_batch_size))])
        counts = Counter(_status(score) for score in scores)
        shown = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        message = next((score.message for score in scores if score.message), "no message")
        if all(score.status in GRADER_ERRORS for score in scores):
            raise ViolationError(f"its grader fails for every sample: {shown} ({message})")
        if any(score.status in GRADER_ERRORS for score in scores):
            raise Note(f"its grader failed for some: {shown} ({message}); a run tries them again")
        if not counts["OK"]:
            raise Note(f"no probed sample got a value: {shown} ({message}); such samples are dropped")
        return shown

    async def keeps_order(self) -> str:
        items = [_item(number) for number in range(min(8, self._max_batch_size))]
        batch = await self._score(items)
        singles = [(await self._score([item]))[0] for item in items]
        for index, (in_batch, alone) in enumerate(zip(batch, singles, strict=True)):
            if not _has_erred(in_batch, alone) and not _alike(in_batch, alone):
                raise ViolationError(
                    f"item {index} scores {_brief(in_batch)} in a batch and {_brief(alone)} alone; is the order kept?"
                )
        if len({_brief(score) for score in singles}) == 1:
            raise Note("the probed samples all score alike, so their order shows nothing")
        return f"{len(items)} items score in a batch as they do alone"

    async def repeats_itself(self) -> str:
        first, second = (await self._score([_item(3)]))[0], (await self._score([_item(3)]))[0]
        if _has_erred(first, second):
            raise Note(f"its grader failed: {_brief(first)}, then {_brief(second)}")
        if not _alike(first, second):
            raise ViolationError(f"the same sample scored {_brief(first)}, then {_brief(second)}")
        return _brief(first)

    async def survives_odd_samples(self) -> str:
        items = [
            RewardItem(completion=""),
            RewardItem(prompt="2+2=", completion="4", answer=""),
            RewardItem(prompt="\u00fc\u4e2d\U0001f600", completion="\u00fc\u4e2d\U0001f600\x00", answer="\u00fc"),
            RewardItem(prompt="2+2=", completion="5\n4", completion_turns=_SESSION, answer="4"),
        ]
        scores = [(await self._score([write_item(item)]))[0] for item in items]
        return "empty, without an answer, beyond ASCII, of two turns: " + ", ".join(_brief(score) for score in scores)

    async def takes_long_completion(self) -> str:
        item = RewardItem(prompt="2+2=", completion="word " * (LONG_COMPLETION_CHARACTERS // 5), answer="4")
        score = (await self._score([write_item(item)]))[0]
        return f"{LONG_COMPLETION_CHARACTERS} characters: {_brief(score)}"

    async def refuses_empty_batch(self) -> str:
        try:
            await self._score([])
        except InvalidFieldError:
            return "INVALID_ARGUMENT"
        raise ViolationError("an empty batch must be refused with INVALID_ARGUMENT, but was answered")

    async def handles_oversized_batch(self) -> str:
        num_items = self._max_batch_size + 1
        if num_items > MAX_PROBED_BATCH_SIZE:
            raise Note(f"not probed: batches may hold {self._max_batch_size} items")
        try:
            await self._score([_item(number) for number in range(num_items)])
        except PenstockError as error:
            if not isinstance(error, InvalidFieldError) and not error.is_retryable:
                raise ViolationError(f"{num_items} items must be answered, or refused cleanly: {error}") from error
            return f"{num_items} items are refused: {error.reason}"
        return f"{num_items} items are answered"

    async def survives_deadline(self) -> str:
        request = reward_pb2.ScoreRequest(items=[_item(number) for number in range(self._max_batch_size)])
        try:
            await call(self._stub.Score, request, peer=self._target, timeout_s=0.001)
        except DeadlineError:
            await self._score([_item(1)])
            return "answers on after a call that ran out of time"
        await self._score([_item(1)])
        return "answered within a millisecond"

    async def _score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[types_pb2.Score]:
        request = reward_pb2.ScoreRequest(items=items)
        if self._wants_token_ids:
            for item in request.items:
                item.token_ids = _made_up_tokens(item.completion_text)
        response = await call(self._stub.Score, request, peer=self._target, timeout_s=self._timeout_s)
        if len(response.scores) != len(items):
            raise ViolationError(f"{len(items)} items were sent, {len(response.scores)} scores came back")
        for index, score in enumerate(response.scores):
            if (problem := check_score(score)) is not None:
                raise ViolationError(f"score {index}: {problem}")
        return list(response.scores)


def _item(number: int) -> reward_pb2.ScoreItem:
    # Right and wrong answers of different lengths, so that most rewards tell neighbours apart.
    working = "so " * (number % 8) ** 2
    shown = number if number % 3 else number + 1
    item = RewardItem(
        prompt=f"{number}+0=", completion=f"{working}{number}+0={shown}\n#### {shown}", answer=str(number)
    )
    return write_item(item)


def _made_up_tokens(text: str) -> bytes:
    # Words in place of tokens, equal for equal words: only a model's own tokenizer makes its ids.
    return int32_bytes([zlib.crc32(word.encode()) % 1000 for word in text.split()])


def _has_erred(*scores: types_pb2.Score) -> bool:
    return any(score.status in GRADER_ERRORS for score in scores)


def _alike(one: types_pb2.Score, other: types_pb2.Score) -> bool:
    return one.status == other.status and math.isclose(one.value, other.value, rel_tol=1e-4, abs_tol=1e-6)


def _brief(score: types_pb2.Score) -> str:
    return f"{score.value:.6g}" if score.HasField("value") else _status(score)


def _status(score: types_pb2.Score) -> str:
    return types_pb2.ScoreStatus.Name(score.status).removeprefix("SCORE_STATUS_")

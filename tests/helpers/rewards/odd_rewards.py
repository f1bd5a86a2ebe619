"""Every kind of answer that a reward model should not give: one sample's completion names the kind.

`judge`, `judge_async` and `Batch` are the same reward as a function, as a coroutine function and as a class.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from penstock.rewards import BatchReward, RewardResult, ScoreStatus, UnscorableError

SURROGATE = "\udcff"
HUGE = "x" * 5_000_000
GOOD = "good"
"""The completion that scores 1.0."""


class _Raises:
    """Raises wherever it is looked at."""

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self._error = error

    def _fail(self, *_: object) -> Any:
        raise self._error(SURROGATE)

    __repr__ = __str__ = __float__ = __len__ = __iter__ = __bool__ = __eq__ = _fail
    __hash__ = object.__hash__


class _SilentError(Exception):
    """Has no text: `str` and `repr` of it raise."""

    def __str__(self) -> str:
        raise ValueError(SURROGATE)

    __repr__ = __str__


class _OddFloat(float):
    def __float__(self) -> float:
        raise ValueError("no number after all")


class _ExitingText(str):
    def __str__(self) -> str:
        raise SystemExit(3)


class _EndlessMapping(Mapping[str, float]):
    """More components than can ever be listed."""

    def __getitem__(self, key: str) -> float:
        return 0.0

    def __len__(self) -> int:
        return 1 << 40

    def __iter__(self) -> Any:
        return (str(number) for number in range(1 << 40))


class _RaisingMapping(_EndlessMapping):
    def __iter__(self) -> Any:
        raise KeyError(SURROGATE)


def _huge_int() -> int:
    return 10**6000


def _raised(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def _nested() -> Any:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def _recurse() -> Any:
    return _recurse()


OK, ABSTAINED, TIMEOUT, FAILED, INVALID = "OK", "ABSTAINED", "TIMEOUT", "FAILED", "INVALID"

RETURNED: dict[str, tuple[Callable[[], Any], str]] = {
    "nan": (lambda: math.nan, FAILED),
    "infinity": (lambda: -math.inf, FAILED),
    "text": (lambda: "1.0", FAILED),
    "bytes": (lambda: b"1.0", FAILED),
    "bytearray": (lambda: bytearray(b"1"), FAILED),
    "text with a lone surrogate": (lambda: SURROGATE, FAILED),
    "huge text": (lambda: HUGE, FAILED),
    "complex": (lambda: 1j, FAILED),
    "dict": (lambda: {"value": 1.0}, FAILED),
    "list": (lambda: [1.0], FAILED),
    "deep list": (_nested, FAILED),
    "set": (lambda: {1.0}, FAILED),
    "function": (lambda: print, FAILED),
    "class": (lambda: RewardResult, FAILED),
    "an exception, not raised": (lambda: ValueError(SURROGATE), FAILED),
    "huge integer": (_huge_int, FAILED),
    "decimal signalling nan": (lambda: Decimal("sNaN"), FAILED),
    "object that raises everywhere": (_Raises, FAILED),
    "object that exits everywhere": (lambda: _Raises(SystemExit), FAILED),
    "object that interrupts everywhere": (lambda: _Raises(KeyboardInterrupt), FAILED),
    "float whose conversion raises": (lambda: _OddFloat(1.0), FAILED),
    "none": (lambda: None, ABSTAINED),
    "fraction": (lambda: Fraction(1, 2), OK),
    "true": (lambda: True, OK),
    "value text": (lambda: RewardResult("1.0"), FAILED),  # type: ignore[arg-type]
    "value that raises": (lambda: RewardResult(_Raises()), FAILED),  # type: ignore[arg-type]
    "value huge integer": (lambda: RewardResult(_huge_int()), FAILED),
    "components none": (lambda: RewardResult(1.0, None), OK),  # type: ignore[arg-type]
    "components list": (lambda: RewardResult(1.0, [("a", 1.0)]), FAILED),  # type: ignore[arg-type]
    "components that raise": (lambda: RewardResult(1.0, _RaisingMapping()), FAILED),
    "components object": (lambda: RewardResult(1.0, _Raises()), FAILED),  # type: ignore[arg-type]
    "endless components": (lambda: RewardResult(1.0, _EndlessMapping()), OK),
    "component nan": (lambda: RewardResult(1.0, {"a": math.nan}), FAILED),
    "component none": (lambda: RewardResult(1.0, {"a": None}), FAILED),  # type: ignore[dict-item]
    "component that raises": (lambda: RewardResult(1.0, {"a": _Raises()}), FAILED),  # type: ignore[dict-item]
    "component's name a lone surrogate": (lambda: RewardResult(1.0, {SURROGATE: 1.0}), OK),
    "component's name huge": (lambda: RewardResult(1.0, {HUGE: 1.0}), OK),
    "component's name that raises": (lambda: RewardResult(1.0, {_Raises(): 1.0}), OK),  # type: ignore[dict-item]
    "status ok as text": (lambda: RewardResult(1.0, status="ok"), OK),  # type: ignore[arg-type]
    "status failed as text": (lambda: RewardResult(status="failed"), FAILED),  # type: ignore[arg-type]
    "status unknown": (lambda: RewardResult(1.0, status="fine"), FAILED),  # type: ignore[arg-type]
    "status number": (lambda: RewardResult(1.0, status=200), FAILED),  # type: ignore[arg-type]
    "status list": (lambda: RewardResult(1.0, status=[]), FAILED),  # type: ignore[arg-type]
    "status none": (lambda: RewardResult(1.0, status=None), FAILED),  # type: ignore[arg-type]
    "message exception": (lambda: RewardResult(message=ValueError("why")), ABSTAINED),  # type: ignore[arg-type]
    "message that raises": (
        lambda: RewardResult(status=ScoreStatus.INVALID, message=_Raises()),  # type: ignore[arg-type]
        INVALID,
    ),
    "message none": (lambda: RewardResult(status=ScoreStatus.TIMEOUT, message=None), TIMEOUT),  # type: ignore[arg-type]
    "message bytes": (lambda: RewardResult(message=b"\xff"), ABSTAINED),  # type: ignore[arg-type]
    "message with a lone surrogate": (lambda: RewardResult(message=SURROGATE), ABSTAINED),
    "message huge, of surrogates": (lambda: RewardResult(message=SURROGATE * 1_000_000), ABSTAINED),
    "message whose str exits": (lambda: RewardResult(message=_ExitingText("left")), ABSTAINED),
}

RAISED: dict[str, tuple[Callable[[], Any], str]] = {
    "error with a lone surrogate": (_raised(ValueError(SURROGATE)), FAILED),
    "error of bytes that are no utf-8": (lambda: b"\xff".decode("utf-8"), FAILED),
    "huge error": (_raised(ValueError(HUGE)), FAILED),
    "error whose str raises": (_raised(_SilentError()), FAILED),
    "error that holds what raises": (_raised(ValueError(_Raises())), FAILED),
    "unscorable with a lone surrogate": (_raised(UnscorableError(SURROGATE)), INVALID),
    "unscorable that raises": (_raised(UnscorableError(_Raises())), INVALID),
    "encoding error": (lambda: SURROGATE.encode(), FAILED),
    "group of errors": (_raised(ExceptionGroup("several", [ValueError(SURROGATE)])), FAILED),
    "stop iteration": (_raised(StopIteration(SURROGATE)), FAILED),
    "system exit": (_raised(SystemExit(SURROGATE)), FAILED),
    "keyboard interrupt": (_raised(KeyboardInterrupt()), FAILED),
    "cancelled": (_raised(asyncio.CancelledError()), FAILED),
    "cancelled future": (_raised(concurrent.futures.CancelledError()), FAILED),
    "memory error": (_raised(MemoryError()), FAILED),
    "recursion": (_recurse, FAILED),
}

KINDS = {**RETURNED, **RAISED}


def judge(completion: str) -> Any:
    """1.0 for `GOOD`, else the odd answer that the completion names."""
    return 1.0 if completion == GOOD else KINDS[completion][0]()


async def judge_async(completion: str) -> Any:
    """`judge`, as a coroutine function."""
    return judge(completion)


class Batch(BatchReward):
    """`judge` for what is returned; a class that raises fails its batch."""

    async def score(self, items: Any) -> Any:
        """One answer an item, as a generator."""
        return (judge(item.completion) for item in items)

"""Turns anything that a user's reward model returned or raised into a result that the wire can carry.

Promise: nothing in here raises for any object, so that an unusable answer fails its own sample and no other.
Users' objects run code when they are converted or printed; every such call is guarded, and all text comes out as valid
UTF-8 of bounded length.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from itertools import islice

from penstock.rewards.types import RewardResult, ScoreStatus, UnscorableError
from penstock.wire.score_rules import MAX_DETAIL_CHARACTERS, MAX_DETAILS, MAX_REWARD, is_reward

MAX_MESSAGE_CHARACTERS = 1024
MAX_COMPONENTS = 32
MAX_NAME_CHARACTERS = 64

_MAX_SHOWN_CHARACTERS = 100


def read_outcome(outcome: object) -> RewardResult:
    """The result for `outcome`: a number, a RewardResult, or None to abstain.

    Returns: a consistent result of plain floats and bounded text; status FAILED, with the reason, for anything else.
    """
    try:
        return _read(outcome if isinstance(outcome, RewardResult) else RewardResult(outcome))  # type: ignore[arg-type]
    except _MalformedError as error:
        return RewardResult(status=ScoreStatus.FAILED, message=clean_text(error))
    except BaseException as error:  # users' objects may raise anything when they are looked at, SystemExit too
        return RewardResult(status=ScoreStatus.FAILED, message=clean_text(f"unreadable answer: {describe(error)}"))


def read_error(error: BaseException, *, name: str) -> RewardResult:
    """The result of a sample whose scoring raised `error`; `name` is the reward model's."""
    if isinstance(error, UnscorableError):
        return RewardResult(status=ScoreStatus.INVALID, message=clean_text(error))
    return RewardResult(status=ScoreStatus.FAILED, message=clean_text(f"{name} raised {describe(error)}"))


def describe(error: BaseException) -> str:
    """Type and text of an exception, of at most `MAX_MESSAGE_CHARACTERS` characters."""
    return clean_text(f"{type(error).__name__}: {clean_text(error)}")


def clean_text(value: object, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """`str(value)` as valid UTF-8 of at most `limit` characters; what cannot be encoded is escaped."""
    try:
        text = str.__str__(value) if isinstance(value, str) else str(value)
    except BaseException as error:
        text = f"<{type(value).__name__} whose text cannot be read: {type(error).__name__}>"
    return text[:limit].encode("utf-8", "backslashreplace").decode("utf-8")[:limit]


def is_own_cancellation(error: BaseException) -> bool:
    """Whether `error` is what cancels the current task, not a CancelledError that a user's code raised by itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


class _MalformedError(Exception):
    """An answer that breaks the interface; the message says how."""


def _read(result: RewardResult) -> RewardResult:
    status = _read_status(result.status)
    message = "" if result.message is None else clean_text(result.message)
    if status is not ScoreStatus.OK:
        return RewardResult(status=status, message=message or status.value)
    if result.value is None:
        return RewardResult(status=ScoreStatus.ABSTAINED, message=message or "the reward model abstained")
    rule = f"the reward must be None or a finite number of at most {MAX_REWARD:g} in magnitude"
    value = _finite(result.value, rule)
    if not is_reward(value):
        raise _MalformedError(f"{rule}, got {_shown(result.value)}")
    details = _read_details(result.details)
    return RewardResult(value, _read_components(result.components), message=message, details=details)


def _read_status(status: object) -> ScoreStatus:
    if isinstance(status, str) and status in list(ScoreStatus):
        return ScoreStatus(status)
    raise _MalformedError(f"status must be one of {', '.join(ScoreStatus)}, got {_shown(status)}")


def _read_components(components: object) -> dict[str, float]:
    if components is None:
        return {}
    if not isinstance(components, Mapping):
        raise _MalformedError(f"components must map names to numbers, got {_shown(components)}")
    read = {}
    for name, part in islice(components.items(), MAX_COMPONENTS):
        read[clean_text(name, MAX_NAME_CHARACTERS)] = _finite(part, f"component {_shown(name)} must be a finite number")
    return read


def _read_details(details: object) -> dict[str, str]:
    if not isinstance(details, Mapping):
        raise _MalformedError(f"details must map names to texts, got {_shown(details)}")
    return {
        clean_text(name, MAX_NAME_CHARACTERS): clean_text(text, MAX_DETAIL_CHARACTERS)
        for name, text in islice(details.items(), MAX_DETAILS)
    }


def _finite(value: object, rule: str) -> float:
    """The float that `value` converts to. numpy's and torch's scalars do; text does too, and is refused."""
    number = math.nan
    if not isinstance(value, str | bytes | bytearray):
        try:
            number = float(value)  # type: ignore[arg-type]
        except BaseException as error:
            raise _MalformedError(f"{rule}, got {_shown(value)} ({describe(error)[:_MAX_SHOWN_CHARACTERS]})") from error
    if not math.isfinite(number):
        raise _MalformedError(f"{rule}, got {_shown(value)}")
    return number


def _shown(value: object) -> str:
    try:
        return clean_text(repr(value), _MAX_SHOWN_CHARACTERS)
    except BaseException:
        return f"a {type(value).__name__}"

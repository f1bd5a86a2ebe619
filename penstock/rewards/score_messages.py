"""Converts between wire messages and the SDK's values.

Invariant: every Score that leaves here is one the broker accepts: a finite value if and only if OK, bounded text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from penstock.errors import InvalidFieldError
from penstock.rewards.outcomes import MAX_COMPONENTS, MAX_NAME_CHARACTERS, clean_text, read_outcome
from penstock.rewards.types import RewardItem, RewardResult, ScoreStatus, Turn
from penstock.v1 import reward_pb2, types_pb2
from penstock.wire.codec import int32_array
from penstock.wire.score_rules import MAX_REWARD, details_problem, is_reward

THIRD_PARTY = "grpc://"
"""Scheme of reward models that are shown PENSTOCK_JUDGE_*, never the cluster's credentials."""
CREDENTIALS_HINT = "it is shown PENSTOCK_JUDGE_TOKEN and PENSTOCK_JUDGE_TLS_*, never the cluster's own credentials"
MAX_METADATA_BYTES = 64 * 1024
ASSISTANT, ENVIRONMENT = "assistant", "environment"
"""Roles of a completion's turns: what the model wrote, and what its environment gave it to read."""

GRADER_ERRORS = frozenset(
    {
        types_pb2.SCORE_STATUS_TIMEOUT,
        types_pb2.SCORE_STATUS_FAILED,
        types_pb2.SCORE_STATUS_SANDBOX_ERROR,
        types_pb2.SCORE_STATUS_JUDGE_ERROR,
        types_pb2.SCORE_STATUS_ENVIRONMENT_ERROR,
    }
)
"""Statuses that say that the grader failed: its sandbox, judge or environment, it raised, or it took too long."""

_STATUS_TO_WIRE = {status: types_pb2.ScoreStatus.Value(f"SCORE_STATUS_{status.name}") for status in ScoreStatus}


def read_item(message: reward_pb2.ScoreItem) -> RewardItem:
    """The sample behind a ScoreItem. Raises InvalidFieldError naming what is malformed."""
    turns = _read_turns(message.messages)
    said = _read_turns(message.completion_turns) or (Turn(role=ASSISTANT, content=message.completion_text),)
    prompt = message.prompt_text or "\n".join(f"{turn.role}: {turn.content}" for turn in turns)
    return RewardItem(
        prompt=prompt,
        completion=message.completion_text,
        answer=message.answer,
        metadata=_read_metadata(message.metadata_json),
        messages=turns,
        completion_turns=said,
        token_ids=int32_array(message.token_ids, "token_ids").tolist(),
        is_truncated=message.finish_reason == types_pb2.FINISH_REASON_LENGTH,
        run_id=message.run_id,
        must_be_fresh=message.must_be_fresh,
        traceparent=message.traceparent,
    )


def write_item(item: RewardItem) -> reward_pb2.ScoreItem:
    """A ScoreItem of the sample's texts, answer and metadata."""
    return reward_pb2.ScoreItem(
        prompt_text="" if item.messages else item.prompt,
        messages=_write_turns(item.messages),
        completion_text=item.completion,
        completion_turns=_write_turns(item.completion_turns),
        answer=item.answer,
        metadata_json=json.dumps(dict(item.metadata)) if item.metadata else "",
        finish_reason=types_pb2.FINISH_REASON_LENGTH if item.is_truncated else types_pb2.FINISH_REASON_STOP,
        run_id=item.run_id,
        must_be_fresh=item.must_be_fresh,
        traceparent=item.traceparent,
    )


def write_score(result: object, *, model: str) -> types_pb2.Score:
    """The Score for `result`; an inconsistent RewardResult becomes FAILED. Never raises."""
    read = read_outcome(result)
    score = types_pb2.Score(
        status=_STATUS_TO_WIRE[read.status], model=clean_text(model, MAX_NAME_CHARACTERS), message=read.message
    )
    if read.status is ScoreStatus.OK and read.value is not None:
        score.value = read.value
        score.message = ""
        score.components.update(read.components)
        score.details.update(read.details)
    return score


def check_score(score: types_pb2.Score) -> str | None:
    """What is malformed in a received Score, or None."""
    if score.status not in _STATUS_TO_WIRE.values():
        return f"status {score.status} is not one of {', '.join(status.name for status in ScoreStatus)}"
    if (score.status == types_pb2.SCORE_STATUS_OK) != score.HasField("value"):
        return "value must be set if and only if status is OK"
    if score.HasField("value") and not is_reward(score.value):
        return f"value must be finite and at most {MAX_REWARD:g} in magnitude, got {score.value}"
    return _check_components(score) or details_problem(score)


def _check_components(score: types_pb2.Score) -> str | None:
    if len(score.components) > MAX_COMPONENTS:
        return f"at most {MAX_COMPONENTS} components, got {len(score.components)}"
    if any(len(name) > MAX_NAME_CHARACTERS for name in score.components):
        return f"names of components must have at most {MAX_NAME_CHARACTERS} characters"
    if not all(math.isfinite(part) for part in score.components.values()):
        return "components must be finite"
    return None


def failed_score(message: str, *, model: str, status: ScoreStatus = ScoreStatus.FAILED) -> types_pb2.Score:
    """A Score without a value."""
    return write_score(RewardResult(status=status, message=message), model=model)


def _read_turns(messages: Iterable[types_pb2.ChatMessage]) -> tuple[Turn, ...]:
    return tuple(Turn(role=turn.role, content=turn.content) for turn in messages)


def _write_turns(turns: Iterable[Turn]) -> list[types_pb2.ChatMessage]:
    return [types_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in turns]


def _read_metadata(text: str) -> dict[str, Any]:
    if not text:
        return {}
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidFieldError(f"metadata_json: longer than {MAX_METADATA_BYTES} bytes", field="metadata_json")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(f"metadata_json: not valid JSON: {error}", field="metadata_json") from error
    if not isinstance(value, dict):
        raise InvalidFieldError("metadata_json: must be one JSON object", field="metadata_json")
    return value

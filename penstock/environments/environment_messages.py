"""Converts between wire messages and the SDK's values, and says what a message of an environment may hold.

Invariant: every StepResponse that leaves here is one that generators accept; an outcome that is not becomes FAILED.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.environments.environment import EnvironmentFactory
from penstock.environments.types import Action, Message, Opening, Outcome, ScoreStatus, Task, ToolCall
from penstock.errors import InvalidFieldError
from penstock.rewards.outcomes import MAX_NAME_CHARACTERS, clean_text
from penstock.rewards.score_messages import read_item, write_score
from penstock.rewards.types import RewardItem, RewardResult
from penstock.v1 import environment_pb2, reward_pb2, types_pb2
from penstock.wire.codec import int32_array

MAX_MESSAGES = 64
"""Of one answer."""
MAX_MESSAGES_BYTES = 1024 * 1024
"""Of all messages of one answer."""
MAX_TOOLS_BYTES = 256 * 1024
MAX_TURNS = 4096
MAX_SESSION_ID_CHARACTERS = 512
ROLES = ("user", "tool", "system")
"""Of an environment's messages; the model alone is the assistant."""


def messages_problem(messages: Sequence[types_pb2.ChatMessage], *, is_needed: bool) -> str | None:
    """What is wrong with the messages of an answer, or None; at least one `is_needed` where a turn follows."""
    if len(messages) > MAX_MESSAGES:
        return f"messages: {len(messages)} messages; at most {MAX_MESSAGES} are allowed"
    if is_needed and not messages:
        return "messages: empty; an answer that is not done must say something"
    for message in messages:
        if message.role not in ROLES:
            return f"messages.role: {message.role[:40]!r}; must be one of {', '.join(ROLES)}"
    num_bytes = sum(len(message.content.encode()) for message in messages)
    if num_bytes > MAX_MESSAGES_BYTES:
        return f"messages: {num_bytes} bytes; at most {MAX_MESSAGES_BYTES} are allowed"
    return None


def read_task(request: environment_pb2.ResetRequest) -> Task:
    """The task of a ResetRequest. Raises InvalidFieldError naming what is malformed."""
    if not 0 < len(request.session_id) <= MAX_SESSION_ID_CHARACTERS:
        raise InvalidFieldError(
            f"session_id: {len(request.session_id)} characters; must be 1 to {MAX_SESSION_ID_CHARACTERS}",
            field="session_id",
        )
    row: RewardItem = read_item(
        reward_pb2.ScoreItem(
            prompt_text=request.prompt_text,
            messages=request.messages,
            answer=request.answer,
            metadata_json=request.metadata_json,
        )
    )
    return Task(
        prompt=row.prompt,
        messages=tuple(Message(role=turn.role, content=turn.content) for turn in row.messages),
        answer=row.answer,
        metadata=row.metadata,
        seed=request.seed,
        is_evaluation=request.purpose == types_pb2.PURPOSE_EVALUATE,
        session_id=request.session_id,
        run_id=request.run_id,
    )


def write_opening(opening: object) -> environment_pb2.ResetResponse:
    """The ResetResponse for what `reset` returned. Raises InvalidFieldError if it is none."""
    if opening is None:
        return environment_pb2.ResetResponse()
    if not isinstance(opening, Opening):
        raise InvalidFieldError(f"reset returned {type(opening).__name__}; must be an Opening or None", field="reset")
    response = environment_pb2.ResetResponse(
        messages=_write_messages(opening.messages), max_turns=min(MAX_TURNS, opening.max_turns or 0)
    )
    if problem := messages_problem(response.messages, is_needed=False):
        raise InvalidFieldError(f"reset: {problem}", field="messages")
    return response


def read_action(request: environment_pb2.StepRequest) -> Action:
    """The turn of a StepRequest. Raises InvalidFieldError."""
    return Action(
        text=request.text,
        turn=request.turn,
        tool_calls=tuple(ToolCall(name=call.name, arguments_json=call.arguments_json) for call in request.tool_calls),
        is_truncated=request.finish_reason == types_pb2.FINISH_REASON_LENGTH,
        token_ids=int32_array(request.token_ids, "token_ids").tolist(),
    )


def write_outcome(outcome: object, *, name: str) -> environment_pb2.StepResponse:
    """The StepResponse for what `step` returned; FAILED, with the reason, for anything unusable. Never raises."""
    try:
        return _write_outcome(outcome, name)
    except InvalidFieldError as error:
        return failed(str(error))
    except Exception as error:  # users' objects may raise anything when they are looked at
        return failed(f"unreadable outcome: {type(error).__name__}: {clean_text(error)}")


def failed(message: str, *, status: ScoreStatus = ScoreStatus.FAILED) -> environment_pb2.StepResponse:
    """The answer to a turn after which nothing can be scored."""
    return environment_pb2.StepResponse(
        done=True,
        status=types_pb2.ScoreStatus.Value(f"SCORE_STATUS_{status.name}"),
        message=clean_text(message),
    )


def describe_environment(factory: EnvironmentFactory, *, max_sessions: int) -> environment_pb2.GetEnvironmentResponse:
    """What a factory's attributes say. Raises InvalidFieldError if its tools are no JSON, or too large."""
    tools = list(getattr(factory, "tools", ()))
    try:
        tools_json = json.dumps(tools) if tools else ""
    except (TypeError, ValueError) as error:
        raise InvalidFieldError(f"tools: cannot be written as JSON: {error}", field="tools") from error
    if len(tools_json) > MAX_TOOLS_BYTES:
        raise InvalidFieldError(f"tools: {len(tools_json)} bytes; at most {MAX_TOOLS_BYTES} are allowed", field="tools")
    name = getattr(factory, "name", "") or getattr(factory, "__name__", type(factory).__name__)
    return environment_pb2.GetEnvironmentResponse(
        name=clean_text(name, MAX_NAME_CHARACTERS),
        version=clean_text(getattr(factory, "version", "")),
        wants_token_ids=bool(getattr(factory, "wants_token_ids", False)),
        opens=bool(getattr(factory, "opens", False)),
        max_sessions=max_sessions,
        tools_json=tools_json,
    )


def read_tools(tools_json: str) -> list[dict[str, Any]] | None:
    """The tools of a description; None if it has none. Raises InvalidFieldError."""
    if not tools_json:
        return None
    if len(tools_json) > MAX_TOOLS_BYTES:
        problem = f"{len(tools_json)} bytes; at most {MAX_TOOLS_BYTES} are allowed"
        raise InvalidFieldError(f"tools_json: {problem}", field="tools_json")
    try:
        found = json.loads(tools_json)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(f"tools_json: not valid JSON: {error}", field="tools_json") from error
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise InvalidFieldError("tools_json: must be a JSON list of objects", field="tools_json")
    return found


def _write_outcome(outcome: object, name: str) -> environment_pb2.StepResponse:
    if not isinstance(outcome, Outcome):
        raise InvalidFieldError(f"step returned {type(outcome).__name__}; must be an Outcome", field="step")
    if outcome.status is not ScoreStatus.OK:
        return failed(outcome.message or str(outcome.status), status=ScoreStatus(outcome.status))
    # Checked as a reward model's answer is; 0 stands in where a turn has no reward of its own.
    read = write_score(
        RewardResult(outcome.reward if outcome.reward is not None else 0.0, outcome.components), model=name
    )
    if read.status != types_pb2.SCORE_STATUS_OK:
        raise InvalidFieldError(read.message, field="reward")
    is_done = bool(outcome.is_done)
    response = environment_pb2.StepResponse(
        messages=() if is_done else _write_messages(outcome.messages),
        reward=read.value if outcome.reward is not None else None,
        done=is_done,
        status=types_pb2.SCORE_STATUS_OK,
        components=read.components,
        message=clean_text(outcome.message),
    )
    if problem := messages_problem(response.messages, is_needed=not is_done):
        raise InvalidFieldError(problem, field="messages")
    return response


def _write_messages(messages: Iterable[Message]) -> list[types_pb2.ChatMessage]:
    written: list[types_pb2.ChatMessage] = []
    for message in messages:
        if len(written) > MAX_MESSAGES:
            break
        # The size of a message is judged after this, so nothing is cut here.
        content = clean_text(message.content, limit=MAX_MESSAGES_BYTES + 1)
        written.append(types_pb2.ChatMessage(role=clean_text(message.role, 64), content=content))
    return written


def answer_problem(response: environment_pb2.StepResponse) -> str | None:
    """What is wrong with a received answer, or None: servers in any language are held to the same rules."""
    if response.status not in (types_pb2.SCORE_STATUS_UNSPECIFIED, types_pb2.SCORE_STATUS_OK):
        return None if response.status in types_pb2.ScoreStatus.values() else f"status: {response.status}; unknown"
    if response.HasField("reward") and not math.isfinite(response.reward):
        return f"reward: {response.reward}; must be finite"
    if any(not math.isfinite(part) for part in response.components.values()):
        return "components: must be finite"
    return None if response.done else messages_problem(response.messages, is_needed=True)

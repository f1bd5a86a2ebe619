"""Recognises the columns of a data row: our own names, and those of TRL's, verl's and slime's data sets. Pure.

| shape | prompt | answer |
|---|---|---|
| TRL messages | `messages` up to the last turn | the assistant's last turn, or an answer column |
| verl | `prompt` | `reward_model.ground_truth` |
| slime | `prompt` | `label`, with `metadata` |
| NeMo Gym | `responses_create_params.input` | none: the environment's server knows it |
| plain | `prompt`, `question` or `problem` | `answer`, `label`, `ground_truth` or `solution` |

All shapes may have `tools`. Columns that are neither prompt nor answer are metadata, under their own names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROMPT_KEYS = ("prompt", "question", "problem")
ANSWER_KEYS = ("answer", "label", "ground_truth", "solution")
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")
NEMO_GYM_KEY = "responses_create_params"
MAX_TOOLS = 256
MAX_TOOLS_CHARACTERS = 48 * 1024


class RowError(ValueError):
    """A row cannot be used; the message names the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What a row's columns are."""

    shape: str
    """In words."""
    prompt_key: str
    prompt: Any
    answer_key: str
    """Empty if there is no answer."""
    answer: Any
    tools_json: str
    """A JSON list in the form of OpenAI's `tools`; empty if there are none."""
    metadata: Mapping[str, Any]
    """The other columns."""


def read_columns(record: Mapping[str, Any]) -> Columns:
    """Raises RowError."""
    for key in MEDIA_KEYS:
        if record.get(key):
            raise RowError(f"{key}: prompts of text alone are trained on; leave it out")
    if isinstance(params := record.get(NEMO_GYM_KEY), Mapping):
        return _nemo_gym(record, params)
    prompt_key = _prompt_key(record)
    prompt = record[prompt_key]
    answer_key, answer = _answer(record)
    # Of a conversation that was recorded whole, the last turn is what a model should say.
    last = prompt[-1] if prompt_key == "messages" and isinstance(prompt, list) and prompt else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        if answer_key:
            raise RowError(
                f"messages: ends with the assistant's turn, and {answer_key} is an answer, too; leave one out"
            )
        answer_key, answer, prompt = "messages", last.get("content"), prompt[:-1]
    tools_json = _tools(record.get("tools"))
    if tools_json and isinstance(prompt, str):
        raise RowError(f"tools: are shown by the chat template, but {prompt_key} is text; make it a list of messages")
    return Columns(
        shape=_shape(record, prompt_key, answer_key),
        prompt_key=prompt_key,
        prompt=prompt,
        answer_key=answer_key,
        answer=answer,
        tools_json=tools_json,
        metadata={key: value for key, value in record.items() if key not in (prompt_key, answer_key)},
    )


def _has(record: Mapping[str, Any], key: str) -> bool:
    return record.get(key) not in (None, "")


def _nemo_gym(record: Mapping[str, Any], params: Mapping[str, Any]) -> Columns:
    """A row of NeMo Gym, all of which goes back to its server: in the form of OpenAI's Responses."""
    given = params.get("input")
    if given is None:
        raise RowError(f"{NEMO_GYM_KEY}.input: missing; it is the prompt")
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if isinstance(turns, list):
        turns = [{**turn, "role": "system"} if _role(turn) == "developer" else turn for turn in turns]
        if params.get("instructions"):
            turns = [{"role": "system", "content": params["instructions"]}, *turns]
    tools = [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        for tool in params.get("tools") or ()
        if isinstance(tool, Mapping)
    ]
    return Columns(
        shape="NeMo Gym (responses_create_params)",
        prompt_key=f"{NEMO_GYM_KEY}.input",
        prompt=turns,
        answer_key="",
        answer=None,
        tools_json=_tools(tools),
        metadata=record,
    )


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, Mapping) else None


def _prompt_key(record: Mapping[str, Any]) -> str:
    stated = [key for key in PROMPT_KEYS if _has(record, key)]
    if not _has(record, "messages"):
        if not stated:
            raise RowError(f"no {PROMPT_KEYS[0]}; give one of the columns {', '.join(PROMPT_KEYS)}, messages")
        # A row may have both a short prompt and a longer one: the first name in our order takes precedence.
        return stated[0]
    if stated and record[stated[0]] != record["messages"]:
        raise RowError(f"messages and {stated[0]}: two prompts that differ; leave one out")
    return "messages"


def _answer(record: Mapping[str, Any]) -> tuple[str, Any]:
    """The column of the answer and the answer; empty if none has one."""
    stated = next((key for key in ANSWER_KEYS if _has(record, key)), "")
    grading = record.get("reward_model")
    truth = grading.get("ground_truth") if isinstance(grading, Mapping) else None
    if truth in (None, ""):
        return stated, record.get(stated)
    if stated and record[stated] != truth:
        raise RowError(f"{stated} and reward_model.ground_truth: two answers that differ; leave one out")
    # Graders that need more than a text get it as JSON.
    is_plain = isinstance(truth, str | int | float) and not isinstance(truth, bool)
    return "reward_model.ground_truth", truth if is_plain else json.dumps(truth, default=str)


def _tools(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError(f"tools: not valid JSON: {error}") from error
    if not value:
        return ""
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise RowError("tools: must be a list of objects, or that as JSON text")
    text = json.dumps(value, default=str)
    if len(value) > MAX_TOOLS or len(text) > MAX_TOOLS_CHARACTERS:
        raise RowError(
            f"tools: {len(value)} tools of {len(text)} characters; at most {MAX_TOOLS} of {MAX_TOOLS_CHARACTERS} in all"
        )
    return text


def _shape(record: Mapping[str, Any], prompt_key: str, answer_key: str) -> str:
    if answer_key.startswith("reward_model"):
        return f"verl ({prompt_key}, {answer_key})"
    if prompt_key == "messages":
        return f"TRL messages, {answer_key}" if answer_key not in ("", "messages") else "TRL messages"
    if (prompt_key, answer_key) == ("prompt", "label") and isinstance(record.get("metadata"), Mapping):
        return "slime (prompt, label, metadata)"
    return f"{prompt_key}, {answer_key or 'no answer'}"

"""Reads the responses of OpenAI-compatible endpoints; every byte of them may be wrong."""

from __future__ import annotations

import json
from typing import Any

from penstock.rewards.outcomes import clean_text
from services.reward.judge.answer_cache import Answer
from services.reward.judge.verdicts import UnusableAnswerError

MAX_NAME_CHARACTERS = 128
_MAX_TOKENS = 10**9


def read_answer(body: bytes) -> Answer:
    """The answer in a chat completion. Raises UnusableAnswerError: it is none, is cut off, or the model refused."""
    document = _document(body)
    choices = document.get("choices")
    choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise UnusableAnswerError(f"the endpoint answered no chat completion of one choice: {_shown(body)}")
    if refusal := message.get("refusal"):
        raise UnusableAnswerError(f"the judge refused: {clean_text(refusal, 200)}")
    if choice.get("finish_reason") == "length":
        raise UnusableAnswerError("the answer was cut off at reward.judge.max_tokens")
    if not isinstance(message.get("content"), str):
        raise UnusableAnswerError(f"the endpoint's answer has no text: {_shown(body)}")
    return Answer(
        content=message["content"],
        model=clean_text(document.get("model") or "", MAX_NAME_CHARACTERS),
        fingerprint=clean_text(document.get("system_fingerprint") or "", MAX_NAME_CHARACTERS),
    )


def read_usage(body: bytes) -> tuple[int, int]:
    """Prompt and completion tokens that the response counts; 0 where it does not."""
    try:
        usage = _document(body).get("usage")
    except UnusableAnswerError:
        return 0, 0
    counts = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count if type(count) is int and 0 <= count < _MAX_TOKENS else 0 for count in counts)
    return prompt, completion


def read_error(body: bytes) -> str:
    """What an error response says, in words."""
    try:
        error = _document(body).get("error")
    except UnusableAnswerError:
        return _shown(body)
    message = error.get("message") if isinstance(error, dict) else error
    return clean_text(message, 200) if message else _shown(body)


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnusableAnswerError(f"the endpoint answered no JSON: {_shown(body)}") from error
    if not isinstance(document, dict):
        raise UnusableAnswerError(f"the endpoint answered no JSON object: {_shown(body)}")
    return document


def _shown(body: bytes) -> str:
    return clean_text(body[:200].decode("utf-8", "replace"), 200)

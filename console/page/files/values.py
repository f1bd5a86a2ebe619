"""Reads single values of files that may hold anything, and of questions that anybody may ask."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class BadQuestionError(ValueError):
    """A question cannot be answered; the message names the parameter, its value and what it may be."""


def whole(query: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = 2**53) -> int:
    """A whole number of a question. Raises BadQuestionError."""
    text = query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 16 or not least <= int(text) <= most:
        raise BadQuestionError(f"{name}: {text!r:.40} must be a whole number from {least} to {most}")
    return int(text)


def seconds(query: Mapping[str, str], name: str) -> float | None:
    """A time of a question, Unix seconds; None if it states none. Raises BadQuestionError."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadQuestionError(f"{name}: {text!r:.40} must be a time in Unix seconds")
    return value


def one_of(query: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """One of several words, the first by default. Raises BadQuestionError."""
    text = query.get(name) or choices[0]
    if text not in choices:
        raise BadQuestionError(f"{name}: {text!r:.40} must be one of {', '.join(choices)}")
    return text


def number(value: object) -> float | None:
    """A finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def count(value: object) -> int | None:
    """A whole number that JavaScript can hold, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def text(value: object, most: int = 1_000_000) -> str:
    """A text, cut to `most` characters; empty for anything else."""
    return value[:most].encode(errors="replace").decode() if isinstance(value, str) else ""


def mapping(value: object) -> Mapping[str, Any]:
    """An object, which parquet gives as pairs; empty for anything else."""
    if isinstance(value, list):
        value = {str(pair[0]): pair[1] for pair in value if isinstance(pair, tuple) and len(pair) == 2}
    return value if isinstance(value, dict) else {}


def numbers(value: object) -> list[float | None]:
    """A list of numbers, null where one is not finite; empty for anything else."""
    return [number(each) for each in value] if isinstance(value, list) else []


def read_json(path: Path, *, max_bytes: int = 16 * 1024 * 1024) -> Answer:
    """A JSON object of a small file; empty if there is none."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(max_bytes))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

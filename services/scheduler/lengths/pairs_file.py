"""Reads prompts and lengths that a run starts from: JSON lines, for example a recording of an earlier run.

A row has `prompt_token_ids` (list of int) or `prompt` (text), and `num_completion_tokens`, or `token_ids`, which are
counted. Other columns are ignored. Only the last MAX_ROWS rows are used.
"""

from __future__ import annotations

import json
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import ConfigError
from services.scheduler.lengths.length_model import log_tokens
from services.scheduler.lengths.prompt_features import PromptView, make_prompt

MAX_ROWS = 16_384
MAX_ROW_BYTES = 4 * 1024 * 1024
MAX_LENGTH_TOKENS = 1 << 24

Row = tuple[PromptView, float]


def read_pairs(path: Path) -> list[Row]:
    """Prompts and log lengths in file order. Blocks; raises ConfigError naming the line and the problem."""
    rows: deque[Row] = deque(maxlen=MAX_ROWS)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_ROW_BYTES + 1), b""), start=1):
                if len(line) > MAX_ROW_BYTES:
                    raise ConfigError(f"{path}:{number}: a row of more than {MAX_ROW_BYTES} bytes")
                if line.strip():
                    rows.append(_read(line, f"{path}:{number}"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: holds no rows")
    return list(rows)


def _read(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: must be an object with prompt_token_ids or prompt, and num_completion_tokens")
    token_ids, text = row.get("prompt_token_ids", []), row.get("prompt", "")
    if not isinstance(token_ids, list) or not all(_is_count(each, 2**31 - 1) for each in token_ids):
        raise ConfigError(f"{where}: prompt_token_ids: must be a list of token ids")
    if not isinstance(text, str) or not (text or token_ids):
        raise ConfigError(f"{where}: needs prompt_token_ids, or prompt as text")
    prompt = make_prompt(np.array(token_ids, dtype=np.uint32), text)
    return prompt, log_tokens(_length(row, where))


def _length(row: dict[str, Any], where: str) -> int:
    length = row.get("num_completion_tokens")
    if length is None and isinstance(row.get("token_ids"), list):
        length = len(row["token_ids"])
    if not _is_count(length, MAX_LENGTH_TOKENS):
        raise ConfigError(f"{where}: num_completion_tokens: must be 0 to {MAX_LENGTH_TOKENS}, got {length!r:.50}")
    assert isinstance(length, int)
    return length


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most

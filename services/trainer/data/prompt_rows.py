"""Data rows as users write them: JSONL or parquet, checked line by line. Light: no tokenizer, no torch.

A row has a prompt (text, or chat messages) and, if its reward compares with one, an answer, in the columns that
`row_shapes` knows. Every other column is metadata and passed on unread to the reward model. An unusable row raises a
DataError that names the file and the row; nothing is skipped silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import ConfigError
from penstock.wire.source_tag import MAX_TAG_BYTES
from services.trainer.data.row_shapes import ANSWER_KEYS, RowError, read_columns

ROLES = ("system", "user", "assistant", "tool")
MAX_METADATA_BYTES = 64 * 1024 - MAX_TAG_BYTES
MAX_ANSWER_CHARACTERS = 64 * 1024
MAX_ROW_BYTES = 1024 * 1024
_NESTED = ("tools", "messages", "prompt")


class DataError(ConfigError):
    """A data file cannot be used; the message names the file, the row and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat turn."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt with its reference answer."""

    prompt: str | tuple[Message, ...]
    """Plain text, or chat turns; the last one is not the assistant's."""
    answer: str
    """Reference answer; empty if there is none."""
    metadata_json: str
    """The other columns as one JSON object."""
    tools_json: str = ""
    """The tools that the chat template shows, a JSON list; empty if there are none."""
    shape: str = field(default="", compare=False)
    """Which columns it was read from, in words."""


def read_rows(path: Path, *, needs_answer: str = "") -> list[Row]:
    """All rows of a data file, in file order. Raises DataError.

    `needs_answer` names a reward that compares with answers; a row without one is then unusable.
    """
    try:
        is_there, is_file = path.exists(), path.is_file()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; give a JSONL or parquet file of rows") from error
    if not is_there:
        raise DataError(f"{path}: no such file; give a JSONL or parquet file of rows with prompt and answer")
    if not is_file:
        raise DataError(f"{path}: not a file; give a JSONL or parquet file of rows with prompt and answer")
    records = _parquet_records(path) if path.suffix == ".parquet" else _json_records(path)
    rows = [_row(where, record, needs_answer) for where, record in records]
    if not rows:
        raise DataError(f"{path}: holds no rows")
    return rows


def _json_records(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), start=1):
                where = f"{path}, line {number}"
                if len(line) > MAX_ROW_BYTES:
                    raise DataError(f"{where}: longer than {MAX_ROW_BYTES} bytes")
                if line.strip():
                    yield where, json.loads(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    # Imported here because most users have JSONL and the command line must stay quick.
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    # A column of objects has every key of any row: those of others are null.
                    record |= {key: _without_nulls(record[key]) for key in _NESTED if record.get(key)}
                    yield f"{path}, row {number}", record
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _row(where: str, record: Any, needs_answer: str) -> Row:
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: must be an object with prompt and answer, found {type(record).__name__}")
    try:
        columns = read_columns(record)
    except RowError as error:
        raise DataError(f"{where}: {error}") from error
    answer = _answer(f"{where}: {columns.answer_key}", columns.answer) if columns.answer_key else ""
    if needs_answer and not answer:
        raise DataError(
            f"{where}: no answer, which the reward {needs_answer} needs; give one of the columns "
            f"{', '.join(ANSWER_KEYS)}, reward_model.ground_truth"
        )
    return Row(
        prompt=_prompt(f"{where}: {columns.prompt_key}", columns.prompt),
        answer=answer,
        metadata_json=_metadata(where, columns.metadata),
        tools_json=columns.tools_json,
        shape=columns.shape,
    )


def _prompt(where: str, value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: empty")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: must be text or a list of chat messages, found {type(value).__name__}")
    messages = tuple(_message(f"{where}[{index}]", item) for index, item in enumerate(value))
    if messages[-1].role == "assistant":
        raise DataError(f"{where}: ends with the assistant's turn; end with the turn it is to answer")
    return messages


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: must be an object with role and content, found {type(value).__name__}")
    role, content = value.get("role"), _content(where, value.get("content"))
    if role not in ROLES:
        raise DataError(f"{where}: role must be one of {', '.join(ROLES)}, found {role!r:.40}")
    if value.get("tool_calls"):
        raise DataError(f"{where}: tool_calls: turns of text alone can be part of a prompt; write the call as content")
    return Message(role=str(role), content=content)


def _content(where: str, value: Any) -> str:
    """Text, or parts that are all text."""
    if isinstance(value, list) and value:
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
        if not all(isinstance(part, str) for part in parts):
            raise DataError(f"{where}: content has a part that is not text; prompts of text alone are trained on")
        return "".join(map(str, parts))
    if not isinstance(value, str):
        raise DataError(f"{where}: content must be text, found {type(value).__name__}")
    return value


def _answer(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{where}: must be text or a number, found {type(value).__name__}")
    text = str(value) if str(value).strip() else ""
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise DataError(f"{where}: longer than {MAX_ANSWER_CHARACTERS} characters")
    return text


def _metadata(where: str, columns: Mapping[str, Any]) -> str:
    # Parquet columns may hold dates and decimals, which JSON lacks: they travel as text.
    text = json.dumps(columns, default=str, ensure_ascii=True)
    if len(text) > MAX_METADATA_BYTES:
        raise DataError(f"{where}: the other columns take {len(text)} bytes as JSON; at most {MAX_METADATA_BYTES}")
    return text

"""Data rows as users write them: JSONL or parquet, checked line by line. Light: no tokenizer, no torch.

A row has a prompt (`prompt`, `question` or `problem`; text, or chat messages) and, if its reward compares with one, an
answer (`answer`, `label`, `ground_truth` or `solution`). Every other column is metadata and passed on unread to the
reward model. An unusable row raises a DataError that names the file and the row; nothing is skipped silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import ConfigError
from penstock.wire.source_tag import MAX_TAG_BYTES

PROMPT_KEYS = ("prompt", "question", "problem")
ANSWER_KEYS = ("answer", "label", "ground_truth", "solution")
ROLES = ("system", "user", "assistant", "tool")
MAX_METADATA_BYTES = 64 * 1024 - MAX_TAG_BYTES
MAX_ANSWER_CHARACTERS = 64 * 1024
MAX_ROW_BYTES = 1024 * 1024


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


def read_rows(path: Path, *, needs_answer: str = "") -> list[Row]:
    """All rows of a data file, in file order. Raises DataError.

    `needs_answer` names a reward that compares with answers; a row without one is then unusable.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file; give a JSONL or parquet file of rows with prompt and answer")
    if not path.is_file():
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
                    yield f"{path}, row {number}", record
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file: {error}") from error


def _row(where: str, record: Any, needs_answer: str) -> Row:
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: must be an object with prompt and answer, found {type(record).__name__}")
    prompt_key = _first(record, PROMPT_KEYS)
    answer_key = _first(record, ANSWER_KEYS)
    if prompt_key is None:
        raise DataError(f"{where}: no prompt; give one of the columns {', '.join(PROMPT_KEYS)}")
    answer = "" if answer_key is None else _answer(f"{where}: {answer_key}", record[answer_key])
    if needs_answer and not answer:
        columns = ", ".join(ANSWER_KEYS)
        raise DataError(f"{where}: no answer, which the reward {needs_answer} needs; give one of the columns {columns}")
    metadata = {key: value for key, value in record.items() if key not in (prompt_key, answer_key)}
    return Row(
        prompt=_prompt(f"{where}: {prompt_key}", record[prompt_key]),
        answer=answer,
        metadata_json=_metadata(where, metadata),
    )


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of these columns that the row has: a row may have both a short answer and a long solution."""
    return next((name for name in names if record.get(name) not in (None, "")), None)


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
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise DataError(f"{where}: role must be one of {', '.join(ROLES)}, found {role!r:.40}")
    if not isinstance(content, str):
        raise DataError(f"{where}: content must be text, found {type(content).__name__}")
    return Message(role=str(role), content=content)


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

"""Reads the tokenizer and sizes of a model's Hugging Face folder, not its weights. Light: no transformers.

Generators and reward workers both decode completions here, so that the same token ids give the same text to the
character.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

TOKENIZER_FILE = "tokenizer.json"
MAX_JSON_BYTES = 64 * 1024 * 1024


class TextDecoder(Protocol):
    """Turns completion tokens into what a reward model reads."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole completion, special tokens left out."""


class FileTokenizer:
    """The tokenizer of a folder's tokenizer.json. Raises ValueError where there is none, or it is malformed."""

    def __init__(self, folder: Path) -> None:
        # Not above: most processes that import this package decode nothing, and do not have it.
        from tokenizers import Tokenizer

        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ValueError(f"{folder}: holds no {TOKENIZER_FILE}")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: not a tokenizer: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Every id it knows is below this."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `TextDecoder.decode`. An unknown id decodes to nothing."""
        # A batch of one: unlike `decode`, it releases the GIL.
        text: str = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)[0]
        return text


def model_size(folder: Path, key: str) -> int | None:
    """A positive number of config.json, for example `vocab_size`; None where there is none. Raises ValueError."""
    value = read_mapping(folder / "config.json").get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{folder / 'config.json'}: {key} must be a positive integer, not {value!r:.100}")
    return value


def read_mapping(path: Path) -> dict[str, object]:
    """A JSON file's mapping; empty where there is no such file. Raises ValueError."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path}: must hold a mapping")
    return document

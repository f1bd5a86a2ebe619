"""Reads the generator's part of the model's folder: end-of-sequence ids, and tokenizers of any kind.

Needs `tokenizers` only if the folder has a tokenizer.json, and `transformers` only for another kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from penstock.model.model_folder import TOKENIZER_FILE, FileTokenizer, TextDecoder, read_mapping


class IdText:
    """Token ids as decimal numbers, for models without a tokenizer (emulated ones)."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The ids, separated by spaces."""
        return " ".join(str(token_id) for token_id in token_ids)


class _HuggingFaceTokenizer:
    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def load_text_decoder(model_path: Path, *, is_tokenizer_needed: bool) -> TextDecoder:
    """The decoder of the model's own tokenizer; IdText if there is none and none is needed.

    Raises:
        OSError: The tokenizer is needed and cannot be read.
        ValueError: The tokenizer is malformed, or transformers does not know it.
    """
    if (model_path / TOKENIZER_FILE).is_file():
        return FileTokenizer(model_path)
    if is_tokenizer_needed or (model_path / "tokenizer_config.json").is_file():
        return _HuggingFaceTokenizer(model_path)
    return IdText()


def end_token_ids(model_path: Path) -> tuple[int, ...]:
    """The model's own end-of-sequence ids, from generation_config.json and config.json together; sorted.

    Raises:
        ValueError: A file exists but is malformed.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found.update(_eos_ids(model_path / name))
    return tuple(sorted(found))


def _eos_ids(path: Path) -> list[int]:
    value = read_mapping(path).get("eos_token_id")
    if value is None:
        return []
    ids = [token_id for token_id in (value if isinstance(value, list) else [value]) if _is_token_id(token_id)]
    if not ids or (isinstance(value, list) and len(ids) < len(value)):
        raise ValueError(f"{path}: eos_token_id must be a token id or a list of them, not {value!r:.100}")
    return ids


def _is_token_id(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0

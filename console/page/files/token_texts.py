"""Says what single tokens are as text, by the tokenizer of the run's model, where that is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

_FILE = "tokenizer.json"
MAX_BYTES = 64 * 1024 * 1024


class TokenTexts:
    """The tokens of one run, by the first tokenizer that is found in `folders` when it is needed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def of(self, ids: Sequence[int]) -> list[str | None]:
        """The text that each token adds, in order; null for all if no tokenizer is at hand.

        A token that ends in the middle of a character adds nothing, and the one that completes it all of it.
        """
        tokenizer = next((found for folder in self._folders if (found := _tokenizer(folder / _FILE))), None)
        if tokenizer is None:
            return [None] * len(ids)
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        size = tokenizer.get_vocab_size()
        return [(stream.step(tokenizer, each) or "") if 0 <= each < size else "" for each in ids]


def _tokenizer(path: Path) -> Any:
    try:
        found = path.stat()
    except OSError:
        return None
    return None if found.st_size > MAX_BYTES else _loaded(str(path), found.st_mtime_ns)


@lru_cache(maxsize=2)
def _loaded(path: str, _changed_ns: int) -> Any:
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(path)
    except Exception:  # tokenizers raises plain Exception, and a machine without the package shows ids alone
        return None

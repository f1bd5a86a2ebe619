"""The files of a tokenizer, copied from a model to its checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

TOKENIZER_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the tokenizer's files byte for byte, so that an export tokenises exactly like its origin."""
    for pattern in TOKENIZER_PATTERNS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and not (target / path.name).exists():
                shutil.copyfile(path, target / path.name)

"""Reduces a prompt to what forecasts see: its token ids or else its words, cut in the middle. Pure."""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import require
from penstock.v1 import scheduler_pb2 as pb

MAX_END_TOKENS = 512
MAX_END_CHARACTERS = 1024
"""Used length of each end: a task comes at the beginning or the end of its prompt, examples in between."""
MAX_GROUP_ID_CHARACTERS = 256
_WORD = re.compile(r"\d|[^\W\d]+|[^\w\s]")

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptView:
    """The known part of a prompt."""

    key: bytes
    """Equal for equal prompts; unique for a prompt of which only the group's name is known."""
    words: Words
    """Token ids or, without any, hashes of the text's words; [num_words], at most 2 * MAX_END_TOKENS."""
    num_tokens: int
    """Length of the whole prompt in tokens (in words if tokens are not known)."""
    text: str
    """Both ends of the text; empty if it is not known."""

    @property
    def has_content(self) -> bool:
        """Whether anything can be learned from it."""
        return len(self.words) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """A prompt and the lengths of its newest samples."""

    prompt: PromptView
    logs: tuple[float, ...]
    """Natural logarithms of the lengths in tokens, oldest first, at least one."""


def read_prompt(query: pb.LengthQuery) -> PromptView:
    """The prompt of a query. Raises InvalidFieldError."""
    num_characters, num_bytes = len(query.group_id), len(query.prompt_token_ids)
    most = MAX_GROUP_ID_CHARACTERS
    require(num_characters <= most, "group_id", num_characters, f"at most {most} characters")
    require(num_bytes % 4 == 0, "prompt_token_ids", num_bytes, "a multiple of 4 bytes, as int32[] is")
    token_ids = np.frombuffer(query.prompt_token_ids, dtype="<u4").astype(np.uint32)
    num_tokens = query.num_prompt_tokens or len(token_ids)
    return make_prompt(token_ids, query.prompt_text, num_tokens=num_tokens, group_id=query.group_id)


def make_prompt(token_ids: Words, text: str, *, num_tokens: int = 0, group_id: str = "") -> PromptView:
    """A prompt of these ids or else of this text; without either it is known by its group's name only."""
    text = _cut(text)
    words = _cut_ids(token_ids) if len(token_ids) else _hashed_words(text)
    num_tokens = num_tokens or len(token_ids) or len(words)
    # Ids and hashes of words never denote the same prompt.
    kind = b"ids" if len(token_ids) else b"words" if len(words) else b"group" + group_id.encode()
    digest = hashlib.blake2b(kind + num_tokens.to_bytes(8, "little") + words.tobytes(), digest_size=16)
    return PromptView(key=digest.digest(), words=words, num_tokens=num_tokens, text=text)


def _cut(text: str) -> str:
    return text if len(text) <= 2 * MAX_END_CHARACTERS else text[:MAX_END_CHARACTERS] + text[-MAX_END_CHARACTERS:]


def _cut_ids(ids: Words) -> Words:
    return ids if len(ids) <= 2 * MAX_END_TOKENS else np.concatenate([ids[:MAX_END_TOKENS], ids[-MAX_END_TOKENS:]])


def _hashed_words(text: str) -> Words:
    hashes = [zlib.crc32(word.encode("utf-8", "replace")) for word in _WORD.findall(text.lower())]
    return _cut_ids(np.array(hashes, dtype=np.uint32))

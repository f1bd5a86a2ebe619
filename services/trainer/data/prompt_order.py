"""Prompts as tokens, their names and their messages; `prompt_mixture` chooses which come next.

Promises:

- Group names are unique in a run: `t<position>` for training; `e<version>s<i>` (sampled) and `e<version>g<i>` (greedy)
  for evaluation, prefixed with `h<history>` once the run has been rewound, since a broker accepts each name once.
- No prompt is longer than `max_prompt_tokens`; longer rows are left out and counted, never cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog

from penstock.v1 import types_pb2
from penstock.wire.codec import int32_bytes
from penstock.wire.source_tag import SourceTag, tagged
from services.trainer.data.prompt_rows import DataError, Row, read_rows

ENCODE_BATCH_ROWS = 4096
MAX_SAMPLING_SEED = 2**48
"""Group seeds stay below this, so that seed + sample index fits every engine's integer and a JSON number."""

_log = structlog.get_logger()


class Tokenizer(Protocol):
    """The parts of a Hugging Face tokenizer used here."""

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without adding what a chat template would."""

    def note_environment(self, *, tools: Sequence[dict[str, Any]] | None, opens: bool) -> None:
        """Render chats from now on with these tools, and without opening an answer if the environment `opens`."""

    def encode_chat(self, messages: Sequence[tuple[str, str]], tools: Sequence[Any] = ()) -> list[int]:
        """Token ids of (role, content) turns by the model's chat template, with the assistant's turn opened.

        Raises:
            DataError: The tokenizer has no chat template, or the template refuses the turns or shows no tools.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A row whose prompt is tokens."""

    row: Row
    token_ids: tuple[int, ...]
    row_number: int = 0
    """Of the row in its file, counted from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The usable rows of a data file, in file order."""

    prompts: tuple[EncodedPrompt, ...]
    num_skipped: int
    """Rows left out because their prompt is longer than the limit."""


def load_prompts(path: Path, tokenizer: Tokenizer, *, max_prompt_tokens: int) -> PromptSet:
    """Read, check and tokenise a data file.

    Raises:
        DataError: The file or a row cannot be used, or every prompt is longer than `max_prompt_tokens`.
    """
    rows = read_rows(path)
    shapes = list(dict.fromkeys(row.shape for row in rows))
    _log.info("rows are read", path=str(path), num_rows=len(rows), columns="; ".join(shapes[:4]))
    prompts: list[EncodedPrompt] = []
    shortest: int | None = None
    for number, (row, token_ids) in enumerate(zip(rows, encoded(rows, tokenizer), strict=True)):
        shortest = len(token_ids) if shortest is None else min(shortest, len(token_ids))
        if 1 <= len(token_ids) <= max_prompt_tokens:
            prompts.append(EncodedPrompt(row=row, token_ids=tuple(token_ids), row_number=number))
    if not prompts:
        raise DataError(
            f"{path}: every prompt is longer than data.max_prompt_tokens = {max_prompt_tokens} tokens "
            f"(the shortest has {shortest}); raise the limit or shorten the prompts"
        )
    return PromptSet(prompts=tuple(prompts), num_skipped=len(rows) - len(prompts))


def encoded(rows: Sequence[Row], tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    """Token ids of the prompt of each row. Raises DataError: a chat that the tokenizer does not take."""
    for start in range(0, len(rows), ENCODE_BATCH_ROWS):
        batch = rows[start : start + ENCODE_BATCH_ROWS]
        texts = iter(tokenizer.encode_texts([row.prompt for row in batch if isinstance(row.prompt, str)]))
        for row in batch:
            if isinstance(row.prompt, str):
                yield next(texts)
            else:
                turns = [(message.role, message.content) for message in row.prompt]
                yield tokenizer.encode_chat(turns, *([json.loads(row.tools_json)] if row.tools_json else []))


class PromptRows(Protocol):
    """Prompts by their index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> EncodedPrompt: ...


def training_group_id(position: int) -> str:
    """Names the training group at a position."""
    return f"t{position}"


def training_position(group_id: str) -> int:
    """The position that a training group's name encodes."""
    return int(group_id.removeprefix("t"))


def evaluation_group_id(*, policy_version: int, history: int, is_greedy: bool, index: int) -> str:
    """Names an evaluation group."""
    prefix = f"h{history}" if history else ""
    return f"{prefix}e{policy_version}{'g' if is_greedy else 's'}{index}"


def sampling_seed(run_seed: int, position: int) -> int:
    """Seed of the group at a position, 0 <= seed < MAX_SAMPLING_SEED."""
    words = np.random.SeedSequence([run_seed, position]).generate_state(1, np.uint64)
    return int(words[0]) % MAX_SAMPLING_SEED


def build_prompt(
    encoded: EncodedPrompt,
    *,
    group_id: str,
    group_size: int,
    sampling: types_pb2.SamplingParams,
    purpose: types_pb2.Purpose.ValueType,
    tag: SourceTag | None = None,
) -> types_pb2.Prompt:
    """Builds the message for the broker's queue, with the tag in its metadata."""
    metadata = encoded.row.metadata_json
    prompt = types_pb2.Prompt(
        group_id=group_id,
        token_ids=int32_bytes(encoded.token_ids),
        group_size=group_size,
        sampling=sampling,
        answer=encoded.row.answer,
        metadata_json=metadata if tag is None else tagged(metadata, tag),
        purpose=purpose,
    )
    if isinstance(encoded.row.prompt, str):
        prompt.text = encoded.row.prompt
    else:
        turns = [types_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in encoded.row.prompt]
        prompt.messages.extend(turns)
    return prompt

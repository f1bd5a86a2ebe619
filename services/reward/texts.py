"""Decodes samples from their token ids, so that what is scored is what is trained on.

Invariants:
- A reward model sees no text that a generator sent.
- What an environment gave a sample is neither in its completion nor among its token ids, but in its turns alone.
- A sample with a token that the run's model cannot have sampled has no text, and so no score: never zero.
- Decoding is done in a thread of its own, sample by sample: leases are renewed meanwhile, however long completions are.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import structlog

from penstock.clients.sample_stream import cut_text
from penstock.errors import InvalidFieldError
from penstock.model.model_folder import FileTokenizer, TextDecoder, model_size
from penstock.rewards.outcomes import describe
from penstock.rewards.score_messages import ASSISTANT, ENVIRONMENT
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import Int32, int32_array, int32_bytes
from penstock.wire.mask_runs import run_spans
from services.reward.metrics import TEXTS

LOG_EVERY_S = 10.0
_SHOWN_CHARACTERS = 60
_SEARCHED_CHARACTERS = 10_000

_log = structlog.get_logger()


_NO_TOKENIZER = (
    "this sample talked with an environment, and without the model's tokenizer the model's text cannot be separated "
    "from the environment's: set tokenizer_path, and reward.trusts_generator_text to false"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    whole: str = ""
    """All tokens as text, as generators send it."""
    text: str = ""
    """What the model wrote."""
    turns: tuple[types_pb2.ChatMessage, ...] = ()
    sampled: Int32 | None = None
    """Set where that is not all."""
    fault: str = ""


class SentTexts:
    """Leaves the text that came with each sample as it is."""

    async def read(self, leases: Sequence[broker_pb2.ScoringLease]) -> dict[str, str]:
        """By lease id, why a sample has no text of the model's own."""
        return {lease.lease_id: _NO_TOKENIZER for lease in leases if lease.loss_mask_runs}


class TokenTexts:
    """Decodes samples with the tokenizer of the run's model.

    Args:
        tokenizer: Decodes.
        vocab_size: The model samples ids below this one only.
        monotonic_s: Seconds, for the pace of log lines.
    """

    def __init__(
        self, tokenizer: TextDecoder, *, vocab_size: int, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._monotonic_s = monotonic_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._counts: Counter[str] = Counter()
        self._log_at_s = 0.0
        self.warning = ""
        """For status: how many samples' texts differed from their tokens; empty while none did."""

    @classmethod
    def of_model(cls, folder: Path, *, monotonic_s: Callable[[], float] = time.monotonic) -> Self:
        """The decoder for the model in `folder`. Raises OSError or ValueError if it has no usable tokenizer.json."""
        tokenizer = FileTokenizer(folder)
        # Models often have more rows than their tokenizer has entries, and sample the unused ones, too.
        vocab_size = model_size(folder, "vocab_size") or tokenizer.vocab_size
        return cls(tokenizer, vocab_size=vocab_size, monotonic_s=monotonic_s)

    async def read(self, leases: Sequence[broker_pb2.ScoringLease]) -> dict[str, str]:
        """Put the decoded text into each lease's item.

        Returns: by lease id, why a sample has no text; those with a text are not named.
        """
        samples = [(lease.item.token_ids, list(lease.loss_mask_runs)) for lease in leases]
        readings = await asyncio.get_running_loop().run_in_executor(self._thread, self._decode_all, samples)
        for lease, reading in zip(leases, readings, strict=True):
            self._note(lease, reading)
            lease.item.completion_text = reading.text
            if reading.sampled is not None:
                lease.item.token_ids = int32_bytes(reading.sampled)
                lease.item.completion_turns.extend(reading.turns)
        return {lease.lease_id: each.fault for lease, each in zip(leases, readings, strict=True) if each.fault}

    def _decode_all(self, samples: Sequence[tuple[bytes, list[int]]]) -> list[_Reading]:
        return [self._decode(token_ids, runs) for token_ids, runs in samples]

    def _decode(self, raw: bytes, runs: Sequence[int]) -> _Reading:
        try:
            token_ids = int32_array(raw, "token_ids")
            spans = run_spans(runs, num_tokens=token_ids.size, field="loss_mask_runs") if runs else []
        except InvalidFieldError as error:
            return _Reading(fault=str(error))
        unknown = token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]
        if unknown.size:
            return _Reading(
                fault=f"token_ids: {unknown[0]} is none of the {self._vocab_size} that the run's model knows"
            )
        try:
            whole = self._text(token_ids)
            return self._session(whole, token_ids, spans) if spans else _Reading(whole=whole, text=whole)
        except BaseException as error:  # a panic of the library is not an Exception; the tokens are untrusted
            return _Reading(fault=f"token_ids: cannot be decoded: {describe(error)}")

    def _session(self, whole: str, token_ids: Int32, spans: Sequence[tuple[int, int, bool]]) -> _Reading:
        turns = tuple(
            types_pb2.ChatMessage(
                role=ASSISTANT if is_sampled else ENVIRONMENT, content=self._text(token_ids[begin:end])
            )
            for begin, end, is_sampled in spans
        )
        sampled = [token_ids[begin:end] for begin, end, is_sampled in spans if is_sampled]
        return _Reading(
            whole=whole,
            # Each begins a line: rules look for fences and final answers by lines.
            text="\n".join(turn.content for turn in turns if turn.role == ASSISTANT and turn.content),
            turns=turns,
            sampled=np.concatenate(sampled) if sampled else token_ids[:0],
        )

    def _text(self, token_ids: Int32) -> str:
        return cut_text(self._tokenizer.decode(token_ids.tolist()))

    def _note(self, lease: broker_pb2.ScoringLease, reading: _Reading) -> None:
        sent = _compare(lease.item.completion_text, reading)
        TEXTS.labels(sent).inc()
        self._counts[sent] += 1
        if sent not in ("differing", "unknown_token"):
            return
        key, sender = lease.item.key, lease.generator_id or "a generator"
        self.warning = (
            f"{self._counts['differing']} of {self._counts.total()} texts were not what their tokens say, which was "
            f"scored instead, and {self._counts['unknown_token']} samples had tokens that the model does not know; the "
            f"latest is {key.group_id}/{key.sample_index} of {sender}"
        )
        now_s = self._monotonic_s()
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + LOG_EVERY_S
            at = _first_difference(lease.item.completion_text, reading.whole)
            _log.warning(
                "text of a generator is not what its tokens say; is tokenizer_path the run's model?",
                group_id=key.group_id,
                sample_index=key.sample_index,
                generator_id=lease.generator_id,
                fault=reading.fault,
                at_character=at,
                sent=lease.item.completion_text[at : at + _SHOWN_CHARACTERS],
                decoded=reading.whole[at : at + _SHOWN_CHARACTERS],
                **{f"num_{name}": count for name, count in self._counts.items()},
            )


def _compare(sent: str, reading: _Reading) -> str:
    if reading.fault:
        return "unknown_token"
    if sent == reading.whole:
        return "same"
    return "differing" if sent else "not_sent"


def _first_difference(sent: str, decoded: str) -> int:
    sent, decoded = sent[:_SEARCHED_CHARACTERS], decoded[:_SEARCHED_CHARACTERS]
    pairs = enumerate(zip(sent, decoded, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(sent), len(decoded)))

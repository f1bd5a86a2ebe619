"""Caps lease credit by KV-cache headroom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.generator.decoding.kv_headroom import KvHeadroom, RunningSample
from services.generator.engine.engine import EngineProfile, EngineStats


class MeasuredEngine(Protocol):
    """The part of an `Engine` that is used here."""

    def profile(self) -> EngineProfile:
        """Its KV capacity."""

    def stats(self) -> EngineStats:
        """Its load."""


class Credit:
    """An engine that states no KV capacity is bounded by its slots alone.

    Args:
        engine: Started before the first call.
    """

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self._headroom: KvHeadroom | None = None

    def num_more(self, held: Sequence[RunningSample], *, most: int) -> int:
        """Samples that may start beside these, at most `most`."""
        headroom = self._known_headroom()
        if headroom is None:
            return most
        stats = self._engine.stats()
        headroom.note_preemptions(stats.num_preemptions)
        if not stats.num_waiting:
            headroom.note_usage(held, stats.kv_cache_usage)
        return headroom.num_more(held, most=most)

    def note_begun(self, sample: RunningSample) -> None:
        """A sample begins."""
        headroom = self._known_headroom()
        if headroom is not None:
            headroom.note_begun(sample)

    def note_finished(self, num_new_tokens: int) -> None:
        """A completion ended by itself or at its limit, after this many tokens."""
        headroom = self._known_headroom()
        if headroom is not None:
            headroom.note_finished(num_new_tokens)

    def _known_headroom(self) -> KvHeadroom | None:
        if self._headroom is None:
            profile = self._engine.profile()
            if profile.kv_capacity_tokens is not None:
                self._headroom = KvHeadroom(profile.kv_capacity_tokens, block_tokens=profile.kv_block_tokens)
        return self._headroom

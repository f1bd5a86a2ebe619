"""Caches payload that passes through this process: prompts, and what came in puts.

A put's payload is kept until all of it is delivered, so that it is not read back from the store. Both caches are
bounded, and what is missing is loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.v1 import types_pb2
from penstock.wire.codec import Packed
from services.broker.records.store import PayloadSlice, Store

MAX_CACHED_BYTES = 128 * 1024 * 1024
"""What waits at most by default (`max_queued_groups`), if a step has 32 MiB. With more waiting, what is delivered next
is pushed out first, and little is found here."""
MAX_CACHED_PROMPTS = 1024
MAX_CACHED_PROMPT_BYTES = 32 * 1024 * 1024
"""A prompt may have a megabyte."""


@dataclass(slots=True)
class _Kept:
    payload: Packed
    due_bytes: int
    """What is not delivered yet. Of what is delivered again it counts too much off, which costs a read at most."""


class PayloadCache:
    """The newest payloads of one run."""

    def __init__(self, run_id: str, *, store: Store, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._run_id, self._store, self._max_bytes = run_id, store, max_bytes
        self._payloads: OrderedDict[str, _Kept] = OrderedDict()
        self._size_bytes = 0
        self._prompts: OrderedDict[str, tuple[types_pb2.Prompt, int]] = OrderedDict()
        """With their sizes."""
        self._prompt_bytes = 0

    def add(self, payload_id: str, payload: Packed) -> None:
        """Keep a payload, evicting the oldest ones; one larger than the whole cache is not kept."""
        self.discard(payload_id)
        if len(payload) > self._max_bytes:
            return
        self._payloads[payload_id] = _Kept(payload, len(payload))
        self._size_bytes += len(payload)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= len(self._payloads.popitem(last=False)[1].payload)

    def discard(self, payload_id: str) -> None:
        """Remove a payload, if present."""
        kept = self._payloads.pop(payload_id, None)
        if kept is not None:
            self._size_bytes -= len(kept.payload)

    def at_hand(self, part: PayloadSlice) -> Packed | None:
        """A part of a payload that is kept, and stays so; None if it is not."""
        kept = self._payloads.get(part.payload_id)
        return None if kept is None else kept.payload[part.start : part.end]

    def note_delivered(self, part: PayloadSlice) -> None:
        """Remove the payload of which nothing else is due."""
        kept = self._payloads.get(part.payload_id)
        if kept is not None:
            kept.due_bytes -= part.size_bytes
            if kept.due_bytes <= 0:
                self.discard(part.payload_id)

    async def load(self, slices: Sequence[PayloadSlice]) -> list[Packed]:
        """Parts of payloads; shorter than requested if the payload is gone."""
        parts: dict[PayloadSlice, Packed] = {}
        for part in slices:
            packed = self.at_hand(part)
            if packed is not None:
                parts[part] = packed
                self.note_delivered(part)
        missing = [part for part in slices if part not in parts]
        if missing:
            parts.update(zip(missing, await self._store.payloads(self._run_id, missing), strict=True))
        return [parts[part] for part in slices]

    async def prompts(self, group_ids: Sequence[str]) -> dict[str, types_pb2.Prompt]:
        """Prompts by group id; groups dropped meanwhile are missing."""
        # Taken before the store is asked: other calls may evict them meanwhile.
        found = {group_id: self._prompts[group_id] for group_id in group_ids if group_id in self._prompts}
        missing = [group_id for group_id in dict.fromkeys(group_ids) if group_id not in found]
        if missing:
            for group_id, prompt in zip(missing, await self._store.prompts(self._run_id, missing), strict=True):
                if prompt is not None:
                    found[group_id] = (types_pb2.Prompt.FromString(prompt), len(prompt))
        for group_id, kept in found.items():
            self._keep_prompt(group_id, kept)
        return {group_id: prompt for group_id, (prompt, _size) in found.items()}

    def _keep_prompt(self, group_id: str, kept: tuple[types_pb2.Prompt, int]) -> None:
        """Keep a prompt as the newest, evicting the oldest ones."""
        if group_id not in self._prompts:
            self._prompt_bytes += kept[1]
        self._prompts[group_id] = kept
        self._prompts.move_to_end(group_id)
        while len(self._prompts) > MAX_CACHED_PROMPTS or self._prompt_bytes > MAX_CACHED_PROMPT_BYTES:
            self._prompt_bytes -= self._prompts.popitem(last=False)[1][1]

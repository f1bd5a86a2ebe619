"""Caches payload of puts that passes through this process.

It is kept from the put until delivery, so that it is not read back from the store. The cache is bounded, and missing
payload is loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock.wire.codec import Packed
from services.broker.records.store import PayloadSlice, Store

MAX_CACHED_BYTES = 64 * 1024 * 1024


class PayloadCache:
    """The newest payloads of one run."""

    def __init__(self, run_id: str, *, store: Store, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._run_id, self._store, self._max_bytes = run_id, store, max_bytes
        self._payloads: OrderedDict[str, Packed] = OrderedDict()
        self._size_bytes = 0

    def add(self, payload_id: str, payload: Packed) -> None:
        """Keep a payload, evicting the oldest ones; one larger than the whole cache is not kept."""
        self.discard(payload_id)
        if len(payload) > self._max_bytes:
            return
        self._payloads[payload_id] = payload
        self._size_bytes += len(payload)
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= len(self._payloads.popitem(last=False)[1])

    def discard(self, payload_id: str) -> None:
        """Remove a payload, if present."""
        self._size_bytes -= len(self._payloads.pop(payload_id, b""))

    async def load(self, slices: Sequence[PayloadSlice]) -> list[Packed]:
        """Parts of payloads; shorter than requested if the payload is gone."""
        parts: dict[PayloadSlice, Packed] = {}
        for part in slices:
            payload = self._payloads.get(part.payload_id)
            if payload is not None:
                parts[part] = payload[part.start : part.end]
                if part.size_bytes == len(payload):
                    self.discard(part.payload_id)
        missing = [part for part in slices if part not in parts]
        if missing:
            parts.update(zip(missing, await self._store.payloads(self._run_id, missing), strict=True))
        return [parts[part] for part in slices]

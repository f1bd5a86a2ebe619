"""Keeps the deltas between the last published versions, and finds those from a receiver's version to the newest.

Every version but the first has at most one delta, against the version published before it; a receiver further behind
takes several. So all receivers of a site fetch the same few contents, whatever they hold, and a relay serves them all.

Promises:

- At most `max_kept` deltas are kept, the newest ones; a chain is never longer. Deltas that together take as many bytes
  as the full content are useless and go earlier, except for the MIN_KEPT_DELTAS newest, which may be in transit.
- A chain is offered only to a receiver that holds exactly its base, by version and digest, and only if it takes fewer
  bytes than the full content.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.v1 import weights_pb2

MAX_KEPT_DELTAS = 8
MIN_KEPT_DELTAS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version that receivers may take, or a delta to one."""

    manifest: weights_pb2.WeightsManifest
    path: Path
    """Its content, complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDelta:
    """A delta that is still being made."""

    base: weights_pb2.WeightsManifest
    """Full manifest of the version it applies to."""
    digest: str
    """Of the version it leads to."""
    ready_s: float
    """When it is expected, by the monotonic clock."""
    size_bytes: int
    """How large it is expected to be; 0 if not known."""

    @property
    def left_s(self) -> float:
        """Until it is expected, seconds; 0 once it is overdue."""
        return max(0.0, self.ready_s - time.monotonic())


class PublishedDeltas:
    """The deltas of the current run; starts empty."""

    def __init__(self, *, max_kept: int = MAX_KEPT_DELTAS) -> None:
        self._max_kept = max_kept
        self._kept: OrderedDict[int, Published] = OrderedDict()
        self.expected: ExpectedDelta | None = None
        """The delta to the version published last, while it is being made."""

    def clear(self) -> None:
        """Offer nothing; the files remain for their writer to delete."""
        self._kept.clear()
        self.expected = None

    def expect_no_more(self, full: weights_pb2.WeightsManifest) -> None:
        """The delta to that version is made, or will not be."""
        if self.expected is not None and self.expected.digest == full.digest:
            self.expected = None

    def add(self, delta: Published, *, full_bytes: int) -> None:
        """Offer a delta to the version published last; deletes the contents of those no longer kept.

        Args:
            delta: The offered delta.
            full_bytes: Size of the full content of that version.
        """
        self._kept[delta.manifest.policy_version] = delta
        num_bytes = sum(kept.manifest.size_bytes for kept in self._kept.values())
        while len(self._kept) > self._max_kept or (num_bytes >= full_bytes and len(self._kept) > MIN_KEPT_DELTAS):
            _, oldest = self._kept.popitem(last=False)
            num_bytes -= oldest.manifest.size_bytes
            oldest.path.unlink(missing_ok=True)

    def __iter__(self) -> Iterator[Published]:
        """Those that are kept."""
        return iter(self._kept.values())

    def chain(
        self, full: weights_pb2.WeightsManifest, *, held_version: int, held_digest: str
    ) -> list[weights_pb2.WeightsManifest]:
        """Manifests of the deltas to apply in order; empty if the full content should be fetched.

        Args:
            full: The full manifest of the version that is wanted.
            held_version: The version that the receiver holds.
            held_digest: The digest of that version.
        """
        chain: list[weights_pb2.WeightsManifest] = []
        version, digest, num_bytes = full.policy_version, full.digest, 0
        while (version, digest) != (held_version, held_digest):
            delta = self._kept.get(version)
            if delta is None or delta.manifest.digest != digest:
                return []
            num_bytes += delta.manifest.size_bytes
            if num_bytes >= full.size_bytes:
                return []
            chain.insert(0, delta.manifest)
            version, digest = delta.manifest.base_version, delta.manifest.base_digest
        return chain

    def expected_chain(
        self, full: weights_pb2.WeightsManifest, *, held_version: int, held_digest: str
    ) -> tuple[ExpectedDelta, int] | None:
        """The delta that is being made to `full`, and the bytes expected of it with those before it.

        Arguments as `chain`. None if none is being made, or if not all before it are kept. 0 bytes: not known.
        """
        last = self.expected
        if last is None or last.digest != full.digest:
            return None
        if (last.base.policy_version, last.base.digest) == (held_version, held_digest):
            return last, last.size_bytes
        before = self.chain(last.base, held_version=held_version, held_digest=held_digest)
        num_bytes = sum(manifest.size_bytes for manifest in before)
        return (last, last.size_bytes and last.size_bytes + num_bytes) if before else None

"""Chooses between deltas and the full content: whichever is installed first, by measured speeds.

    full_s  = F / d
    delta_s = w + D / d + F / a

with F the bytes of the full content, D those of the deltas together, w the time until they are offered (0 once they
are), d the bytes per second at which full contents or large deltas came here, and a those at which deltas were applied:
a copy of the whole file is written and digested.

Promises:

- Deltas are waited for only while they would still end before the full content would have, had it been begun at once.
  So deltas that never come cost at most `full_s`, whatever the store says of them.
- Before a speed was measured, deltas on offer are taken and none are waited for.
- One slow application, on a disk that was busy once, does not rule deltas out for good: what it took is forgotten after
  FIRST_RETRY offers, since nothing measures it again while full contents are fetched. Where it stays slow, deltas are
  tried again half as often each time.
"""

from __future__ import annotations

MIN_MEASURED_BYTES = 8 * 1024**2
MIN_MEASURED_S = 1.0
"""A delta that has neither tells more about the network's delay than about its rate."""
FIRST_APPLY_BYTES_PER_SECOND = 500e6
"""Of the full content, before the first was applied."""
KEPT_SHARE = 0.5
"""Weight of what was measured before, each time."""
FIRST_RETRY, LAST_RETRY = 8, 1024
"""Offers of deltas that are declined in a row before applications are measured again, the first and the last time."""
MIN_WAIT_S = 0.05
MIN_WAIT_SHARE = 0.25
"""Of the time waited so far: a store whose estimates are too short is asked less and less often."""


class Rate:
    """Bytes per second over the last transfers; a large one counts for more than a small one."""

    def __init__(self) -> None:
        self._num_bytes = self._seconds = 0.0

    def note(self, num_bytes: float, seconds: float) -> None:
        """A transfer ended."""
        self._num_bytes = KEPT_SHARE * self._num_bytes + num_bytes
        self._seconds = KEPT_SHARE * self._seconds + seconds

    @property
    def is_measured(self) -> bool:
        """Whether there was a transfer."""
        return self._num_bytes > 0

    def seconds_for(self, num_bytes: float) -> float | None:
        """Expected time for `num_bytes`; None before anything was measured."""
        return num_bytes * self._seconds / self._num_bytes if self._num_bytes else None


class FetchChoice:
    """What this receiver measured."""

    def __init__(self) -> None:
        self._downloads, self._applications = Rate(), Rate()
        self._num_declined, self._retry_after = 0, FIRST_RETRY

    def note_download(self, num_bytes: int, seconds: float, *, is_delta: bool) -> None:
        """Record that `num_bytes` came over the network."""
        is_telling = num_bytes >= MIN_MEASURED_BYTES or seconds >= MIN_MEASURED_S
        if num_bytes and (is_telling or not is_delta):
            self._downloads.note(num_bytes, seconds)

    def note_application(self, full_bytes: int, seconds: float) -> None:
        """Deltas were applied to a file of that size."""
        self._applications.note(full_bytes, seconds)

    def full_s(self, full_bytes: int) -> float | None:
        """Expected duration of fetching the full content; None before anything was measured."""
        return self._downloads.seconds_for(full_bytes)

    def takes_deltas(self, num_bytes: int, *, full_bytes: int) -> bool:
        """Whether deltas on offer are installed before the full content would be."""
        full_s = self.full_s(full_bytes)
        return self._noted(full_s is None or self._deltas_s(num_bytes, full_bytes) < full_s)

    def wait_s(self, expected_after_s: float, num_bytes: int, *, full_bytes: int, waited_s: float) -> float | None:
        """How long to wait before the store is asked for the deltas again; None to fetch the full content now.

        Args:
            expected_after_s: When the store expects to offer them, from now.
            num_bytes: Their expected size together; 0 if not known, which is as if they had none.
            full_bytes: Size of the full content.
            waited_s: For how long they have been waited for.
        """
        full_s = self.full_s(full_bytes)
        if full_s is None:
            return None
        wait_s = max(expected_after_s, MIN_WAIT_SHARE * waited_s, MIN_WAIT_S)
        ends_s = waited_s + wait_s + self._deltas_s(num_bytes, full_bytes)
        return wait_s if self._noted(ends_s < full_s) else None

    def _noted(self, is_faster: bool) -> bool:
        if not is_faster:
            self._num_declined += 1
            if self._num_declined >= self._retry_after:
                self._applications, self._num_declined = Rate(), 0
                self._retry_after = min(2 * self._retry_after, LAST_RETRY)
            return False
        self._num_declined = 0
        if self._applications.is_measured:
            self._retry_after = FIRST_RETRY
        return True

    def _deltas_s(self, num_bytes: int, full_bytes: int) -> float:
        apply_s = self._applications.seconds_for(full_bytes)
        if apply_s is None:
            apply_s = full_bytes / FIRST_APPLY_BYTES_PER_SECOND
        return (self._downloads.seconds_for(num_bytes) or 0.0) + apply_s

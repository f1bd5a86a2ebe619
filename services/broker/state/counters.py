"""Counts a run's submitted, trained and dropped samples, in total and by submission version and length. Pure.

The totals are in the run's record, which every commit rewrites. Broken down by submission version and length
they would make that record grow, so the breakdown is kept in separate counters of the store (`Delta.counts`),
changed in the same commits and read only by an audit. A counter is named `version|max_tokens|kind`.

Bounded: lengths fall into buckets of powers of two, and old versions into one, see `fold`. A sample counts under
the version at which its group was submitted or restarted, with the tokens it has when it is counted; a later
attempt whose siblings continued keeps the version of its group.

Invariant: for every version, submitted = trained + dropped + in flight, and the counters add up to the totals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from penstock.v1 import types_pb2
from services.broker.records_pb2 import GroupRecord
from services.broker.rules.staleness import staleness as lag_of
from services.broker.state import batches
from services.broker.state.run_state import RunState

NUM_VERSIONS = 64
"""Number of newest versions that are counted separately; at most FOLD_EVERY more."""
FOLD_EVERY = 16
"""Folding looks at every counter, so it runs once every FOLD_EVERY versions."""

SUBMITTED, TRAINED, DROPPED = "submitted", "trained", "dropped"


@dataclass(frozen=True, slots=True)
class Entry:
    """The samples that one counter counts."""

    version: int
    """The run's policy version when the samples were submitted; the newest one of a folded counter."""
    max_tokens: int
    """The samples' length bucket; 0 for submissions."""
    kind: str
    """SUBMITTED, TRAINED or DROPPED."""
    reason: str = ""
    """Why the samples were dropped."""

    @property
    def name(self) -> str:
        """The counter's name in the store."""
        return f"{self.version}|{self.max_tokens}|{self.kind}" + (f":{self.reason}" if self.reason else "")

    @classmethod
    def parse(cls, name: str) -> Entry:
        """The counter with this name."""
        version, max_tokens, kind = name.split("|", 2)
        kind, _, reason = kind.partition(":")
        return cls(int(version), int(max_tokens), kind, reason)


def length_bucket(num_tokens: int) -> int:
    """Upper bound of a completion's length bucket: 0, or the smallest power of two that is at least its length."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens else 0


def row_version(state: RunState, version: int) -> int:
    """The version under which samples submitted at `version` are counted now."""
    return max(version, state.run.books_version)


def count_submitted(state: RunState, *, version: int, num_samples: int) -> None:
    """Count training samples accepted or restarted."""
    state.run.submitted += num_samples
    _count(state, Entry(row_version(state, version), 0, SUBMITTED), num_samples)


def count_trained(state: RunState, *, version: int, num_tokens: int, staleness: int, num_samples: int = 1) -> None:
    """Count training samples in an acknowledged step; a negative number subtracts them."""
    state.run.trained += num_samples
    state.run.trained_by_staleness[staleness] += num_samples
    _count(state, Entry(row_version(state, version), length_bucket(num_tokens), TRAINED), num_samples)


def count_dropped(state: RunState, *, version: int, num_tokens: int, reason: str, num_samples: int = 1) -> None:
    """Count training samples dropped."""
    state.run.dropped[reason] += num_samples
    _count(state, Entry(row_version(state, version), length_bucket(num_tokens), DROPPED, reason), num_samples)


def trained_rows(record: GroupRecord) -> Counter[tuple[int, int]]:
    """Samples of a trained record by length bucket and staleness in its step."""
    found: Counter[tuple[int, int]] = Counter()
    for (num_tokens, oldest), count in Counter(zip(*batches.kept_samples(record), strict=True)).items():
        lag = lag_of(policy_version=record.trained_version - 1, version=oldest)
        found[length_bucket(num_tokens), lag] += count
    return found


def count_record_trained(state: RunState, record: GroupRecord, sign: int = 1) -> None:
    """Count the samples of a trained record as trained, or subtract them with -1."""
    for (max_tokens, lag), count in trained_rows(record).items():
        count_trained(
            state, version=record.submit_version, num_tokens=max_tokens, staleness=lag, num_samples=sign * count
        )


def count_record_dropped(state: RunState, record: GroupRecord, reason: str) -> int:
    """Count the samples of a training record that were not dropped before; returns their number."""
    num_tokens, _versions = batches.kept_samples(record)
    if record.purpose == types_pb2.PURPOSE_TRAIN:
        for max_tokens, count in Counter(map(length_bucket, num_tokens)).items():
            count_dropped(state, version=record.submit_version, num_tokens=max_tokens, reason=reason, num_samples=count)
    return len(num_tokens)


def _count(state: RunState, entry: Entry, num_samples: int) -> None:
    if state.run.HasField("books_version") and num_samples:
        state.pending.counts[entry.name] = state.pending.counts.get(entry.name, 0) + num_samples


def fold(state: RunState) -> None:
    """Merge everything older than the NUM_VERSIONS newest versions into one version, after the version advanced.

    Rows never unfold: folded versions stay folded after a rewind.
    """
    newest = state.run.policy_version - NUM_VERSIONS
    if state.run.HasField("books_version") and newest >= state.run.books_version + FOLD_EVERY:
        state.run.books_version = newest
        state.pending.fold_version = newest


def folded(counts: Mapping[str, int], version: int) -> dict[str, int]:
    """The counters with those of older versions added to those of `version`: what a store does with `fold_version`."""
    result: dict[str, int] = {}
    for name, count in counts.items():
        entry = Entry.parse(name)
        kept = replace(entry, version=max(entry.version, version)).name
        result[kept] = result.get(kept, 0) + count
    return result

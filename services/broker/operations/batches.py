"""Parcels: groups that came finished, in one put, and stay together. Pure operations on a RunState.

Promises:
- A parcel obeys the rules of any group: its groups count as started in admission, are handed out by deadline, trained
  in one step at most, and never beyond the staleness bound.
- Where some of a parcel's groups go another way than the rest, the parcel is cut; its payload is not touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise

from penstock.errors import LeaseLostError, StaleError
from services.broker.records_pb2 import ParcelRecord
from services.broker.rules.batching import ReadyGroup
from services.broker.rules.staleness import deadline, staleness
from services.broker.state import counters
from services.broker.state.batch_index import by_group
from services.broker.state.counters import length_bucket
from services.broker.state.run_state import RunState

MAX_TRAINED_BYTES = 256 * 1024 * 1024
"""Payload of a run that is retained after training; of older steps not even the records stay."""
ABANDONED_VERSION = "abandoned_version"


# -- cutting -----------------------------------------------------------------------------------------------------------


def carve(state: RunState, name: str, wanted: Collection[str]) -> list[str]:
    """Cut a parcel where wanted groups meet others; names of the parcels that hold exactly the wanted ones."""
    record = state.shelf.records[name]
    flags = [group_id in wanted for group_id in record.group_ids]
    if all(flags):
        return [name]
    cuts = [position for position in range(1, len(flags)) if flags[position] != flags[position - 1]]
    pieces = cut_at(record, [0, *cuts, len(flags)])
    names = [(state.add_parcel(piece), flags[start]) for start, piece in pieces]
    return [piece_name for piece_name, is_wanted in names if is_wanted]


def cut_at(record: ParcelRecord, cuts: Sequence[int]) -> list[tuple[int, ParcelRecord]]:
    """A parcel cut before the groups at `cuts`, which hold 0 and the number of groups: first group and piece, each."""
    byte_at = [0, *accumulate(record.group_bytes)]
    sample_at = [0, *accumulate(record.num_samples)]
    pieces: list[tuple[int, ParcelRecord]] = []
    for start, end in pairwise(cuts):
        samples = slice(sample_at[start], sample_at[end])
        piece = ParcelRecord(
            sequence=record.sequence + start,
            payload_id=record.payload_id,
            payload_start=record.payload_start + byte_at[start],
            group_bytes=record.group_bytes[start:end],
            group_ids=record.group_ids[start:end],
            num_samples=record.num_samples[start:end],
            num_tokens=record.num_tokens[start:end],
            sample_tokens=record.sample_tokens[samples],
            sample_min_versions=record.sample_min_versions[samples],
            sample_max_versions=record.sample_max_versions[samples],
            submit_version=record.submit_version,
            submit_s=record.submit_s,
            consumer_id=record.consumer_id,
        )
        if record.HasField("trained_version"):
            piece.trained_version = record.trained_version
        pieces.append((start, piece))
    return pieces


# -- to the trainer and back -------------------------------------------------------------------------------------------


def ready_groups(state: RunState, count: int) -> list[ReadyGroup]:
    """The first parcels that wait for the trainer, for `batching`; as many as could be needed for `count` groups."""
    shelf, bound = state.shelf, state.limits.max_staleness
    return [
        ReadyGroup(
            group_id=name,
            deadline=deadline(version=shelf.oldest_version(name), max_staleness=bound),
            sequence=shelf.records[name].sequence,
            num_groups=len(shelf.records[name].group_ids),
            num_tokens=sum(shelf.records[name].num_tokens),
        )
        for name in shelf.first_ready(count)
    ]


def num_due(state: RunState) -> int:
    """Groups that wait for the trainer and that no later step than the one being filled may train on."""
    version, bound = state.run.policy_version, state.limits.max_staleness
    return sum(
        count
        for oldest, count in state.shelf.num_ready_by_version.items()
        if deadline(version=oldest, max_staleness=bound) <= version
    )


def hand_over(state: RunState, name: str, consumer_id: str, *, num_groups: int) -> None:
    """Give the first `num_groups` groups of a ready parcel to a consumer."""
    record = state.shelf.records[name]
    if num_groups < len(record.group_ids):
        carve(state, name, record.group_ids[:num_groups])
    with state.edit_parcel(name) as record:
        record.consumer_id = consumer_id


def hand_back(state: RunState, name: str) -> None:
    """Make a delivered parcel ready again."""
    with state.edit_parcel(name) as record:
        record.consumer_id = ""


def attach(state: RunState, consumer_id: str, held: Collection[str]) -> int:
    """A consumer says which groups it holds: the parcels follow; returns the number of groups handed back."""
    num_lost = 0
    for name in list(state.shelf.delivered):
        record = state.shelf.records[name]
        if record.consumer_id != consumer_id:
            continue
        for lost in carve(state, name, [group_id for group_id in record.group_ids if group_id not in held]):
            num_lost += len(state.shelf.records[lost].group_ids)
            hand_back(state, lost)
    for name, group_ids in state.shelf.names(held).items():
        if is_ready(state, name):
            for piece in carve(state, name, group_ids):
                with state.edit_parcel(piece) as record:
                    record.consumer_id = consumer_id
    return num_lost


def is_ready(state: RunState, name: str) -> bool:
    """Whether a parcel waits for the trainer."""
    record = state.shelf.records[name]
    return not record.consumer_id and not record.HasField("trained_version")


def check_held(state: RunState, group_ids: Iterable[str], consumer_id: str) -> None:
    """Raises LeaseLostError, StaleError where a group that is in a parcel may not be acknowledged."""
    oldest_allowed = state.run.policy_version - state.limits.max_staleness
    for name, members in state.shelf.names(group_ids).items():
        record = state.shelf.records[name]
        if name not in state.shelf.delivered or record.consumer_id != consumer_id:
            raise LeaseLostError(f"group {members[0]!r} is not in the hands of {consumer_id!r}", group_id=members[0])
        if state.shelf.oldest_version(name) < oldest_allowed and set(members) & set(stale_ids(state, oldest_allowed)):
            raise StaleError(f"a group of {members[0]!r} and its like is too stale; drop them", group_id=members[0])


def train(state: RunState, group_ids: Iterable[str], policy_version: int) -> None:
    """Mark those of the groups that are in live parcels trained by the step that made `policy_version`."""
    for name, members in state.shelf.names(group_ids).items():
        if state.shelf.records[name].HasField("trained_version"):
            continue
        for piece in carve(state, name, members):
            with state.edit_parcel(piece) as record:
                record.trained_version, record.consumer_id = policy_version, ""
            _count_trained(state, record, policy_version, 1)


def untrain(state: RunState, policy_version: int) -> int:
    """Make what steps later than `policy_version` trained ready again; returns the number of groups."""
    late = [name for version, names in state.shelf.trained.items() if version > policy_version for name in names]
    num_groups = 0
    for name in sorted(late):
        with state.edit_parcel(name) as record:
            trained_version = record.trained_version
            record.ClearField("trained_version")
        _count_trained(state, record, trained_version, -1)
        num_groups += len(record.group_ids)
    return num_groups


def staleness_counts(record: ParcelRecord, trained_version: int) -> Counter[int]:
    """Samples of a parcel by their staleness in the step that made `trained_version`."""
    return Counter(
        staleness(policy_version=trained_version - 1, version=oldest) for oldest in record.sample_min_versions
    )


def _count_trained(state: RunState, record: ParcelRecord, trained_version: int, sign: int) -> None:
    before = trained_version - 1
    pairs = zip(map(length_bucket, record.sample_tokens), record.sample_min_versions, strict=True)
    for (max_tokens, oldest), count in Counter(pairs).items():
        lag = staleness(policy_version=before, version=oldest)
        counters.count_trained(
            state, version=record.submit_version, num_tokens=max_tokens, staleness=lag, num_samples=sign * count
        )


# -- giving up ---------------------------------------------------------------------------------------------------------


def drop(state: RunState, group_ids: Iterable[str], reason: str) -> int:
    """Give up those of the groups that are in live parcels; returns the number of samples."""
    num_samples = 0
    for name, members in state.shelf.names(group_ids).items():
        if state.shelf.records[name].HasField("trained_version"):
            continue
        for piece in carve(state, name, members):
            record = state.shelf.records[piece]
            for max_tokens, count in Counter(map(length_bucket, record.sample_tokens)).items():
                counters.count_dropped(
                    state, version=record.submit_version, num_tokens=max_tokens, reason=reason, num_samples=count
                )
            num_samples += len(record.sample_tokens)
            state.retire_parcel(piece)
    return num_samples


def stale_ids(state: RunState, oldest_allowed: int) -> list[str]:
    """Groups of live parcels that are older than a version."""
    return [
        group_id
        for name in state.shelf.older_than(oldest_allowed)
        for group_id, oldest in _oldest_versions(state.shelf.records[name])
        if oldest < oldest_allowed
    ]


def _oldest_versions(record: ParcelRecord) -> Iterable[tuple[str, int]]:
    """Oldest version by group id."""
    return zip(record.group_ids, by_group(record, record.sample_min_versions, min), strict=True)


def drop_abandoned(state: RunState, policy_version: int) -> int:
    """After a rewind: give up what weights of later versions sampled, for those weights exist no more.

    Nobody here can make such a group anew, unlike one that was submitted as a prompt.
    """
    abandoned: list[str] = []
    for _name, record in state.shelf.live():
        if max(record.sample_max_versions) > policy_version:
            newest = by_group(record, record.sample_max_versions, max)
            pairs = zip(record.group_ids, newest, strict=True)
            abandoned += [group_id for group_id, version in pairs if version > policy_version]
    return drop(state, abandoned, ABANDONED_VERSION)


def oldest_affordable(state: RunState) -> int:
    """The oldest step that may be retained without more payload than MAX_TRAINED_BYTES; the newest one always may."""
    size_bytes, oldest = 0, 0
    for version in sorted(state.shelf.trained_bytes, reverse=True):
        size_bytes += state.shelf.trained_bytes[version]
        if oldest and size_bytes > MAX_TRAINED_BYTES:
            return oldest
        oldest = version
    return 0

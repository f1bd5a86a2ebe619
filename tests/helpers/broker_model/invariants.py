"""The seven invariants of docs/architecture.md, each as one check of a world between two events."""

from __future__ import annotations

from collections import Counter

from penstock.v1 import broker_pb2, types_pb2
from services.broker.records.run_clock import BROKER_LIFE_S, MOST_BEHIND_S
from services.broker.records.shard_ids import shard_id
from services.broker.records.store import SampleId
from services.broker.state import batches as records
from services.broker.state.run_state import RunState
from tests.helpers.broker_model.trainer import ModelTrainer
from tests.helpers.broker_model.world import MAX_TRIES, RUN, World, settle

_LEASED, _SCORING = broker_pb2.SAMPLE_STATE_LEASED, broker_pb2.SAMPLE_STATE_SCORING
ROUNDING_S = 1e-6
"""Of a sum of seconds since the epoch: a lease of this very moment may seem to be longer than it is."""
SLACK_S = 1.0
"""Expired leases are taken back by a caretaker that passes a few times a second."""


def conservation(world: World, books: broker_pb2.Audit) -> None:
    """submitted = trained + dropped(by reason) + in flight, and what was submitted is what clients submitted."""
    assert books.balanced, books
    assert books.submitted == books.trained + sum(books.dropped.values()) + books.in_flight
    assert sum(books.in_flight_by_state.values()) == books.in_flight
    if not world.has_lost_commits:
        # What is begun anew is counted as dropped and as submitted once more.
        num_known = sum(world.truth.submitted.values())
        assert num_known <= books.submitted <= num_known + sum(books.dropped.values()), books


def staleness(world: World, books: broker_pb2.Audit, state: RunState) -> None:
    """Nothing older than the bound was trained on, or is in the trainer's hands."""
    bound = world.limits.max_staleness
    assert books.max_staleness_seen <= bound
    assert all(versions <= bound for versions in books.trained_by_staleness)
    for name in state.index.delivered[types_pb2.PURPOSE_TRAIN]:
        oldest = records.oldest_version(state.groups[name])
        assert oldest is not None
        assert state.run.policy_version - oldest <= bound


def nothing_is_stale_under_wait(world: World, books: broker_pb2.Audit, trainer: ModelTrainer) -> None:
    """StalePolicy WAIT holds work back, so that nothing is sampled in vain."""
    is_wait = world.setting.policy.stale in (broker_pb2.STALE_POLICY_UNSPECIFIED, broker_pb2.STALE_POLICY_WAIT)
    if is_wait and trainer.is_regular and not world.has_lost_commits:
        assert not books.dropped.get("stale"), books


def exactly_once(world: World, books: broker_pb2.Audit, trainer: ModelTrainer) -> None:
    """A group is in one step of the trainer's surviving history, and the broker counts what the trainer counts."""
    times = Counter(group_id for _version, groups in trainer.memory.ledger for group_id in groups)
    assert all(count == 1 for count in times.values()), times
    if books.policy_version == trainer.memory.version and not world.has_lost_commits:
        assert books.trained == sum(trainer.memory.trained.values())


def no_token_twice_none_lost(world: World, state: RunState) -> None:
    """The store has the accepted chunks of every sample that counts tokens, in one row, and of no other sample.

    What a chunk holds is checked against what was sent wherever the broker shows it: in leases, to reward workers, and
    to the trainer.
    """
    prompts, samples = world.backing.payload(RUN)
    counted = {
        (group_id, index)
        for group_id, group in state.groups.items()
        for index, sample in enumerate(group.samples)
        if sample.num_tokens and sample.state != broker_pb2.SAMPLE_STATE_DROPPED
    }
    assert counted <= samples | samples_in_shards(world)
    known = {(group_id, index) for group_id, group in state.groups.items() for index in range(len(group.samples))}
    assert samples <= known, "chunks of groups that are gone are still stored"
    submitted = {name for name, group in state.groups.items() if not group.HasField("put")}
    assert prompts == submitted, "prompts and groups differ"


def samples_in_shards(world: World) -> set[SampleId]:
    """Samples whose chunks are in a token shard."""
    shards = range(1, world.setting.policy.token_shards + 1)
    return {sample for shard in shards for sample in world.backing.payload(shard_id(RUN, shard))[1]}


def shards_hold_more(world: World, state: RunState) -> bool:
    """Whether token shards have chunks of groups that are gone."""
    return any(group_id not in state.groups for group_id, _index in samples_in_shards(world))


def attested(state: RunState) -> None:
    """No token of a version the run has not reached; the version is noted for every sample with tokens."""
    for group in state.groups.values():
        for sample in group.samples:
            is_alive = sample.state != broker_pb2.SAMPLE_STATE_DROPPED
            if is_alive and sample.num_tokens:
                assert sample.HasField("min_version")
                assert 0 <= sample.min_version <= sample.max_version <= state.run.policy_version


def no_endless_wait(world: World, state: RunState, response: broker_pb2.GetRunResponse) -> None:
    """Every lease ends; while something is in flight somebody waits for somebody, with a reason."""
    for group in state.groups.values():
        for sample in group.samples:
            if sample.state == _LEASED:
                left_s = _left_s(world, state.lease_end_s(sample), world.limits.generation_lease_s)
                assert left_s <= world.limits.generation_lease_s + ROUNDING_S, f"{group.group_id}: {left_s} s"
            if sample.state == _SCORING:
                left_s = _left_s(world, sample.scoring_expire_s, world.limits.scoring_lease_s)
                assert left_s <= world.limits.scoring_lease_s + ROUNDING_S, f"{group.group_id}: {left_s} s"
    assert not any_overdue(world, state)
    clock = world.store_time.read()
    assert clock.now_s - clock.heard_s <= MOST_BEHIND_S + BROKER_LIFE_S, clock
    assert response.waits
    for wait in response.waits:
        assert wait.waiter
        assert wait.owner
        assert wait.reason
        assert wait.HasField("since_time")


def _left_s(world: World, expire_s: float, life_s: float) -> float:
    """How long a lease still lasts by the run's clock: a full life at least from the end of its last gap."""
    clock = world.store_time.read()
    return max(expire_s, clock.unbroken_since_s + life_s) - clock.now_s


def _is_overdue(world: World, expire_s: float, life_s: float) -> bool:
    """Whether a lease had ended when all brokers had heard their holders."""
    clock = world.store_time.read()
    return max(expire_s, clock.unbroken_since_s + life_s) < clock.heard_s - SLACK_S


def any_overdue(world: World, state: RunState) -> bool:
    """Whether a lease is past its end."""
    limits = world.limits
    return any(
        (sample.state == _LEASED and _is_overdue(world, state.lease_end_s(sample), limits.generation_lease_s))
        or (sample.state == _SCORING and _is_overdue(world, sample.scoring_expire_s, limits.scoring_lease_s))
        for group in state.groups.values()
        for sample in group.samples
    )


def bounded(world: World, state: RunState) -> None:
    """Queues stay inside their limits."""
    limits = world.limits
    # Groups that were begun anew wait too, but came in long ago: they had left the queue and made room in it.
    waiting = Counter(
        group.purpose
        for group in state.groups.values()
        if not group.HasField("put") and not any(sample.num_leases or sample.attempt for sample in group.samples)
    )
    assert all(count <= limits.max_queued_groups for count in waiting.values()), waiting
    assert state.index.num_delivered <= limits.groups_per_step
    for group in state.groups.values():
        assert all(sample.num_tokens <= limits.max_completion_tokens for sample in group.samples)


async def check_all(world: World, trainer: ModelTrainer) -> None:
    """Every invariant, now."""
    assert not world.crashes, world.crashes
    for _ in range(MAX_TRIES):
        if not any_overdue(world, await world.state()):
            break
        # A run that no broker looked at for a while is looked after within a moment of somebody asking; commits that
        # fail are tried again.
        await settle()
    response = await world.call("GetRun", broker_pb2.GetRunRequest(run_id=RUN))
    books, state = response.audit, await world.state()
    conservation(world, books)
    staleness(world, books, state)
    nothing_is_stale_under_wait(world, books, trainer)
    exactly_once(world, books, trainer)
    no_token_twice_none_lost(world, state)
    attested(state)
    no_endless_wait(world, state, response)
    bounded(world, state)

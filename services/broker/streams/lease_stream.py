"""Serves one generator's lease stream."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager

import structlog

from penstock.errors import InvalidFieldError
from penstock.process.time_limits import Wake
from penstock.stall_limits import SilenceLimit
from penstock.v1 import broker_pb2
from penstock.wire.pieces import batched
from penstock.wire.timestamps import timestamp
from services.broker.assembly.messages import MAX_FRAME_BYTES, prefix_of, sample_key
from services.broker.brokers.membership import Membership
from services.broker.fleet.deal_round import Seat
from services.broker.fleet.work_stealing import Moves
from services.broker.ingest.validation import (
    MAX_ACTIVE_LEASES,
    check_beat,
    check_environment,
    check_hello,
    check_routing,
)
from services.broker.operations import agent_sessions, leasing
from services.broker.operations.leasing import GeneratorFacts, Grant
from services.broker.operations.renewal import Heard
from services.broker.rules.limits import LEASE_SECRET_BYTES, duration
from services.broker.runtime.heartbeats import GeneratorNote
from services.broker.runtime.run_registry import RunRegistry
from services.broker.state.run_state import RunState
from services.broker.streams.core_hints import CoreHints
from services.broker.streams.heartbeat_hints import HeartbeatHints
from services.broker.streams.request_reader import Intake, signs_during, wait_for_event

IDLE_EVERY_S = 1.0
MAX_SILENCE_S = 3.0
"""The contract promises a sign of life at least every 5 s."""
PACE_S = 0.02
"""Least time between two rounds of leases: slots that free up one by one are filled by one commit, not by many."""
MAX_LEASES_STOLEN = 256
ASK_AGAIN_S = 0.25
"""Delay after dispatch left the queued work to others."""
IDLE_BEFORE_MOVE_S = 1.0
"""A generator is idle for this long before it steals work from others."""

_log = structlog.get_logger()
_Response = broker_pb2.StreamLeasesResponse


class LeaseStream:
    """Sends leases while the generator has credit, revocations when work is lost, and signs of life.

    Leases are committed before they are sent; one that never arrives is named in no heartbeat and so expires.
    """

    def __init__(
        self,
        run_registry: RunRegistry,
        first: broker_pb2.StreamLeasesRequest,
        membership: Membership | None = None,
    ) -> None:
        hello = first.hello
        if first.WhichOneof("frame") != "hello":
            raise InvalidFieldError("hello: the first frame of a lease stream must be hello", field="hello")
        check_hello(hello)
        self._run_registry = run_registry
        self._hello = hello
        self._replica = run_registry.replica(hello.run_id)
        self._core = CoreHints(membership, self._replica, may_move=hello.may_move)
        self._pace = HeartbeatHints(run_registry.heartbeat_interval, self._replica, run_registry.metrics)
        self._beat: broker_pb2.GeneratorBeat | None = None
        self._seat: Seat | None = None
        """None before the first heartbeat."""
        self._wake = Wake()
        self._num_sent = self._num_asked = 0
        """Leases sent, and those that it may get by stealing, while that is decided."""
        self._sent: set[str] = set()
        """Leases that this stream sent, but for those that are known to have ended."""
        self._reported: set[str] = set()
        """The same of those that the generator's last heartbeat names."""
        self._reason = "no heartbeat came yet"
        self._idle_since_s: float | None = None
        """Since when it has found nothing to lease despite free capacity."""
        self._ask_again_s = 0.0
        self._silent: set[str] = set()
        """Leases that are no longer renewed because no token arrived."""
        self._owner: broker_pb2.RunOwner | None = None
        """The run's owner as last reported to the generator."""

    async def serve(self, requests: AsyncIterator[broker_pb2.StreamLeasesRequest]) -> AsyncGenerator[_Response, None]:
        """All responses, until the run is closed or the client disconnects."""
        busy = _Response(idle=broker_pb2.LeaseIdle(reason="the broker is busy: the stream waits for its turn"))
        async with aclosing(signs_during(self._open(), busy, every_s=MAX_SILENCE_S)) as signs:
            async for sign in signs:
                yield sign
        # Loop time, not the clock's: this paces the stream and decides nothing about the run.
        loop = asyncio.get_running_loop()
        spoke_s = loop.time()
        with self._replica.leasing(self._wake, self._hello.generator_id) as wake, self._leaving():
            async with aclosing(signs_during(self._replica.attend(), busy, every_s=MAX_SILENCE_S)) as signs:
                async for sign in signs:
                    yield sign
            async with Intake(requests, self._on_request, wake) as intake:
                while not intake.is_ended:
                    self._run_registry.check_serving()
                    frames = self._owner_news() + self._revocations() + self._core_news() + await self._leases()
                    for frame in frames:
                        yield frame
                    if self._replica.is_closed:
                        return
                    if frames:
                        spoke_s = loop.time()
                        await asyncio.sleep(PACE_S)
                        continue
                    is_woken = await wait_for_event(wake, self._patience_s(loop.time() - spoke_s))
                    # Others' commits wake this stream too, many times a second: it must send signs of life all the
                    # same.
                    silent_s = loop.time() - spoke_s
                    if silent_s >= (MAX_SILENCE_S if is_woken else self._idle_every_s) or self._pace.is_news:
                        spoke_s = loop.time()
                        yield _Response(idle=self._pace.idle(self._reason))
                intake.check()
        await self._replica.peers.leave(self._hello.generator_id)

    async def _open(self) -> None:
        """Bring the copy up to date, so that no lease that another broker granted seems lost."""

        def check(state: RunState) -> None:
            state.check_open()
            check_routing(self._hello, state.limits)
            check_environment(self._hello, state.policy)
            if self._hello.replaces_generator_id:
                leasing.end_all_of(state, self._hello.replaces_generator_id)
                agent_sessions.release_all_of(state, self._hello.replaces_generator_id)

        await self._replica.transact(check)
        await self._replica.peers.meet_generator(self._hello)

    def _patience_s(self, silent_s: float) -> float:
        """How long to wait for a change before asking again anyway, or saying something after `silent_s` seconds."""
        now_s = self._replica.clock.now_s()
        move_s = 0.0 if self._idle_since_s is None else self._idle_since_s + IDLE_BEFORE_MOVE_S
        # Nothing is checked before it may ask again; a past time was skipped, and would be every time.
        due_s = next((at_s for at_s in (self._ask_again_s, move_s) if at_s > now_s), math.inf)
        return min(self._idle_every_s, max(PACE_S, min(due_s - now_s, MAX_SILENCE_S - silent_s)))

    @property
    def _idle_every_s(self) -> float:
        """How long to wait for a change at most, and without one between signs of life."""
        return min(MAX_SILENCE_S, IDLE_EVERY_S * self._run_registry.heartbeat_interval.stretch)

    async def _on_request(self, request: broker_pb2.StreamLeasesRequest) -> None:
        if request.WhichOneof("frame") != "beat":
            raise InvalidFieldError("frame: after the hello only heartbeats may follow", field="frame")
        beat = request.beat
        # Read once, as each reading makes hundreds of strings, and taken out, so that they are not copied.
        lease_ids = list(beat.active_lease_ids)
        check_beat(beat, lease_ids)
        beat.ClearField("active_lease_ids")
        self._pace.note_beat()
        self._beat = beat
        self._reported = set(lease_ids)
        if lease_ids:
            self._renew(frozenset(lease_ids))
        self._replica.peers.see_generator(self._hello, beat, num_held=len(lease_ids), num_free=self._credit)
        self._report(beat)

    def _renew(self, lease_ids: frozenset[str]) -> None:
        """Renew leases; logs once for each lease that is not renewed because no token arrived."""
        generator_id = self._hello.generator_id
        heard = Heard(
            holder_id=generator_id,
            lease_ids=lease_ids,
            heard_s=self._replica.clock.now_s(),
            tokens_per_second=self._replica.peers.sample_speed(generator_id),
        )
        self._replica.heartbeats.note(GeneratorNote(heard=heard, on_silent=self._note_silent))

    def _note_silent(self, silent: Sequence[str], limit: SilenceLimit) -> None:
        generator_id = self._hello.generator_id
        for lease_id in set(silent) - self._silent:
            _log.warning(
                "a lease is left to expire: no token came", lease_id=lease_id, generator=generator_id, limit=str(limit)
            )
        self._silent.update(silent)
        self._silent &= self._reported

    def _report(self, beat: broker_pb2.GeneratorBeat) -> None:
        """Note in the seat what the generator may get now; one that drains gets none."""
        facts = GeneratorFacts(
            generator_id=self._hello.generator_id,
            policy_version=beat.policy_version,
            max_context_tokens=self._hello.max_context_tokens,
            history=beat.history if beat.HasField("history") else None,
            instance_id=beat.instance_id,
        )
        if self._seat is None:
            self._seat = Seat(facts, wake=self._wake.set)
        is_news = (self._seat.facts, self._seat.num_free) != (facts, self._credit)
        self._seat.facts, self._seat.num_free = facts, self._credit
        if beat.is_draining or self._core.is_moving:
            self._replica.lease_rounds.leave(self._seat)
        else:
            self._replica.lease_rounds.join(self._seat, is_news=is_news)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """Gives up the seat at the end of the block; a stream that breaks off is not left as one that ends."""
        try:
            yield
        except BaseException:
            self._replica.peers.lose(self._hello.generator_id)
            raise
        finally:
            if self._seat is not None:
                self._replica.lease_rounds.leave(self._seat)

    def _core_news(self) -> list[_Response]:
        """Where the stream is to move, if anywhere; what was granted until then still goes out."""
        owner = self._core.news()
        if owner is None:
            return []
        if self._seat is not None:
            self._replica.lease_rounds.leave(self._seat)
        return [_Response(core=owner)]

    async def _leases(self) -> list[_Response]:
        beat, seat, state = self._beat, self._seat, self._replica.copy
        if beat is None or seat is None:
            return []
        now_s = self._replica.clock.now_s()
        if not seat.grants:
            if beat.is_draining:
                self._reason = "the generator drains"
                return []
            if self._core.is_moving:
                self._reason = "the stream moves to the broker that owns the run"
                return []
            if not self._credit:
                self._reason = "the generator has no free slot"
                return []
            if now_s < self._ask_again_s:
                return []
            if state is None or state.queue:
                await self._lease(seat, now_s)
            else:
                self._reason = leasing.NOTHING_QUEUED
        grants, seat.grants = seat.grants, []
        if not grants:
            self._num_asked = min(self._credit, MAX_LEASES_STOLEN)
            seat.num_free = self._credit
            grants = await self._take_over(seat.facts, self._num_asked, now_s)
            self._num_asked = 0
        if grants:
            self._idle_since_s = None
            self._replica.dispatcher.note(seat.facts.generator_id, is_left=False, now_s=now_s)
        self._num_sent += len(grants)
        seat.num_free = self._credit
        self._replica.peers.note_free(seat.facts.generator_id, self._credit)
        self._sent.update(grant.lease_id for grant in grants)
        self._run_registry.metrics.leases.labels("generation").inc(len(grants))
        leases = await self._encode(grants)
        # Of groups that were dropped meanwhile nothing is sent, and no slot is taken.
        self._num_sent -= len(grants) - len(leases)
        return list(self._frames(leases))

    async def _lease(self, seat: Seat, now_s: float) -> None:
        """Have the queue dealt, to this generator among others."""
        self._reason = await self._replica.lease_rounds.ask(seat, self._replica.copy)
        is_left = not seat.grants and self._reason == leasing.LEFT_TO_OTHERS
        self._replica.dispatcher.note(seat.facts.generator_id, is_left=is_left, now_s=now_s)
        if is_left:
            self._ask_again_s = now_s + ASK_AGAIN_S

    async def _take_over(self, facts: GeneratorFacts, credit: int, now_s: float) -> list[Grant]:
        """Steal work leased to other generators, after being idle for a while."""
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        if now_s - self._idle_since_s < IDLE_BEFORE_MOVE_S:
            return []
        # The next attempt waits as long again: in between the loads hardly change.
        self._idle_since_s = now_s
        # Meanwhile its seat gets nothing, nor is it woken for what may be had.
        self._wake.set()

        def operation(state: RunState) -> Moves:
            if leasing.holds_abandoned(state, facts):
                return Moves()
            return self._replica.dispatcher.take_over(state, facts, credit, now_s, _suffix)

        moves = await self._replica.transact(operation, must_verify=False)
        self._run_registry.metrics.moves.inc(moves.num_moved)
        return moves.grants

    @property
    def _credit(self) -> int:
        """Number of leases it could get now; never more than fit in a heartbeat."""
        num_given = self._num_sent + self._num_asked + (len(self._seat.grants) if self._seat else 0)
        return min(MAX_ACTIVE_LEASES, max(0, self._beat.credit_total - num_given)) if self._beat else 0

    def _frames(self, leases: list[broker_pb2.Lease]) -> Iterator[_Response]:
        """Few messages: each costs more than a lease, and at a busy broker one after the other waits for its turn."""
        if not self._hello.accepts_lease_batches:
            return (_Response(lease=lease) for lease in leases)
        batches = batched(leases, broker_pb2.Lease.ByteSize, MAX_FRAME_BYTES)
        return (_Response(leases=broker_pb2.LeaseBatch(leases=batch)) for batch in batches)

    async def _encode(self, grants: list[Grant]) -> list[broker_pb2.Lease]:
        if not grants:
            return []
        prompts = await self._replica.payloads.prompts([grant.sample[0] for grant in grants])
        continued = [grant for grant in grants if grant.num_prefix_tokens]
        stored = await self._replica.chunks(
            [grant.sample for grant in continued], [grant.token_shard for grant in continued]
        )
        prefixes = {grant.sample: prefix_of(parts) for grant, parts in zip(continued, stored, strict=True)}
        return [
            broker_pb2.Lease(
                lease_id=grant.lease_id,
                predicted_tokens=grant.predicted_tokens,
                key=sample_key(grant.sample, grant.attempt),
                prompt=prompts[grant.sample[0]],
                prefix_token_ids=prefix.token_ids if (prefix := prefixes.get(grant.sample)) is not None else b"",
                prefix_loss_mask=prefix.loss_mask if prefix is not None else b"",
                min_policy_version=grant.min_policy_version,
                expire_time=timestamp(grant.expire_s),
                lease_duration=duration(grant.life_s),
                token_shard=grant.token_shard,
            )
            for grant in grants
            if grant.sample[0] in prompts
        ]

    def _owner_news(self) -> list[_Response]:
        """The run's owner, if the generator does not know it yet."""
        state = self._replica.copy
        if state is None or state.run.owner == self._owner:
            return []
        self._owner = broker_pb2.RunOwner()
        self._owner.CopyFrom(state.run.owner)
        return [_Response(owner=self._owner)]

    def _revocations(self) -> list[_Response]:
        state = self._replica.copy
        if state is None:
            return []
        held = state.generation_leases.get(self._hello.generator_id, {})
        # Not of its keys, of which a set would be made first.
        gone = self._sent.difference(held) | self._reported.difference(held)
        if not gone:
            return []
        self._sent -= gone
        self._reported -= gone
        return [
            _Response(
                revocation=broker_pb2.LeaseRevocation(
                    lease_id=lease_id, reason="the sample was dropped, or given to another"
                )
            )
            for lease_id in gone
            if not _is_finished(state, lease_id)
        ]


def _is_finished(state: RunState, lease_id: str) -> bool:
    """Whether the lease ended because its sample is complete, or the generator returned it."""
    parts = lease_id.split(".")
    if len(parts) != 4 or not all(part.isascii() and part.isdecimal() for part in parts[:2]):
        return False
    group = state.groups.at(int(parts[0]))
    if group is None or int(parts[1]) >= len(group.samples):
        return False
    sample = group.samples[int(parts[1])]
    return sample.lease_id == lease_id and sample.state not in (
        broker_pb2.SAMPLE_STATE_QUEUED,
        broker_pb2.SAMPLE_STATE_SEALING,
        broker_pb2.SAMPLE_STATE_DROPPED,
    )


def _suffix() -> str:
    return secrets.token_hex(LEASE_SECRET_BYTES)

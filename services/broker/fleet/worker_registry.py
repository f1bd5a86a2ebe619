"""Tracks generators and reward workers as last seen by any broker process.

Hints: they alone decide only whether a prompt is too long for every generator, and which generator gets work from
dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from penstock.errors import ServiceUnavailableError
from penstock.stall_limits import sample_speed
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.timestamps import timestamp, unix_s
from services.broker.fleet.throughput import Speed, measured
from services.broker.records.run_clock import RunClock
from services.broker.records.store import Store
from services.broker.records_pb2 import WorkerView
from services.broker.stalls.causes import Present
from services.broker.state.queue_entry import REFERENCE, REWARD, ScoringTask

PEER_TIMEOUT_S = 60.0
"""A generator not seen for this long counts as gone."""
RETURN_S = 3.0
"""A generator that lives is back after this long when its stream breaks off, and REFRESH_EVERY_S later known to be."""
WORKER_TIMEOUT_S = 10.0
"""The same for a reward worker, which is seen every few seconds while its stream is open."""
KEPT_S = 3600.0
"""A peer not seen for this long is forgotten: ids may change with every start."""
MAX_KEPT = 16_384
"""Of more peers, one that counts as gone is forgotten at once."""
CONTEXT_GRACE_S = 5.0
"""Time after the first generator connects for one with a longer context, before long prompts are dropped."""
WRITE_EVERY_S = 1.0
REFRESH_EVERY_S = 2.0
LONGEST_EVERY_S = 0.25
"""Interval at which the largest generator is looked for again: every decision asks for it."""
WRITTEN_AT_ONCE = 64
"""Generators whose views are written by one command."""
MAX_BUFFERED_SPANS = 4096
MAX_SPAN_AGE_US = 24 * 3600 * 1_000_000
_GENERATOR, _WORKER = "g:", "w:"


class Peers:
    """The peers of one run."""

    def __init__(self, run_id: str, *, store: Store, clock: RunClock) -> None:
        self._run_id, self._store, self._clock = run_id, store, clock
        self._generators: dict[str, broker_pb2.GeneratorView] = {}
        self._spans: dict[str, list[bytes]] = {}
        self._unwritten: dict[str, None] = {}
        """Generators whose views changed since they were written to the store."""
        self._workers: dict[str, WorkerView] = {}
        self._workers_written_s: dict[str, float] = {}
        self._written_s = self._refreshed_s = -math.inf
        self._first_seen_s: float | None = None
        self._speeds: dict[str, Speed] = {}
        self._longest: int | None = None
        """Capacity of the largest generator at `_longest_s`, or of a larger one seen since."""
        self._longest_s = -math.inf
        self._gone: set[str] = set()
        """Generators whose stream to this process ended."""
        self._lost_s: dict[str, float] = {}
        """When the stream of a generator to this process broke off, by the monotonic clock."""

    def longest_context_tokens(self) -> int | None:
        """Capacity of the largest generator; None until others had time to connect."""
        if self._first_seen_s is None or self._clock.monotonic_s() - self._first_seen_s < CONTEXT_GRACE_S:
            return None
        at_s = self._clock.monotonic_s()
        if at_s - self._longest_s >= LONGEST_EVERY_S:
            live = [view.hello.max_context_tokens for view in self._generators.values() if self._is_live(view)]
            self._longest_s, self._longest = at_s, max(live, default=None)
        return self._longest

    def generator(self, generator_id: str) -> broker_pb2.GeneratorView | None:
        """A generator as last seen by any broker process."""
        return self._generators.get(generator_id)

    def generators(self, *, max_age_s: float) -> list[broker_pb2.GeneratorView]:
        """The generators with a recent heartbeat at any broker process."""
        # The clock is read once: there may be thousands.
        now_s, unbroken_since_s = self._clock.now_s(), self._clock.unbroken_since_s
        return [
            view
            for generator_id, view in self._generators.items()
            if generator_id not in self._gone
            and view.HasField("beat")
            and now_s - max(_beat_s(view), unbroken_since_s) <= max_age_s
        ]

    def living(self, *, max_age_s: float) -> set[str]:
        """Generators that were heard at any broker process lately, with a heartbeat or only hello, and do not leave."""
        now_s, unbroken_since_s = self._clock.now_s(), self._clock.unbroken_since_s
        return {
            generator_id
            for generator_id, view in self._generators.items()
            if generator_id not in self._gone
            and not view.beat.is_draining
            and now_s - max(_beat_s(view), unbroken_since_s) <= max_age_s
            and not self.is_lost(generator_id)
        }

    def sample_speed(self, generator_id: str) -> float | None:
        """Tokens per second of each sample that it decodes; None if not measured."""
        view = self._generators.get(generator_id)
        return None if view is None else sample_speed(view)

    def note_free(self, generator_id: str, num_free: int) -> None:
        """Number of leases a generator could get now."""
        view = self._generators.get(generator_id)
        if view is not None:
            view.num_free_leases = num_free

    async def meet_generator(self, hello: broker_pb2.GeneratorHello) -> None:
        """Record a hello, for every broker."""
        self._see(broker_pb2.GeneratorView(hello=hello))
        await self._write([hello.generator_id])

    def see_generator(
        self,
        hello: broker_pb2.GeneratorHello,
        beat: broker_pb2.GeneratorBeat,
        *,
        num_held: int = 0,
        num_free: int = 0,
    ) -> None:
        """Record a heartbeat, how many leases it names and how many it could get.

        The caretaker writes it to the store, with those of others.
        """
        view = broker_pb2.GeneratorView(hello=hello, beat=beat, num_free_leases=num_free)
        for field in ("busy_spans", "now_time", "active_lease_ids"):
            view.beat.ClearField(field)
        self._add_speed(view, num_held)
        if beat.busy_spans:
            spans = self._spans.setdefault(hello.generator_id, [])
            spans += [span.SerializeToString() for span in _by_run_clock(beat, self._clock.now_s())]
            del spans[:-MAX_BUFFERED_SPANS]
        self._see(view)

    def _see(self, view: broker_pb2.GeneratorView) -> None:
        name = view.hello.generator_id
        if self._first_seen_s is None:
            self._first_seen_s = self._clock.monotonic_s()
        view.beat_time.CopyFrom(timestamp(self._clock.now_s()))
        self._generators[name] = view
        self._longest = max(self._longest or 0, view.hello.max_context_tokens)
        self._note_back(name)
        self._unwritten[name] = None

    def _add_speed(self, view: broker_pb2.GeneratorView, num_held: int) -> None:
        if not view.hello.profile.max_concurrent_samples:
            # Not stated: its capacity is what it holds and asks for.
            view.hello.profile.max_concurrent_samples = num_held + view.num_free_leases
        speed = measured(self._speeds.get(view.hello.generator_id), view.hello, view.beat)
        if speed is not None:
            self._speeds[view.hello.generator_id] = speed
            view.measured_step_factor, view.measured_tokens_per_second = speed

    async def leave(self, generator_id: str) -> None:
        """Record the end of a generator's stream: until it is back anywhere, no work is left to it."""
        self._gone.add(generator_id)
        view = self._generators.get(generator_id)
        if view is not None:
            view.num_free_leases = 0
            view.has_left = view.beat.is_draining
            await self._write([generator_id])

    def lose(self, generator_id: str) -> None:
        """Record that a generator's stream broke off; one that drains is not expected back."""
        self._lost_s[generator_id] = self._clock.monotonic_s()
        view = self._generators.get(generator_id)
        if view is not None and view.beat.is_draining:
            view.has_left = True
            self._unwritten[generator_id] = None

    def is_lost(self, generator_id: str, *, for_s: float = RETURN_S) -> bool:
        """Whether a generator's stream to this process broke off so long ago, and it has not been back anywhere."""
        lost_s = self._lost_s.get(generator_id)
        return lost_s is not None and self._clock.monotonic_s() - lost_s >= for_s

    def _note_back(self, generator_id: str) -> None:
        self._gone.discard(generator_id)
        self._lost_s.pop(generator_id, None)

    async def _write_changed(self, *, at_once: bool = False) -> None:
        """Write the views that changed to the store, at most once a second."""
        at_s = self._clock.monotonic_s()
        if at_once or at_s - self._written_s >= WRITE_EVERY_S:
            self._written_s = at_s
            changed = list(self._unwritten)
            for first in range(0, len(changed), WRITTEN_AT_ONCE):
                await self._write(changed[first : first + WRITTEN_AT_ONCE])

    async def _write(self, generator_ids: Sequence[str]) -> None:
        """Write generators' views and busy spans; what the store does not take is written the next time."""
        known = [name for name in generator_ids if name in self._generators]
        spans = {_GENERATOR + name: self._spans.pop(name) for name in known if name in self._spans}
        for name in generator_ids:
            self._unwritten.pop(name, None)
        # One whose stream broke off may have been heard elsewhere since: what is known here would replace that.
        heard = [name for name in known if name not in self._lost_s or self._generators[name].has_left]
        views = {_GENERATOR + name: self._generators[name].SerializeToString() for name in heard}
        try:
            await self._store.put_peers(self._run_id, views, spans)
        except ServiceUnavailableError:
            self._unwritten.update(dict.fromkeys(known))
            for peer_id, unwritten in spans.items():
                name = peer_id.removeprefix(_GENERATOR)
                self._spans[name] = [*unwritten, *self._spans.get(name, ())][-MAX_BUFFERED_SPANS:]
            raise

    async def see_worker(
        self,
        worker_id: str,
        *,
        task: ScoringTask = REWARD,
        holding_reason: str | None = None,
        warning: str | None = None,
    ) -> None:
        """Record a sign of life of a reward worker or scorer, and any status it reports; written once a second."""
        at_s, now_s = self._clock.monotonic_s(), self._clock.now_s()
        view = self._workers.setdefault(worker_id, WorkerView())
        view.seen_s, view.task = now_s, task
        if holding_reason is not None:
            view.holding_since_s = (view.holding_since_s or now_s) if holding_reason else 0.0
            view.holding_reason = holding_reason
        view.warning = view.warning if warning is None else warning
        if at_s - self._workers_written_s.get(worker_id, -math.inf) >= WRITE_EVERY_S:
            self._workers_written_s[worker_id] = at_s
            await self._store.put_peers(self._run_id, {_WORKER + worker_id: view.SerializeToString()}, {})

    async def refresh(self, *, at_once: bool = False) -> None:
        """Tell other broker processes of the generators here, and learn of theirs, at most every two seconds."""
        await self._write_changed()
        at_s = self._clock.monotonic_s()
        if at_once or at_s - self._refreshed_s >= REFRESH_EVERY_S:
            self._refreshed_s = at_s
            stored = await self._store.peers(self._run_id)
            self._longest_s = -math.inf
            for view in _generators_in(stored):
                known = self._generators.get(view.hello.generator_id)
                if known is None or _news(view) > _news(known):
                    self._generators[view.hello.generator_id] = view
                    if not view.has_left:
                        self._note_back(view.hello.generator_id)
            self._note_workers(stored)
            await self._forget()
            if self._generators and self._first_seen_s is None:
                self._first_seen_s = at_s

    async def forget_all(self) -> None:
        """Write what is new, and know nothing any more: what others hear from now on is not learnt here."""
        await self._write_changed(at_once=True)
        if self._unwritten:
            return
        for known in (self._generators, self._spans, self._unwritten, self._workers, self._workers_written_s):
            known.clear()
        self._speeds.clear()
        self._gone.clear()
        self._lost_s.clear()
        self._written_s = self._refreshed_s = self._longest_s = -math.inf
        self._first_seen_s = self._longest = None

    async def _forget(self) -> None:
        """Forget peers that are long gone, here and in the store; nobody before the run's clock was read."""
        if self._clock.reading is None:
            return
        seen_s = {_GENERATOR + generator_id: _beat_s(view) for generator_id, view in self._generators.items()}
        seen_s |= {_WORKER + worker_id: view.seen_s for worker_id, view in self._workers.items()}
        kept_s = KEPT_S if len(seen_s) <= MAX_KEPT else PEER_TIMEOUT_S
        gone = [peer_id for peer_id, last_s in seen_s.items() if self._clock.age_s(last_s) > kept_s]
        for peer_id in gone:
            name = peer_id[len(_GENERATOR) :]
            if peer_id.startswith(_WORKER):
                del self._workers[name]
                self._workers_written_s.pop(name, None)
            else:
                del self._generators[name]
                self._spans.pop(name, None)
                self._note_back(name)
                self._speeds.pop(name, None)
        if gone:
            await self._store.forget_peers(self._run_id, gone)

    async def views(self, busy_since_s: float | None) -> tuple[list[broker_pb2.GeneratorView], list[str]]:
        """Generators, with spans that end after `busy_since_s` if given, and ids of reward workers seen recently."""
        stored = await self._store.peers(self._run_id)
        views: list[broker_pb2.GeneratorView] = []
        for stored_view in _generators_in(stored):
            generator_id = stored_view.hello.generator_id
            view = broker_pb2.GeneratorView()
            view.CopyFrom(max(self._generators.get(generator_id, stored_view), stored_view, key=_news))
            if busy_since_s is not None:
                raw = [
                    *await self._store.busy_spans(self._run_id, _GENERATOR + generator_id),
                    *self._spans.get(generator_id, ()),
                ]
                spans = [types_pb2.TimeSpan.FromString(span) for span in raw]
                view.busy_spans.extend(span for span in spans if unix_s(span.end_time) > busy_since_s)
            if view.busy_spans or self._is_live(view):
                views.append(view)
        self._note_workers(stored)
        return views, list(self._live_workers())

    def present(self) -> Present:
        """Connected peers as of the last refresh; does not ask the store."""
        generators = [view for view in self._generators.values() if self._is_live(view)]
        workers = self._live_workers()
        holding = {worker_id: view for worker_id, view in workers.items() if view.holding_reason}
        scorers = {worker_id for worker_id, view in workers.items() if view.task == REFERENCE}
        return Present(generators=generators, worker_ids=workers.keys() - scorers, scorer_ids=scorers, holding=holding)

    def reward_warnings(self) -> dict[str, str]:
        """Problems with samples reported by recently seen reward workers."""
        return {worker_id: view.warning for worker_id, view in self._live_workers().items() if view.warning}

    def _note_workers(self, stored: dict[str, bytes]) -> None:
        for peer_id, raw in stored.items():
            if peer_id.startswith(_WORKER):
                view, worker_id = WorkerView.FromString(raw), peer_id.removeprefix(_WORKER)
                if worker_id not in self._workers or view.seen_s > self._workers[worker_id].seen_s:
                    self._workers[worker_id] = view

    def _live_workers(self) -> dict[str, WorkerView]:
        workers = sorted(self._workers.items())
        return {name: view for name, view in workers if self._clock.age_s(view.seen_s) < WORKER_TIMEOUT_S}

    def _is_live(self, view: broker_pb2.GeneratorView) -> bool:
        return not view.has_left and self._clock.age_s(_beat_s(view)) < PEER_TIMEOUT_S


def _generators_in(stored: dict[str, bytes]) -> list[broker_pb2.GeneratorView]:
    """The generators among stored peers, by id."""
    views = [raw for peer_id, raw in sorted(stored.items()) if peer_id.startswith(_GENERATOR)]
    return [broker_pb2.GeneratorView.FromString(raw) for raw in views]


def _beat_s(view: broker_pb2.GeneratorView) -> float:
    return unix_s(view.beat_time)


def _news(view: broker_pb2.GeneratorView) -> tuple[float, bool]:
    """Grows with each view of a generator: that it has left is said of its last heartbeat."""
    return _beat_s(view), view.has_left


def _by_run_clock(beat: broker_pb2.GeneratorBeat, now_s: float) -> Iterable[types_pb2.TimeSpan]:
    """Its busy spans, moved to the run's clock by their age on its own; unchanged if it does not report its clock."""
    if not beat.HasField("now_time"):
        yield from beat.busy_spans
        return
    now_us, beat_us = round(now_s * 1e6), beat.now_time.ToMicroseconds()

    def moved(stamp: Timestamp) -> Timestamp:
        age_us = min(max(0, beat_us - stamp.ToMicroseconds()), MAX_SPAN_AGE_US)
        return timestamp((now_us - age_us) / 1e6)

    for span in beat.busy_spans:
        yield types_pb2.TimeSpan(start_time=moved(span.start_time), end_time=moved(span.end_time))

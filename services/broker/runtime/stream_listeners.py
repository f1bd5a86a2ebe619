"""Wakes the streams of a run that a change concerns: to wake those of a thousand generators takes 20 ms.

Promise: a stream is woken by every change that may give it something to send. What depends on time alone it has to look
at by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

from penstock.process.time_limits import Wake
from services.broker.fleet.deal_round import Seat
from services.broker.state.run_state import RunState


class Topic(Enum):
    """What a listener waits for; all are woken when the run ends."""

    EVERYTHING = "everything"
    END = "end"
    SCORING = "scoring"
    """Samples that finished."""


class Listeners:
    """See the module. `seats` are the generators that may get leases, by id, each with its lease stream."""

    def __init__(self, seats: Mapping[str, Seat]) -> None:
        self._seats = seats
        self._by_topic: dict[Topic, dict[Wake, None]] = {topic: {} for topic in Topic}
        self._by_generator: dict[str, dict[Wake, None]] = {}
        """Lease streams."""
        self._owner: tuple[object, ...] = ()
        self._admitted: tuple[object, ...] = ()
        """What admission and the owner were at the last change."""

    def __len__(self) -> int:
        return sum(map(len, (*self._by_topic.values(), *self._by_generator.values())))

    @property
    def has_holders(self) -> bool:
        """Whether any of them waits for more than the end."""
        return len(self) > len(self._by_topic[Topic.END])

    @property
    def has_lease_streams(self) -> bool:
        """Whether any of them is a generator's."""
        return bool(self._by_generator)

    @property
    def has_others(self) -> bool:
        """Whether any waits for more than the end, besides generators."""
        return any(events for topic, events in self._by_topic.items() if topic is not Topic.END)

    @contextmanager
    def listening(self, event: Wake, topic: Topic) -> Iterator[Wake]:
        """Set `event` when something of a topic changes, until the end of the block."""
        self._by_topic[topic][event] = None
        try:
            yield event
        finally:
            self._by_topic[topic].pop(event, None)

    @contextmanager
    def leasing(self, event: Wake, generator_id: str) -> Iterator[Wake]:
        """Set `event` when a generator's leases change, or it may get some, until the end of the block."""
        self._by_generator.setdefault(generator_id, {})[event] = None
        try:
            yield event
        finally:
            streams = self._by_generator[generator_id]
            streams.pop(event, None)
            if not streams:
                del self._by_generator[generator_id]

    def wake_all(self, *, is_ended: bool) -> None:
        """Set every event; of those that wait for the end only when it has come."""
        for topic, events in self._by_topic.items():
            if is_ended or topic is not Topic.END:
                _set(events)
        for events in self._by_generator.values():
            _set(events)

    def wake(self, state: RunState) -> None:
        """Set the events of those that the changes since the last call concern."""
        news, before = state.take_news(), (self._owner, self._admitted)
        self._owner, self._admitted = _owner(state), _admitted(state)
        if news.is_all or state.run.is_closed or self._owner != before[0]:
            self.wake_all(is_ended=state.run.is_closed)
            return
        _set(self._by_topic[Topic.EVERYTHING])
        if news.has_finished:
            _set(self._by_topic[Topic.SCORING])
        for generator_id in news.holders:
            _set(self._by_generator.get(generator_id, {}))
        if state.queue and (news.has_queued or self._admitted != before[1]):
            for seat in self._seats.values():
                if seat.num_free > 0:
                    seat.wake()


def _set(events: Mapping[Wake, None]) -> None:
    for event in events:
        event.set()


def _owner(state: RunState) -> tuple[object, ...]:
    """The run's trainer, of which lease streams tell their generators."""
    owner = state.run.owner
    return owner.instance_id, owner.owner_id, owner.epoch


def _admitted(state: RunState) -> tuple[object, ...]:
    """What decides, beside the queue, whether a generator may start a group."""
    run, index = state.run, state.index
    return run.policy_version, run.history, index.num_started, index.live_bytes >= state.policy.max_live_bytes

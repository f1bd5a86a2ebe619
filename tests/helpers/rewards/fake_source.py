"""A queue of leases: the other side of a scoring pool, without a broker."""

from __future__ import annotations

import asyncio

from penstock.v1 import broker_pb2
from tests.helpers.brokers.scripted_scoring import scoring_item


class FakeSource:
    """Hands out leases and keeps the scores of those that are held."""

    def __init__(self, num_samples):
        self._queue = asyncio.Queue()
        self.held = {}
        self.scores = {}
        self.num_answers = 0
        for number in range(num_samples):
            lease = broker_pb2.ScoringLease(lease_id=str(number), item=scoring_item(number))
            self.held[lease.lease_id] = lease
            self._queue.put_nowait(lease)

    @property
    def num_held(self):
        return len(self.held)

    def is_held(self, lease_id):
        return lease_id in self.held

    async def take(self, *, max_items):
        leases = [await self._queue.get()]
        while len(leases) < max_items and not self._queue.empty():
            leases.append(self._queue.get_nowait())
        return leases

    def answer(self, results):
        for result in results:
            self.num_answers += 1
            if self.held.pop(result.lease_id, None) is not None:
                self.scores[result.key.sample_index] = result.score

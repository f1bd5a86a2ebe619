"""A broker that only knows StreamScoring: hands out scoring leases and keeps what comes back."""

from __future__ import annotations

import asyncio
from collections import deque

from penstock.errors import ServiceUnavailableError, UnknownRunError
from penstock.network.rpc import Service, service_of
from penstock.v1 import broker_pb2, broker_pb2_grpc, reward_pb2, types_pb2


def scoring_item(number: int, *, completion: str = "#### 4", answer: str = "4") -> reward_pb2.ScoreItem:
    """Sample `number` of one group."""
    key = types_pb2.SampleKey(group_id="g", sample_index=number)
    return reward_pb2.ScoreItem(
        key=key,
        prompt_text="2+2=",
        completion_text=completion,
        answer=answer,
        token_ids=b"\x01\x00\x00\x00",
        run_id="r",
    )


class ScriptedBroker(broker_pb2_grpc.BrokerServiceServicer):
    """Gives each item of `items` out once, within the credits; `results` maps sample index to Score."""

    def __init__(self, items, *, is_known=True, lease_s=60.0):
        self.items = deque(items)
        self.results: dict[int, types_pb2.Score] = {}
        self.num_results = 0
        self.renewals: list[set[str]] = []
        self.hellos: list[broker_pb2.RewardHello] = []
        self.num_refused = 0
        """Streams for a run that was not known yet."""
        self.num_out = 0
        self.most_out = 0
        self.is_known = is_known
        self.is_closed = False
        self.lose: set[str] = set()
        self.swallow_results = 0
        """So many results are stored without a receipt, and the stream is broken after each."""
        self._lease_s = lease_s
        self._credit = 0
        self._given = 0

    def service(self) -> Service:
        return service_of(self)

    async def StreamScoring(self, request_iterator, context):
        if not self.is_known:
            self.num_refused += 1
            raise UnknownRunError("no run 'r'; open it first")
        first = await context.read()
        self.hellos.append(first.hello)
        self._credit, self._given = first.credit_total, 0
        self.renewals.append(set(first.active_lease_ids))
        replies: asyncio.Queue[broker_pb2.StreamScoringResponse] = asyncio.Queue()
        reader = asyncio.create_task(self._read(context, replies))
        yield broker_pb2.StreamScoringResponse()
        try:
            while not self.is_closed:
                if leases := self._leases():
                    yield broker_pb2.StreamScoringResponse(leases=leases)
                try:
                    async with asyncio.timeout(0.02):
                        reply = await replies.get()
                except TimeoutError:
                    if reader.done():
                        reader.result()
                        return
                else:
                    # Not inside the timeout: it would cut a write that takes long.
                    yield reply
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, context, replies):
        while (request := await context.read()) and isinstance(request, broker_pb2.StreamScoringRequest):
            self._credit = request.credit_total or self._credit
            if request.active_lease_ids:
                self.renewals.append(set(request.active_lease_ids))
            reply = broker_pb2.StreamScoringResponse()
            for result in request.results:
                self.num_results += 1
                if self.swallow_results:
                    self.swallow_results -= 1
                    raise ServiceUnavailableError("the broker restarts")
                if result.lease_id in self.lose:
                    reply.lost_lease_ids.append(result.lease_id)
                else:
                    self.results[result.key.sample_index] = result.score
                    reply.accepted_lease_ids.append(result.lease_id)
                self.num_out -= 1
            await replies.put(reply)

    def _leases(self):
        leases = []
        while self.items and self._given < self._credit and len(leases) < 64:
            item = self.items.popleft()
            lease = broker_pb2.ScoringLease(lease_id=f"lease-{item.key.sample_index}", item=item)
            lease.lease_duration.FromMilliseconds(int(self._lease_s * 1000))
            leases.append(lease)
            self._given += 1
            self.num_out += 1
        self.most_out = max(self.most_out, self.num_out)
        return leases

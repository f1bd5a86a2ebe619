"""A reward worker, with Penstock's own client: python -m tests.helpers.faults.reward.

Now and then it reports another score for a sample that it has answered: too late, so it must not count.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from penstock.clients.scoring import ScoringSession
from penstock.errors import PenstockError
from penstock.network.connection import Connection
from penstock.network.rpc import open_channel, translated_errors
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from tests.helpers.faults import workload

SCORE_S = 0.02
RESEND_SHARE = 0.1


class Worker:
    """Scores by name."""

    def __init__(self, brokers: str, name: str, folder: Path, seed: int) -> None:
        self._brokers, self._name, self._folder = brokers, name, folder
        self._random = random.Random(seed)
        self._session = ScoringSession(Connection(brokers), run_id=workload.RUN_ID, worker_id=name, max_leases=32)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._session.run())
            tasks.create_task(self._score())

    async def _score(self) -> None:
        while True:
            leases = await self._session.take(max_items=8)
            await asyncio.sleep(SCORE_S)
            self._session.answer([_result(lease) for lease in leases])
            if self._random.random() < RESEND_SHARE:
                await self._resend(leases)

    async def _resend(self, leases: list[broker_pb2.ScoringLease]) -> None:
        await asyncio.sleep(0.2)
        late = [lease for lease in leases if not self._session.is_held(lease.lease_id)]
        if not late:
            return
        hello = broker_pb2.RewardHello(run_id=workload.RUN_ID, worker_id=f"{self._name}-late")
        results = [_result(lease, change=0.5) for lease in late]
        done = asyncio.Event()

        async def requests() -> object:
            yield broker_pb2.StreamScoringRequest(hello=hello)
            yield broker_pb2.StreamScoringRequest(results=results)
            await done.wait()

        try:
            async with open_channel(self._brokers) as channel, translated_errors("broker"):
                stub = broker_pb2_grpc.BrokerServiceStub(channel)
                async for response in stub.StreamScoring(requests(), timeout=5):
                    if response.lost_lease_ids or response.accepted_lease_ids:
                        workload.note(self._folder, "resent", what="scores")
                        return
        except PenstockError:
            return
        finally:
            done.set()


def _result(lease: broker_pb2.ScoringLease, *, change: float = 0.0) -> broker_pb2.ScoreResult:
    key = lease.item.key
    value = workload.score(key.group_id, key.sample_index) + change
    score = types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=value, model="scripted")
    return broker_pb2.ScoreResult(lease_id=lease.lease_id, key=key, score=score)


async def main(brokers: str, name: str, folder: str, seed: str) -> None:
    """Until killed."""
    await Worker(brokers, name, Path(folder), int(seed)).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

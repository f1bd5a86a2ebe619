"""A producer of finished groups, with Penstock's own client: python -m tests.helpers.faults.producer.

Now and then it puts a group again that the run has.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import numpy as np

from penstock.clients.trajectories import TrajectorySession
from penstock.errors import PenstockError
from penstock.network.connection import Connection
from penstock.network.rpc import backoff_s, call_with_retry, open_channel
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from tests.helpers.faults import workload

PUT_EVERY_S = 0.6
RESEND_SHARE = 0.3


class Producer:
    """Puts groups that a policy of the run's present version could have decoded."""

    def __init__(self, brokers: str, name: str, folder: Path, seed: int) -> None:
        self._name, self._folder, self._seed = name, folder, seed
        self._random = random.Random(seed)
        self._channel = open_channel(brokers)
        self._stub = broker_pb2_grpc.BrokerServiceStub(self._channel)

    async def run(self) -> None:
        for delay_s in backoff_s():
            try:
                await self._produce()
            except PenstockError:
                # The run is not open yet, or closed.
                await asyncio.sleep(delay_s)

    async def _produce(self) -> None:
        await self._version()
        session = TrajectorySession(
            Connection(self._channel), run_id=workload.RUN_ID, producer_id=self._name, max_unanswered=2
        )
        number = 0
        async with session:
            while True:
                group = _group(f"{self._name}-{self._seed}-{number}", await self._version())
                receipt = await session.store([group])
                if not receipt.refused and self._random.random() < RESEND_SHARE:
                    again = await session.store([group])
                    workload.note(self._folder, "resent", what="groups")
                    if again.num_samples:
                        workload.note(self._folder, "violation", what=f"{group.prompt.group_id}: counted twice")
                number += 1
                await asyncio.sleep(PUT_EVERY_S)

    async def _version(self) -> int:
        request = broker_pb2.GetRunRequest(run_id=workload.RUN_ID)
        response = await call_with_retry(self._stub.GetRun, request, peer="broker", give_up_after_s=60.0)
        return int(response.policy_version)


def _group(name: str, version: int) -> types_pb2.TrajectoryGroup:
    trajectories = [_trajectory(name, index, version) for index in range(workload.GROUP_SIZE)]
    return types_pb2.TrajectoryGroup(
        prompt=workload.prompt(name), trajectories=trajectories, min_policy_version=version
    )


def _trajectory(name: str, index: int, version: int) -> types_pb2.Trajectory:
    tokens = workload.completion(name, index)
    versions = np.full(len(tokens), version, np.int64)
    return types_pb2.Trajectory(
        key=types_pb2.SampleKey(group_id=name, sample_index=index),
        token_ids=int32_bytes(tokens),
        behavior_logprobs=float32_bytes(workload.logprobs(tokens, versions)),
        policy_versions=encode_versions(versions),
        finish_reason=types_pb2.FINISH_REASON_STOP,
        score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=workload.score(name, index), model="scripted"),
        min_policy_version=version,
        max_policy_version=version,
    )


async def main(brokers: str, name: str, folder: str, seed: str) -> None:
    """Until killed."""
    await Producer(brokers, name, Path(folder), int(seed)).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

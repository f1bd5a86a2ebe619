"""Plays the one reward worker and the one trainer of a run, in a worker process."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.broker.worker import Ready
from penstock.clients.broker import BrokerClient
from penstock.clients.scoring import MAX_LEASES, ScoringSession
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, types_pb2

CONSUMER = "trainer-0"
MICROBATCH_GROUPS = 32
SILENCE_S = 60.0


async def train(ready: Ready, *, broker: str, run_id: str, num_groups: int, groups_per_step: int) -> dict[str, Any]:
    """Score every finished sample, take every group and acknowledge each step, until `num_groups` are trained."""
    scoring = ScoringSession(Connection(broker), run_id=run_id, worker_id="reward-0", max_leases=MAX_LEASES)
    tasks = [asyncio.create_task(scoring.run()), asyncio.create_task(_score(scoring))]
    num_trained = num_tokens = version = 0
    async with (
        BrokerClient(broker) as client,
        client.consumer(run_id, CONSUMER, max_held_groups=2 * groups_per_step, max_groups=MICROBATCH_GROUPS) as session,
    ):
        await ready()
        start_s = time.monotonic()
        step: list[str] = []
        while num_trained < num_groups:
            microbatch = await session.next(timeout_s=SILENCE_S)
            if microbatch is None:
                for task in tasks:
                    if task.done():
                        task.result()
                raise RuntimeError(f"no group came for {SILENCE_S:g} s: {session.waiting_reason}")
            step += [group.prompt.group_id for group in microbatch.groups]
            num_tokens += sum(len(each.token_ids) // 4 for group in microbatch.groups for each in group.trajectories)
            if len(step) >= groups_per_step:
                version += 1
                await client.ack_step(run_id, consumer_id=CONSUMER, group_ids=step, policy_version=version)
                session.release(step)
                num_trained += len(step)
                step = []
    await end(*tasks)
    return {"took_s": time.monotonic() - start_s, "num_groups": num_trained, "num_tokens": num_tokens}


async def _score(session: ScoringSession) -> None:
    """Give every sample the same score."""
    score = types_pb2.Score(value=1.0, status=types_pb2.SCORE_STATUS_OK, model="benchmark")
    while True:
        taken = await session.take(max_items=256)
        session.answer(
            [broker_pb2.ScoreResult(lease_id=each.lease_id, key=each.item.key, score=score) for each in taken]
        )

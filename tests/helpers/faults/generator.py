"""A generator that decodes made-up tokens, with Penstock's own clients: python -m tests.helpers.faults.generator.

Now and then it sends again what it has sent long ago, and something that must never be accepted.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import numpy as np

from penstock.clients.leases import LeaseSession
from penstock.clients.sample_stream import SampleStream
from penstock.clients.sharding.sharded_tokens import ShardedTokens
from penstock.errors import PenstockError
from penstock.network.connection import Connection
from penstock.network.rpc import backoff_s, open_channel, translated_errors
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_array, int32_bytes
from tests.helpers.faults import workload

NUM_SLOTS = 12
DECODE_EVERY_S = 0.03
RESEND_SHARE = 0.2
OVERLAP_SHARE = 0.02


class _Decoding:
    """One lease that is worked on; also the listener of its stream."""

    def __init__(self, lease: broker_pb2.Lease) -> None:
        self.lease = lease
        self.ended = asyncio.Event()
        self.is_settled = False
        self.task: asyncio.Task[None] | None = None
        self.stream: SampleStream | None = None

    def settled(self) -> None:
        self.is_settled = True
        self.ended.set()

    def refused(self, error: broker_pb2.ChunkError) -> None:
        self.ended.set()


class Generator:
    """The holder of a lease session."""

    def __init__(self, brokers: str, name: str, folder: Path, seed: int) -> None:
        self._name, self._folder = name, folder
        self._random = random.Random(seed)
        self._channel = open_channel(brokers)
        self._stub = broker_pb2_grpc.BrokerServiceStub(self._channel)
        hello = broker_pb2.GeneratorHello(
            run_id=workload.RUN_ID, generator_id=name, engine="scripted", max_context_tokens=1024
        )
        self._leases = LeaseSession(Connection(self._channel), hello=hello, handler=self)
        self._tokens = ShardedTokens(
            Connection(self._channel), run_id=workload.RUN_ID, generator_id=name, flush_interval_s=0.05
        )
        self._active: dict[str, _Decoding] = {}
        self._version: int | None = None
        self._version_changed = asyncio.Event()

    def num_free_slots(self) -> int:
        return NUM_SLOTS - len(self._active) if self._version is not None else 0

    def beat(self) -> broker_pb2.GeneratorBeat:
        return broker_pb2.GeneratorBeat(policy_version=self._version or 0, active_lease_ids=list(self._active))

    def lease(self, lease: broker_pb2.Lease) -> None:
        decoding = self._active[lease.lease_id] = _Decoding(lease)
        decoding.task = asyncio.ensure_future(self._decode(decoding))

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        decoding = self._active.get(revocation.lease_id)
        if decoding is not None and decoding.task is not None:
            decoding.task.cancel()

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        """Its versions are the run's, whoever trains it."""

    def run_closed(self) -> None:
        """Not in this run."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work in (self._leases.run, self._tokens.run, self._watch):
                tasks.create_task(work())

    async def _watch(self) -> None:
        for delay_s in backoff_s():
            try:
                async with translated_errors("broker"):
                    async for response in self._stub.WatchPolicy(broker_pb2.WatchPolicyRequest(run_id=workload.RUN_ID)):
                        self._version = response.policy_version
                        self._version_changed.set()
                        self._leases.notify()
            except PenstockError:
                await asyncio.sleep(delay_s)

    async def _decode(self, decoding: _Decoding) -> None:
        lease, key = decoding.lease, decoding.lease.key
        tokens = workload.completion(key.group_id, key.sample_index)
        prefix = int32_array(lease.prefix_token_ids, "prefix")
        if not np.array_equal(prefix, tokens[: len(prefix)]):
            workload.note(
                self._folder, "violation", what=f"{key.group_id}/{key.sample_index}: prefix of another sample"
            )
        stream = decoding.stream = self._tokens.open(
            key, lease_id=lease.lease_id, offset=len(prefix), listener=decoding, token_shard=lease.token_shard
        )
        try:
            while stream.num_tokens < len(tokens) and not decoding.ended.is_set():
                await self._append(stream, tokens, lease.min_policy_version)
                await asyncio.sleep(DECODE_EVERY_S)
                if self._random.random() < OVERLAP_SHARE:
                    await self._overlap(lease, tokens, stream.num_tokens)
            stream.finish(types_pb2.FINISH_REASON_STOP, text=f"{key.group_id}/{key.sample_index}")
            await decoding.ended.wait()
            if decoding.is_settled and self._random.random() < RESEND_SHARE:
                await self._resend(lease, tokens)
        finally:
            stream.discard()
            del self._active[lease.lease_id]
            self._leases.notify()

    async def _append(self, stream: SampleStream, tokens: np.ndarray, least_version: int) -> None:
        await self._tokens.wait_for_room()
        while self._version is None or self._version < least_version:
            self._version_changed.clear()
            await self._version_changed.wait()
        part = tokens[stream.num_tokens : stream.num_tokens + self._random.randint(1, 16)]
        versions = np.full(len(part), self._version, np.int64)
        stream.append(part, workload.logprobs(part, versions), policy_version=self._version)

    async def _resend(self, lease: broker_pb2.Lease, tokens: np.ndarray) -> None:
        """What is stored already, and a tail that the sample does not have: neither may change anything."""
        tail = np.asarray([7, 7, 7], np.int32)
        await self._send_beside(_chunk(lease, 0, tokens[:5]), _chunk(lease, len(tokens), tail))

    async def _overlap(self, lease: broker_pb2.Lease, tokens: np.ndarray, num_decoded: int) -> None:
        """Tokens that are stored, or about to be, once more and with the next ones: each may count once only."""
        first = max(0, num_decoded - 4)
        await self._send_beside(_chunk(lease, first, tokens[first : first + 8], version=self._version or 0))

    async def _send_beside(self, *chunks: types_pb2.TokenChunk) -> None:
        """On a stream of its own, beside that of the session."""
        request = broker_pb2.StreamTokensRequest(
            run_id=workload.RUN_ID, generator_id=self._name, sequence=1, chunks=chunks
        )

        async def requests() -> object:
            yield request

        try:
            async with translated_errors("broker"):
                async for response in self._stub.StreamTokens(requests(), timeout=5):
                    if response.errors:
                        workload.note(self._folder, "resent", what="chunks")
                    return
        except PenstockError:
            return


def _chunk(lease: broker_pb2.Lease, offset: int, tokens: np.ndarray, *, version: int = 0) -> types_pb2.TokenChunk:
    versions = np.full(len(tokens), version, np.int64)
    return types_pb2.TokenChunk(
        key=lease.key,
        lease_id=lease.lease_id,
        offset=offset,
        token_ids=int32_bytes(tokens),
        logprobs=float32_bytes(workload.logprobs(tokens, versions)),
        policy_versions=encode_versions(versions),
    )


async def main(brokers: str, name: str, folder: str, seed: str) -> None:
    """Until killed."""
    await Generator(brokers, name, Path(folder), int(seed)).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

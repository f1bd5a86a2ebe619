"""Plays many generators in one worker process: Penstock's own client code, tokens that are made up.

The roles of one process are played one after the other and share its generators, whose streams and heartbeats go on in
between.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.broker.worker import Ready
from penstock.clients.leases import LeaseSession
from penstock.clients.sample_stream import SampleStream
from penstock.clients.sharding.sharded_tokens import ShardedTokens
from penstock.network.connection import Connection
from penstock.process.tasks import end
from penstock.v1 import broker_pb2, types_pb2

FLUSH_INTERVAL_S = 0.2
"""The generator's default."""
MAX_CONTEXT_TOKENS = 1 << 17
VOCABULARY = 150_000
POLL_S = 0.05
CONNECTING = "connecting"
PHASE_TIMEOUT_S = 240.0


class Generator:
    """One generator: it takes as many leases as it has slots, and stores what it is given."""

    def __init__(self, number: int, *, broker: str, run_id: str, num_slots: int) -> None:
        self.num_slots = num_slots
        self.streams: dict[str, SampleStream] = {}
        self.is_draining = True
        """It takes work only once the measured phase begins."""
        self.num_refused = 0
        self.sent_late_s = 0.0
        """How long after it was due one of its heartbeats was written, at most."""
        self._due_s: float | None = None
        common: dict[str, Any] = {"run_id": run_id, "generator_id": f"gen-{number:05}"}
        hello = broker_pb2.GeneratorHello(**common, engine="benchmark", max_context_tokens=MAX_CONTEXT_TOKENS)
        hello.profile.max_concurrent_samples = num_slots
        self._connection = Connection(broker)
        self.tokens = ShardedTokens(self._connection, **common, flush_interval_s=FLUSH_INTERVAL_S)
        self.leases = LeaseSession(self._connection, hello=hello, handler=self)
        self._tasks = [asyncio.create_task(self.tokens.run()), asyncio.create_task(self.leases.run())]

    @property
    def is_connected(self) -> bool:
        """Whether the broker has answered."""
        return not self.leases.waiting_reason.startswith(CONNECTING)

    def check(self) -> None:
        """Raise what ended one of its streams, if anything did."""
        for task in self._tasks:
            if task.done():
                task.result()

    def append(self, token_ids: Any, logprobs: Any) -> int:
        """Append these tokens to every sample; returns the number of samples."""
        for stream in self.streams.values():
            stream.append(token_ids, logprobs, policy_version=0)
        return len(self.streams)

    def finish(self) -> None:
        """End every sample, and take no other."""
        self.is_draining = True
        for stream in self.streams.values():
            stream.finish(types_pb2.FINISH_REASON_STOP)

    async def close(self) -> None:
        """Leave."""
        await end(*self._tasks)
        await self._connection.close()

    def num_free_slots(self) -> int:
        """See `LeaseHandler`."""
        return self.num_slots - len(self.streams)

    def beat(self) -> broker_pb2.GeneratorBeat:
        """See `LeaseHandler`."""
        at_s = time.monotonic()
        if self._due_s is not None:
            self.sent_late_s = max(self.sent_late_s, at_s - self._due_s)
        self._due_s = at_s + self.leases.beat_interval_s
        return broker_pb2.GeneratorBeat(
            active_lease_ids=list(self.streams), num_running=len(self.streams), is_draining=self.is_draining
        )

    def lease(self, lease: broker_pb2.Lease) -> None:
        """See `LeaseHandler`."""
        self.streams[lease.lease_id] = self.tokens.open(
            lease.key,
            lease_id=lease.lease_id,
            offset=len(lease.prefix_token_ids) // 4,
            listener=_Ending(self, lease.lease_id),
            token_shard=lease.token_shard,
        )

    def revoke(self, revocation: broker_pb2.LeaseRevocation) -> None:
        """See `LeaseHandler`."""
        stream = self.streams.pop(revocation.lease_id, None)
        if stream is not None:
            stream.discard()

    def owned_by(self, owner: broker_pb2.RunOwner) -> None:
        """See `LeaseHandler`: it does not matter here who trains."""

    def run_closed(self) -> None:
        """See `LeaseHandler`."""
        self.streams.clear()


class _Ending:
    """Notes the end of one sample; a StreamListener."""

    def __init__(self, generator: Generator, lease_id: str) -> None:
        self._generator, self._lease_id = generator, lease_id

    def settled(self) -> None:
        self._generator.streams.pop(self._lease_id, None)

    def refused(self, _error: broker_pb2.ChunkError) -> None:
        self._generator.num_refused += 1
        self._generator.streams.pop(self._lease_id, None)


_fleet: list[Generator] = []
"""The generators of this process."""


async def connect(
    ready: Ready, *, brokers: Sequence[str], run_id: str, numbers: Sequence[int], num_slots: int
) -> dict[str, Any]:
    """Connect generators of these numbers, spread over the brokers; they take no work yet."""
    await ready()
    start_s = time.monotonic()
    for number in numbers:
        broker = brokers[number % len(brokers)]
        _fleet.append(Generator(number, broker=broker, run_id=run_id, num_slots=num_slots))
    await _until(lambda: all(generator.is_connected for generator in _fleet), "all are connected")
    return {"took_s": time.monotonic() - start_s}


async def lease(ready: Ready, *, over_s: float) -> dict[str, Any]:
    """Ask for work, one generator after the other within this time, until every slot has a sample."""
    await ready()
    start_s = time.monotonic()
    for number, generator in enumerate(_fleet):
        await asyncio.sleep(max(0.0, start_s + number / len(_fleet) * over_s - time.monotonic()))
        generator.is_draining = False
        generator.leases.notify()
    await _until(lambda: not any(generator.num_free_slots() for generator in _fleet), "every slot has a sample")
    return {"took_s": time.monotonic() - start_s, "num_leases": sum(len(generator.streams) for generator in _fleet)}


async def stream(ready: Ready, *, num_tokens: int, period_s: float, num_periods: int) -> dict[str, Any]:
    """Once in each period every generator sends a chunk of `num_tokens` for each of its samples, as one request."""
    rng = np.random.default_rng(len(_fleet))
    token_ids = rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)
    logprobs = -rng.random(num_tokens, dtype=np.float32)
    stored = sum(generator.tokens.num_tokens_stored for generator in _fleet)
    num_chunks = 0
    await ready()
    start_s = time.monotonic()
    for period in range(num_periods):
        for number, generator in enumerate(_fleet):
            # Spread over the period, as the flushes of different generators are.
            at_s = start_s + (period + number / len(_fleet)) * period_s
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            generator.check()
            num_chunks += generator.append(token_ids, logprobs)
    sent_s = time.monotonic() - start_s
    await asyncio.gather(*(generator.tokens.flush(timeout_s=PHASE_TIMEOUT_S) for generator in _fleet))
    return {
        "sent_s": sent_s,
        "took_s": time.monotonic() - start_s,
        "num_chunks": num_chunks,
        "num_tokens": num_chunks * num_tokens,
        "num_stored": sum(generator.tokens.num_tokens_stored for generator in _fleet) - stored,
        "num_refused": sum(generator.num_refused for generator in _fleet),
    }


async def finish(ready: Ready, *, over_s: float) -> dict[str, Any]:
    """End all samples, those of one generator after those of another, and wait until that is stored."""
    await ready()
    start_s = time.monotonic()
    for number, generator in enumerate(_fleet):
        await asyncio.sleep(max(0.0, start_s + number / len(_fleet) * over_s - time.monotonic()))
        generator.finish()
    await _until(lambda: not any(generator.streams for generator in _fleet), "every sample has ended")
    return {"took_s": time.monotonic() - start_s, "num_refused": sum(generator.num_refused for generator in _fleet)}


async def leave(ready: Ready) -> dict[str, Any]:
    """Disconnect all; says how late their own heartbeats were, before the broker had anything to do with it."""
    await ready()
    late_s = max((generator.sent_late_s for generator in _fleet), default=0.0)
    for generator in _fleet:
        await generator.close()
    _fleet.clear()
    return {"heartbeat_sent_late_max_s": late_s}


async def _until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds. Raises RuntimeError after PHASE_TIMEOUT_S, and what ended a stream."""
    try:
        async with asyncio.timeout(PHASE_TIMEOUT_S):
            while not condition():
                for generator in _fleet:
                    generator.check()
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise RuntimeError(f"generators waited {PHASE_TIMEOUT_S:g} s until {what}: {_state()}") from error


def _state() -> str:
    """What the generators do, for an error message."""
    reasons = Counter(generator.leases.waiting_reason for generator in _fleet)
    listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
    num_held = sum(len(generator.streams) for generator in _fleet)
    return f"they hold {num_held} of {sum(each.num_slots for each in _fleet)} samples: {listed}"

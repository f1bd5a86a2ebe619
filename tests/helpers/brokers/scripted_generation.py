"""A broker that only knows leases and tokens: hands samples out within credits and keeps what comes back."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.duration_pb2 import Duration

from penstock.errors import ServiceUnavailableError, UnknownRunError
from penstock.network.rpc import Service, service_of
from penstock.v1 import broker_pb2, broker_pb2_grpc, types_pb2
from penstock.wire.codec import decode_versions, float32_array, int32_array, int32_bytes


def prompt(group_id: str = "g", *, tokens=(5, 6, 7), max_new_tokens=24, seed=None, group_size=1, **sampling):
    """A prompt of a group."""
    params = types_pb2.SamplingParams(max_new_tokens=max_new_tokens, seed=seed, **sampling)
    return types_pb2.Prompt(
        group_id=group_id,
        token_ids=int32_bytes(tokens),
        group_size=group_size,
        sampling=params,
        purpose=types_pb2.PURPOSE_TRAIN,
    )


@dataclass(kw_only=True)
class Sample:
    """A sample's record, as a broker keeps it."""

    prompt: types_pb2.Prompt
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    lease_id: str | None = None
    num_leases: int = 0
    finish_reason: int = 0
    text: str = ""
    routes: bytes = b""
    loss_mask: bytes = b""
    """A byte a token."""
    score: types_pb2.Score | None = None
    holder: str = ""

    @property
    def is_finished(self) -> bool:
        return self.finish_reason in (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH)


class ScriptedGenerationBroker(broker_pb2_grpc.BrokerServiceServicer):
    """Leases every sample once, and again when it comes back aborted."""

    def __init__(self):
        self.samples: list[Sample] = []
        self.queue: deque[Sample] = deque()
        self.hellos: list[broker_pb2.GeneratorHello] = []
        self.beats: list[broker_pb2.GeneratorBeat] = []
        self.requests: list[broker_pb2.StreamTokensRequest] = []
        self.min_policy_version = 0
        self.is_known = True
        self.is_closed = False
        self.is_served = asyncio.Event()
        """Until it is set, lease streams are read, but nothing is sent."""
        self.is_served.set()
        self.is_acknowledging = True
        self.is_withholding = False
        """Whether the last request came while that was false."""
        self.num_stream_breaks = 0
        """So many token requests are stored without an answer, and the stream is broken after each."""
        self.refusals: deque[tuple[str, int]] = deque()
        """Reason and next_offset with which coming chunks are refused."""
        self.flush_interval: Duration | None = None
        """What generators are asked for."""
        self.heartbeat_interval: Duration | None = None
        """The same of heartbeats; said when it changes."""
        self.lease_breaks = 0
        self.owner: broker_pb2.RunOwner | None = None
        """Who trains the run; said where it is known, and when it changes."""
        self._revocations: asyncio.Queue[str] = asyncio.Queue()

    def service(self) -> Service:
        return service_of(self)

    def submit(self, prompt: types_pb2.Prompt, *, prefix=()) -> list[Sample]:
        """Queue all samples of a prompt."""
        made = [
            Sample(prompt=prompt, index=index, token_ids=list(prefix), loss_mask=b"\1" * len(prefix))
            for index in range(prompt.group_size)
        ]
        self.samples.extend(made)
        self.queue.extend(made)
        return made

    def revoke(self, lease_id: str) -> None:
        self._revocations.put_nowait(lease_id)

    def break_lease_stream(self) -> None:
        self.lease_breaks += 1

    @property
    def num_finished(self) -> int:
        return sum(sample.is_finished for sample in self.samples)

    @property
    def num_out(self) -> int:
        return sum(sample.lease_id is not None for sample in self.samples)

    async def StreamLeases(self, request_iterator, context):
        if not self.is_known:
            raise UnknownRunError("no such run")
        first = await context.read()
        assert first.WhichOneof("frame") == "hello"
        self.hellos.append(first.hello)
        told: broker_pb2.RunOwner | None = None
        asked: Duration | None = None
        latest = broker_pb2.GeneratorBeat()
        breaks = self.lease_breaks
        num_sent = 0

        async def listen():
            async for request in request_iterator:
                assert request.WhichOneof("frame") == "beat"
                assert request.beat.credit_total >= latest.credit_total
                latest.CopyFrom(request.beat)
                kept = broker_pb2.GeneratorBeat()
                kept.CopyFrom(request.beat)
                self.beats.append(kept)

        listener = asyncio.create_task(listen())
        try:
            await self.is_served.wait()
            yield broker_pb2.StreamLeasesResponse(idle=broker_pb2.LeaseIdle(reason="nothing yet"))
            while not self.is_closed:
                if self.lease_breaks > breaks:
                    raise ServiceUnavailableError("draining")
                if self.owner != told:
                    told = self.owner
                    yield broker_pb2.StreamLeasesResponse(owner=told)
                if self.heartbeat_interval != asked:
                    asked = self.heartbeat_interval
                    idle = broker_pb2.LeaseIdle(reason="nothing", heartbeat_interval=asked)
                    yield broker_pb2.StreamLeasesResponse(idle=idle)
                while not self._revocations.empty():
                    revocation = broker_pb2.LeaseRevocation(lease_id=self._revocations.get_nowait(), reason="test")
                    yield broker_pb2.StreamLeasesResponse(revocation=revocation)
                can_lease = num_sent < latest.credit_total and not latest.is_draining
                if can_lease and self.queue and latest.policy_version >= self.min_policy_version:
                    num_sent += 1
                    yield broker_pb2.StreamLeasesResponse(lease=self._lease(first.hello.generator_id))
                else:
                    await asyncio.sleep(0.005)
        finally:
            listener.cancel()

    def _lease(self, holder: str) -> broker_pb2.Lease:
        sample = self.queue.popleft()
        sample.num_leases += 1
        sample.holder = holder
        sample.lease_id = f"{sample.prompt.group_id}-{sample.index}-{sample.num_leases}"
        return broker_pb2.Lease(
            lease_id=sample.lease_id,
            key=types_pb2.SampleKey(group_id=sample.prompt.group_id, sample_index=sample.index),
            prompt=sample.prompt,
            prefix_token_ids=int32_bytes(sample.token_ids),
            prefix_loss_mask=sample.loss_mask,
            min_policy_version=self.min_policy_version,
        )

    async def StreamTokens(self, request_iterator, context):
        if self.is_closed:
            return
        expected = 1
        async for request in request_iterator:
            assert request.sequence == expected
            expected += 1
            self.is_withholding = not self.is_acknowledging
            while not self.is_acknowledging:  # noqa: ASYNC110 -- the test flips it
                await asyncio.sleep(0.005)
            self.requests.append(request)
            errors = [error for chunk in request.chunks if (error := self._store(chunk)) is not None]
            if self.num_stream_breaks:
                self.num_stream_breaks -= 1
                raise ServiceUnavailableError("restarting")
            yield broker_pb2.StreamTokensResponse(
                sequence=request.sequence, errors=errors, flush_interval=self.flush_interval
            )

    def _store(self, chunk: types_pb2.TokenChunk) -> broker_pb2.ChunkError | None:
        sample = next((item for item in self.samples if item.lease_id == chunk.lease_id), None)
        token_ids = int32_array(chunk.token_ids, "token_ids")
        if sample is None:
            is_known = self._knows(chunk, num_tokens=len(token_ids))
            return None if is_known else self._refuse(chunk, "LEASE_LOST", 0)
        if self.refusals:
            return self._refuse_as_told(chunk, sample)
        if chunk.offset < len(sample.token_ids):
            assert chunk.offset + len(token_ids) <= len(sample.token_ids)
            return None
        if chunk.offset != len(sample.token_ids):
            return self._refuse(chunk, "OFFSET_MISMATCH", len(sample.token_ids))
        logprobs = float32_array(chunk.logprobs, "logprobs")
        assert len(logprobs) == len(token_ids)
        assert np.all(np.isfinite(logprobs))
        versions = decode_versions(chunk.policy_versions, num_tokens=len(token_ids), field="policy_versions")
        sample.token_ids += token_ids.tolist()
        sample.logprobs += logprobs.tolist()
        sample.versions += versions.tolist()
        sample.routes += chunk.routes
        sample.loss_mask += chunk.loss_mask or b"\1" * len(token_ids)
        if chunk.finish_reason:
            sample.finish_reason = chunk.finish_reason
            sample.text = chunk.text
            sample.score = chunk.score if chunk.HasField("score") else None
            sample.lease_id = None
            if chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED:
                self.queue.appendleft(sample)
        return None

    def _knows(self, chunk: types_pb2.TokenChunk, *, num_tokens: int) -> bool:
        """Whether the chunk is a repetition of one stored under a lease that has ended since."""
        return any(
            chunk.key.group_id == sample.prompt.group_id
            and chunk.key.sample_index == sample.index
            and chunk.offset + num_tokens <= len(sample.token_ids)
            for sample in self.samples
        )

    def _refuse_as_told(self, chunk: types_pb2.TokenChunk, sample: Sample) -> broker_pb2.ChunkError:
        reason, next_offset = self.refusals.popleft()
        if reason == "LEASE_LOST":
            sample.lease_id = None
        if reason == "OFFSET_MISMATCH":
            for values in (sample.token_ids, sample.logprobs, sample.versions):
                del values[next_offset:]
            sample.loss_mask = sample.loss_mask[:next_offset]
        return self._refuse(chunk, reason, next_offset)

    def _refuse(self, chunk: types_pb2.TokenChunk, reason: str, next_offset: int) -> broker_pb2.ChunkError:
        return broker_pb2.ChunkError(
            key=chunk.key, lease_id=chunk.lease_id, reason=reason, next_offset=next_offset, message="scripted"
        )

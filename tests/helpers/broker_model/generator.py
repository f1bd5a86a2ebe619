"""A generator of the model: takes leases, decodes tokens of its own numbering, and checks what it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_array
from tests.helpers.broker_model.truth import Token, attempt_of, chunk_of, tokens_of
from tests.helpers.broker_model.world import MAX_TRIES, RUN, Link, World, settle

CONTEXT_TOKENS = 128
_UNFINISHED = types_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(slots=True)
class Held:
    """A lease at work."""

    lease: broker_pb2.Lease
    offset: int


class ModelGenerator:
    """One process; `die` and it is another one under the same number."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.version = 0
        self.held: dict[str, Held] = {}
        self.sent: list[types_pb2.TokenChunk] = []
        """Chunks sent lately, under leases that may be long over."""
        self.replaces = ""
        """The process that its own one says it replaces."""
        self._life = 0
        self._credit = 0
        self._num_leases = 0
        self._sequence = 0
        self._answers: list[broker_pb2.StreamTokensResponse] = []
        self._leases = Link(world, "StreamLeases", self._on_lease_frame, at=number)
        self._tokens = Link(world, "StreamTokens", self._answers.append, at=number)

    @property
    def generator_id(self) -> str:
        """Its name; new after a restart."""
        return f"gen-{self.number}-{self._life}"

    # -- leases --------------------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether its lease stream is open."""
        return self._leases.is_open

    def beat(self, *, slots: int, names: Sequence[str] | None = None, is_draining: bool = False) -> None:
        """A heartbeat that asks for as many leases as make `slots`; names every lease held, or the given ones."""
        if not self._leases.is_open:
            self._credit = self._num_leases = 0
            hello = broker_pb2.GeneratorHello(
                run_id=RUN,
                generator_id=self.generator_id,
                engine="model",
                max_context_tokens=CONTEXT_TOKENS,
                replaces_generator_id=self.replaces,
                has_environment=self.world.setting.policy.has_environment,
            )
            self._leases.open(broker_pb2.StreamLeasesRequest(hello=hello))
        self._credit = max(self._credit, self._num_leases + slots - len(self.held))
        beat = broker_pb2.GeneratorBeat(
            credit_total=max(0, self._credit),
            policy_version=self.version,
            active_lease_ids=list(self.held) if names is None else list(names),
            num_running=len(self.held),
            is_draining=is_draining,
        )
        self._leases.send(broker_pb2.StreamLeasesRequest(beat=beat))

    def _on_lease_frame(self, response: broker_pb2.StreamLeasesResponse) -> None:
        if response.HasField("revocation"):
            self.held.pop(response.revocation.lease_id, None)
        elif response.HasField("lease"):
            self._num_leases += 1
            assert self._num_leases <= self._credit, "more leases than credits"
            self._take(response.lease)

    def _take(self, lease: broker_pb2.Lease) -> None:
        prefix = [int(serial) for serial in int32_array(lease.prefix_token_ids, "prefix_token_ids")]
        self.world.truth.shown(attempt_of(lease.key), prefix)
        assert lease.min_policy_version <= self.version
        assert lease.prompt.group_id == lease.key.group_id
        self.held[lease.lease_id] = Held(lease=lease, offset=len(prefix))

    def load(self, version: int, *, newest: int) -> None:
        """Take weights over: never older ones, unless a rewind made those it holds void."""
        self.version = version if self.version > newest else max(self.version, version)

    async def reconnect(self) -> None:
        """Both connections were lost; the leases were not."""
        await self._leases.close()
        await self._tokens.close()

    async def die(self, *, is_known: bool = False) -> None:
        """Crash: what it held is lost, what it sent is not. If `is_known`, its successor says whom it replaces."""
        await self.reconnect()
        self.held.clear()
        self.replaces = self.generator_id if is_known else ""
        self._life += 1

    # -- tokens --------------------------------------------------------------------------------------------------------

    def decode(
        self, lease_id: str, num_tokens: int, finish: types_pb2.FinishReason.ValueType = _UNFINISHED
    ) -> types_pb2.TokenChunk:
        """The next tokens of a lease, the older half by the version of the lease."""
        held = self.held[lease_id]
        oldest = min(held.lease.min_policy_version, self.version)
        tokens = tuple(
            Token(self.world.serials.next(), oldest if 2 * place < num_tokens else self.version)
            for place in range(num_tokens)
        )
        chunk = chunk_of(lease_id, held.lease.key, held.offset, tokens, finish)
        chunk.token_shard = held.lease.token_shard
        if finish == types_pb2.FINISH_REASON_STOP and self.world.setting.policy.has_environment:
            self._score(chunk)
        held.offset += num_tokens
        if finish:
            del self.held[lease_id]
        return chunk

    def _score(self, chunk: types_pb2.TokenChunk) -> None:
        """The environment's score, of every other session; the others go to a reward worker."""
        value = self.world.serials.next()
        if value % 2:
            chunk.score.CopyFrom(types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=value))
            self.world.truth.scores.setdefault(attempt_of(chunk.key), set()).add(float(value))

    async def put(self, *chunks: types_pb2.TokenChunk, are_new: bool = True) -> list[broker_pb2.ChunkError]:
        """Send chunks until they are answered; what was taken and what was refused is noted."""
        if not chunks:
            return []
        self.sent = [*self.sent, *chunks][-32:]
        response, num_tries = None, 0
        while response is None:
            num_tries += 1
            assert num_tries <= MAX_TRIES, "tokens are not taken"
            response = await self._ask(chunks)
        errors = {(error.key.group_id, error.key.sample_index, error.lease_id): error for error in response.errors}
        for chunk in chunks:
            error = errors.get((chunk.key.group_id, chunk.key.sample_index, chunk.lease_id))
            self._note(chunk, error, is_first_try=are_new and num_tries == 1)
        return list(response.errors)

    async def put_and_die(self, *chunks: types_pb2.TokenChunk, after_s: float) -> None:
        """Send chunks and crash without waiting for the answer."""
        self._send(chunks)
        await asyncio.sleep(after_s)
        await self.die()

    def _note(self, chunk: types_pb2.TokenChunk, error: broker_pb2.ChunkError | None, *, is_first_try: bool) -> None:
        sample, tokens = attempt_of(chunk.key), tokens_of(chunk)
        if error is None:
            self.world.truth.accepted(sample, chunk.offset, tokens)
            return
        self.held.pop(chunk.lease_id, None)
        if is_first_try:
            # Otherwise an earlier try may have been stored, and the sample may have gone on since.
            self.world.truth.refused(sample, chunk.offset, tokens)

    def _send(self, chunks: Sequence[types_pb2.TokenChunk]) -> None:
        for chunk in chunks:
            self.world.truth.sent(attempt_of(chunk.key), chunk.offset, tokens_of(chunk))
        self._sequence += 1
        request = broker_pb2.StreamTokensRequest(
            run_id=RUN, generator_id=self.generator_id, sequence=self._sequence, chunks=chunks
        )
        if self._tokens.is_open:
            self._tokens.send(request)
        else:
            self._tokens.open(request)

    async def _ask(self, chunks: Sequence[types_pb2.TokenChunk]) -> broker_pb2.StreamTokensResponse | None:
        """The answer; None when the connection was lost."""
        self._send(chunks)
        for _ in range(MAX_TRIES):
            await settle()
            for answer in self._answers:
                if answer.sequence == self._sequence:
                    self._answers.clear()
                    return answer
            error = self._tokens.error()
            if error is not None:
                raise error
            if not self._tokens.is_open:
                return None
        raise AssertionError("no answer to a token request")

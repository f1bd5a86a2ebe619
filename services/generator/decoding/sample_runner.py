"""Decoding of leased samples: from lease to tokens on their way to the broker.

    lease -> wait for version -> decode -> finish chunk -> stored
                 |                  |
                 +------------------+--> aborted chunk (given back) | dropped (revoked, lease lost) | left to expire

Promises:

- No sample is lost by its own error: its lease always ends in a finish chunk, an aborted chunk, or is no longer
  renewed and expires.
- A lease is renewed until its last chunk is stored; its slot is free as soon as decoding ended.
- Unleased samples (`unleased`) use the same slots and see the same updates.
- A sample of a run with an environment is decoded turn by turn (`conversing`); while it waits for its environment it
  takes no slot, and other leases are taken for that, up to a limit.
- An engine that fails is reported once through `on_engine_failure`; the process is expected to give everything back and
  to end, so that its supervisor starts a fresh one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cached_property

import numpy as np
import structlog

from penstock.errors import InvalidFieldError
from penstock.process.tasks import end, set_within
from penstock.tracing import within
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.score_rules import ENVIRONMENT_WAIT_S
from services.generator.decoding.activity import Decoding
from services.generator.decoding.conversing import converse
from services.generator.decoding.kv_headroom import KvHeadroom
from services.generator.decoding.lease_request import to_request
from services.generator.decoding.lease_work import GiveBack, LeaseWork
from services.generator.decoding.rollout_parts import RolloutParts
from services.generator.decoding.session_waits import SessionWaits
from services.generator.decoding.slots import Slots
from services.generator.decoding.traces import LeaseTrace, lease_span
from services.generator.engine.engine import (
    EngineError,
    EngineStoppedError,
    FinishReason,
    GenerateRequest,
    RequestRefusedError,
)
from services.generator.environments.error_policy import EnvironmentAwayError
from services.generator.environments.transcript import read_transcript
from services.generator.environments.turn_tokens import TurnTokens

MAX_VERSION_WAIT_S = 60.0
"""How long a sample waits for the weights that its lease requires before it is given back."""

_LOST_REASONS = frozenset({"LEASE_LOST", "UNKNOWN_SAMPLE", "UNKNOWN_RUN", "RUN_CLOSED"})
_FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: types_pb2.FINISH_REASON_ABORTED,
}
_log = structlog.get_logger()


class Rollouts:
    """The samples of one generator; at most `max_concurrent_samples` are decoded at once."""

    def __init__(self, parts: RolloutParts, *, max_concurrent_samples: int) -> None:
        self._parts = parts
        self._slots = Slots(max_concurrent_samples)
        self._num_guests = 0
        self._works: dict[str, LeaseWork] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.refused_chunks: Counter[str] = Counter()
        """By the broker's reason, since this process started."""
        self.is_accepting = True
        """Whether new samples start; false once the generator drains or stops."""
        self.decoding = Decoding(parts.busy, parts.metrics, parts.on_change)
        """The samples being decoded."""
        self.waits = SessionWaits()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def lease_ids(self) -> list[str]:
        """Leases in hand, those whose last chunk is on its way included."""
        return list(self._works)

    @cached_property
    def _headroom(self) -> KvHeadroom:
        """Leases come only once the engine has started, which then knows its KV capacity."""
        profile = self._parts.engine.profile()
        return KvHeadroom(profile.kv_capacity_tokens, block_tokens=profile.kv_block_tokens)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in hand, leased or not."""
        return not self._works and not self._num_guests

    @property
    def longest_remaining_tokens(self) -> int:
        """The most tokens that any sample in hand may still need; an unleased one may need the engine's maximum."""
        remaining = [
            work.lease.prompt.sampling.max_new_tokens - work.stream.num_tokens for work in self._works.values()
        ]
        return max([*remaining, self._parts.engine.max_model_len if self._num_guests else 0], default=0)

    @property
    def num_in_slots(self) -> int:
        """Leased samples that are decoded or are about to be."""
        return sum(work.is_in_slot for work in self._works.values())

    @property
    def _num_unfinished(self) -> int:
        """Leased samples that are decoded, or wait for their environment."""
        return sum(not work.is_finished for work in self._works.values())

    def num_free_slots(self) -> int:
        """Leases that could be begun now."""
        num_slots = self._slots.num_free
        if self._parts.sessions is not None:
            num_slots = min(num_slots, self._slots.max_taken + self._parts.sessions.max_waiting - self._num_unfinished)
        if not (num_slots > 0 and self.is_accepting and self._parts.held.is_trusted and self.decoding.may_begin):
            return 0
        context = self._parts.engine.max_model_len
        held = [work.to_running(context) for work in self._works.values() if work.is_in_slot]
        self._headroom.note_load(held, self._parts.engine.stats())
        return self._headroom.num_more(held, most=num_slots)

    def begin(self, lease: broker_pb2.Lease) -> None:
        """Take a lease; one that can no longer be taken is given back at once."""
        if lease.lease_id in self._works:
            _log.info("lease received twice", lease_id=lease.lease_id)
            return
        work = LeaseWork(lease=lease, runner=self, trace=LeaseTrace.of(lease))
        work.stream = self._parts.tokens.open(
            lease.key,
            lease_id=lease.lease_id,
            offset=len(lease.prefix_token_ids) // 4,
            listener=work,
            token_shard=lease.token_shard,
        )
        self._works[lease.lease_id] = work
        self._slots.take()
        self._empty.clear()
        if not self.is_accepting:
            self._give_back(work)
            return
        self._headroom.note_begun(work.to_running(self._parts.engine.max_model_len))
        work.task = self._keep(asyncio.create_task(self._run(work)))
        # Sample sizes are recorded from the first one on.
        self._parts.on_change()

    def settle(self, work: LeaseWork) -> None:
        """A lease's last chunk is stored."""
        self.forget(work.lease.lease_id)
        if work.dialogue is not None:
            self._keep(asyncio.create_task(work.dialogue.close()))

    def drop(self, lease_id: str, reason: str) -> None:
        """Abort a void lease: none of its tokens are sent any more."""
        work = self._works.get(lease_id)
        if work is None:
            return
        _log.info("sample dropped", lease_id=lease_id, reason=reason, **work.named)
        if work.trace is not None:
            work.trace.end(reason)
        work.stream.discard()
        self._parts.metrics.samples.labels("dropped").inc()
        self.forget(lease_id)

    def refuse(self, work: LeaseWork, error: broker_pb2.ChunkError) -> None:
        """The broker refused a chunk: drop the sample, or give it back from where the broker has it."""
        lease = work.lease
        self.refused_chunks[error.reason] += 1
        self._parts.metrics.refused_chunks.labels(error.reason).inc()
        self.drop(lease.lease_id, f"{error.reason}: {error.message}")
        if error.reason not in _LOST_REASONS:
            # Decoded and stored tokens have diverged (for example, a store lost its last second): the next lease
            # begins from what is stored.
            tokens = self._parts.tokens
            stream = tokens.open(
                lease.key,
                lease_id=lease.lease_id,
                offset=error.next_offset,
                listener=GiveBack(),
                token_shard=lease.token_shard,
            )
            stream.finish(types_pb2.FINISH_REASON_ABORTED)

    def forget(self, lease_id: str) -> None:
        """The lease is over: stop renewing it, and decoding it if that is still going on."""
        work = self._works.pop(lease_id, None)
        self.waits.forget(lease_id)
        if work is None:
            return
        self._free_slot(work)
        if work.trace is not None:
            work.trace.end("stored")
        if work.task is not None:
            work.task.cancel()
        self._note_waiting()
        self._note_if_empty()
        self._parts.on_change()

    def drop_all(self, reason: str) -> None:
        """Every lease is void."""
        for lease_id in self.lease_ids:
            self.drop(lease_id, reason)

    def stop_accepting(self) -> None:
        """Start nothing new."""
        self.is_accepting = False
        self._parts.on_change()

    async def give_back_all(self, *, flush_timeout_s: float) -> None:
        """Accept nothing new; return every unfinished sample with what is decoded, and send it all."""
        self.stop_accepting()
        unfinished = [work for work in self._works.values() if not work.is_finished]
        for work in unfinished:
            self._give_back(work)
        _log.info("samples given back", num_samples=len(unfinished), num_finished=len(self._works) - len(unfinished))
        if not await self._parts.tokens.flush(timeout_s=flush_timeout_s):
            _log.warning("the broker did not take everything in time; leases expire", num_leases=len(self._works))
        await end(*self._tasks)

    async def wait_until_empty(self, *, timeout_s: float) -> bool:
        """Whether nothing was left in hand within `timeout_s` seconds."""
        return await set_within(self._empty, timeout_s)

    @asynccontextmanager
    async def unleased(self, *, timeout_s: float) -> AsyncIterator[None]:
        """Inside, the caller may decode one unleased sample.

        Raises:
            EngineStoppedError: This generator takes nothing new.
            TimeoutError: There was no slot, or no attested version, within `timeout_s` seconds.
        """
        if not self.is_accepting:
            raise EngineStoppedError("this generator drains and takes nothing new")
        self._num_guests += 1
        self._empty.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_for_slot()
            try:
                with self.decoding.one():
                    yield
            finally:
                self._slots.release()
        finally:
            self._num_guests -= 1
            self._note_if_empty()
            self._parts.on_change()

    async def _wait_for_slot(self) -> None:
        await self._slots.wait()
        try:
            await self._parts.held.wait_for(0)
            await self.decoding.wait_until_may_begin()
        except BaseException:
            self._slots.release()
            raise

    async def _run(self, work: LeaseWork) -> None:
        try:
            with within(lease_span(work.lease, work.trace)):
                await self._decode(work)
        except asyncio.CancelledError:
            # The canceller has already dropped the lease or given it back.
            raise
        except EnvironmentAwayError as error:
            self._log_failed(work, f"environment is away: {error}")
            self._give_back(work)
        except (InvalidFieldError, RequestRefusedError, TimeoutError) as error:
            self._log_failed(work, str(error) or "the weights it needs did not come in time")
            self._give_back(work)
        except Exception as error:
            # The one broad handler of this process: an engine that failed in an unforeseen way must not keep
            # taking leases, and the sample must not be lost.
            self._log_failed(work, f"engine failed: {type(error).__name__}: {error}")
            self._give_back(work)
            self._parts.on_engine_failure(error)

    async def _decode(self, work: LeaseWork) -> None:
        parts = self._parts
        request = to_request(work.lease, end_token_ids=parts.end_token_ids, records_routes=parts.records_routes)
        work.tokens = TurnTokens(work.stream, has_routes=request.has_routes)
        async with asyncio.timeout(MAX_VERSION_WAIT_S):
            await parts.held.wait_for(work.lease.min_policy_version)
        # Bounded by the waiting update's own limit on the completions under way.
        await self.decoding.wait_until_may_begin()
        if parts.sessions is None:
            self._finish(work, await self.decode_part(work, request))
            return
        transcript = read_transcript(request.prefix_token_ids, work.lease.prefix_loss_mask)
        dialogue = parts.sessions.dialogue(work.lease)
        reason, score = await converse(work, dialogue, request, transcript, max_model_len=parts.engine.max_model_len)
        if reason is not FinishReason.ABORTED:
            work.dialogue = dialogue
            waited_s = self.waits.finish(work.lease.lease_id)
            parts.metrics.environment_wait_s.inc(waited_s)
            if score is not None:
                # For plans from a recording; a session that went on elsewhere has the last generator's.
                score.details[ENVIRONMENT_WAIT_S] = f"{waited_s:.3f}"
            parts.metrics.environment_sessions.labels(_status_of(score)).inc()
        self._finish(work, reason, score)

    async def decode_part(self, work: LeaseWork, request: GenerateRequest) -> FinishReason:
        """Decode a request into a sample's stream; returns why it ended."""
        parts, reason = self._parts, None
        with self.decoding.one(), self.decoding.awaiting():
            # To its very end, past the last span: leaving an iteration early makes the engine abort.
            async for span in parts.engine.generate(request):
                await self._wait_for_room()
                parts.metrics.tokens.inc(len(span.token_ids))
                work.parts.append(span.token_ids)
                work.tokens.append(span)
                if work.trace is not None:
                    work.trace.note(len(span.token_ids), span.policy_version)
                reason = span.finish_reason
        if reason is None:
            raise EngineError(f"the engine ended sample {request.request_id} without saying why")
        return reason

    async def _wait_for_room(self) -> None:
        if not self._parts.tokens.has_room:
            with self.decoding.not_awaiting():
                await self._parts.tokens.wait_for_room()

    def give(self, work: LeaseWork, token_ids: Sequence[int]) -> None:
        """Append tokens that a sample's environment gave."""
        held = self._parts.held.current
        work.parts.append(np.asarray(token_ids, np.int32))
        work.tokens.give(token_ids, policy_version=0 if held is None else held.policy_version)

    async def enter_slot(self, work: LeaseWork) -> None:
        """Wait for a slot for a sample that left its own."""
        self.waits.end(work.lease.lease_id)
        await self._wait_for_slot()
        work.is_in_slot = True
        self._note_waiting()
        self._parts.on_change()

    def leave_slot(self, work: LeaseWork) -> None:
        """Give a sample's slot up while it waits for its environment."""
        self.waits.begin(work.lease.lease_id)
        self._free_slot(work)
        self._note_waiting()
        self._parts.on_change()

    def _note_waiting(self) -> None:
        num_waiting = self._num_unfinished - self.num_in_slots
        self._parts.metrics.environment_waiting.set(max(0, num_waiting))

    def _finish(self, work: LeaseWork, reason: FinishReason, score: types_pb2.Score | None = None) -> None:
        text = "" if reason is FinishReason.ABORTED else self._parts.text.decode(work.completion())
        work.is_finished = True
        work.stream.finish(_FINISH_REASONS[reason], text=text, score=score)
        self._parts.metrics.samples.labels(reason.value).inc()
        if reason is not FinishReason.ABORTED:
            self._headroom.note_finished(work.stream.num_tokens)
        self._free_slot(work)
        self._parts.on_change()

    def _log_failed(self, work: LeaseWork, reason: str) -> None:
        _log.warning("sample failed", reason=reason, **work.named)

    def _give_back(self, work: LeaseWork) -> None:
        work.is_finished = True
        if work.trace is not None:
            work.trace.end("given back")
        work.stream.finish(types_pb2.FINISH_REASON_ABORTED)
        self._parts.metrics.samples.labels("given_back").inc()
        self._free_slot(work)
        if work.task is not None and work.task is not asyncio.current_task():
            work.task.cancel()
        self._parts.on_change()

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _free_slot(self, work: LeaseWork) -> None:
        if work.is_in_slot:
            work.is_in_slot = False
            self._slots.release()

    def _note_if_empty(self) -> None:
        if self.is_empty:
            self._empty.set()


def _status_of(score: types_pb2.Score | None) -> str:
    if score is None:
        return "unscored"
    return types_pb2.ScoreStatus.Name(score.status).removeprefix("SCORE_STATUS_").lower()

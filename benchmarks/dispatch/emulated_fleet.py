"""Emulated generators on a virtual clock: what an engine with continuous batching does, as the latency model has it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from penstock.batching.batched_engine import BatchedEngine, Running
from services.broker.dispatch.latency import LatencyModel
from services.broker.operations.leasing import Grant
from services.broker.records.store import SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedGenerator:
    """A generator of a scenario."""

    generator_id: str
    model: LatencyModel
    """True times of its steps."""
    is_stated: bool = True
    """Whether its profile states them; otherwise the broker measures them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    grant: Grant
    context_tokens: int
    length: int
    """True length of the completion."""
    delay_s: float
    """Delay before its first token, besides prefill."""

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache at its end."""
        return self.context_tokens + self.length


class Engine:
    """Decodes the samples it is given; those without a slot or a place in the KV cache wait in turn.

    The KV cache is reserved to a sample's end, which stands for an engine that never preempts; KV reads are counted at
    the middle of what is left of a sample.
    """

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self.batch = BatchedEngine[_Sample](model.step_s, kv_growth=0.5)
        self._running: dict[str, Running[_Sample]] = {}
        self._waiting: deque[_Sample] = deque()

    @property
    def num_waiting(self) -> int:
        """Samples waiting inside it."""
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Samples it has."""
        return self.batch.num_running + self.num_waiting

    def begin(self, grant: Grant, *, context_tokens: int, length: int, delay_s: float = 0.0) -> None:
        """Take a sample of this true length; its prefix is not decoded again."""
        self._waiting.append(_Sample(grant=grant, context_tokens=context_tokens, length=length, delay_s=delay_s))
        self._fill()

    def abort(self, sample_id: SampleId) -> None:
        """Drop a sample, if it has it."""
        for lease_id, running in list(self._running.items()):
            if running.item.grant.sample == sample_id:
                self.batch.remove(self._running.pop(lease_id))
        self._waiting = deque(sample for sample in self._waiting if sample.grant.sample != sample_id)
        self._fill()

    def progress(self) -> list[tuple[Grant, int]]:
        """The leases being decoded, and the completion tokens of each, its prefix included."""
        return [(running.item.grant, self._num_tokens(running)) for running in self._running.values()]

    def advance(self, now_s: float) -> list[Grant]:
        """Decode until this time, which must not be past the batch's next end; returns the samples that ended."""
        self.batch.advance(now_s)
        ended = [sample.grant for sample in self.batch.pop_ended()]
        for grant in ended:
            del self._running[grant.lease_id]
        if ended:
            self._fill()
        return ended

    def _num_tokens(self, running: Running[_Sample]) -> int:
        sample = running.item
        return min(sample.length, max(sample.grant.num_prefix_tokens, int(self.batch.position(running))))

    def _fill(self) -> None:
        model, batch = self.model, self.batch
        while self._waiting and batch.num_running < model.max_samples:
            sample = self._waiting[0]
            if model.kv_capacity_tokens is not None and self._running:
                reserved = sum(running.item.kv_tokens for running in self._running.values())
                if reserved + sample.kv_tokens > model.kv_capacity_tokens:
                    return
            self._waiting.popleft()
            prefix = sample.grant.num_prefix_tokens
            wait_s = sample.delay_s + model.prefill_s(sample.context_tokens + prefix)
            # Not the batch's own delay, which leaves out the KV reads of a step.
            wait_steps = wait_s / model.step_s(batch.num_running + 1)
            self._running[sample.grant.lease_id] = batch.begin(
                sample,
                length=sample.length,
                position=prefix - wait_steps,
                kv_tokens=sample.context_tokens + sample.length / 2,
            )

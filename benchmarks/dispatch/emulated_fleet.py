"""Pretend generators on a virtual clock: what an engine with continuous batching does, as the latency model has it."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from services.broker.dispatch.latency import LatencyModel
from services.broker.operations.leasing import Grant
from services.broker.records.store import SampleId

_SAME_STEP = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedGenerator:
    """A generator of a scenario."""

    generator_id: str
    model: LatencyModel
    """What its steps really take."""
    is_stated: bool = True
    """Whether its profile says so; else the broker measures it."""


@dataclass(slots=True, kw_only=True)
class _Sample:
    grant: Grant
    context_tokens: int
    length: int
    """True length of the completion."""
    delay_s: float
    """Before its first token, beside prefill."""
    begin_step: float = 0.0
    """Step at which its first token of all would have come."""


@dataclass(slots=True)
class Engine:
    """Decodes what it is given; samples that find no slot or no KV room wait in turn.

    All running samples take part in every step, so a sample's end is a step number and only the next end matters. KV
    room is reserved to the sample's end, which stands for an engine that never preempts.
    """

    model: LatencyModel
    clock_s: float = 0.0
    num_steps: float = 0.0
    busy_s: float = 0.0
    kv_reserved: float = 0.0
    _running: dict[str, _Sample] = field(default_factory=dict)
    _ends: list[tuple[float, str]] = field(default_factory=list)
    _waiting: deque[_Sample] = field(default_factory=deque)

    @property
    def num_running(self) -> int:
        """Samples being decoded."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Samples waiting inside it."""
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Samples in its hands."""
        return self.num_running + self.num_waiting

    def begin(self, grant: Grant, *, context_tokens: int, length: int, delay_s: float = 0.0) -> None:
        """Take a sample of this true length; its prefix is not decoded again."""
        self._waiting.append(_Sample(grant=grant, context_tokens=context_tokens, length=length, delay_s=delay_s))
        self._fill()

    def abort(self, sample_id: SampleId) -> None:
        """Let go of a sample, if it has it."""
        for lease_id, sample in list(self._running.items()):
            if sample.grant.sample == sample_id:
                del self._running[lease_id]
                self.kv_reserved -= sample.context_tokens + sample.length
        self._waiting = deque(sample for sample in self._waiting if sample.grant.sample != sample_id)
        self._fill()

    def num_tokens(self, lease_id: str) -> int:
        """Completion tokens of a running sample now, its prefix included."""
        sample = self._running[lease_id]
        return min(sample.length, max(sample.grant.num_prefix_tokens, int(self.num_steps - sample.begin_step)))

    @property
    def running(self) -> list[Grant]:
        """The leases being decoded."""
        return [sample.grant for sample in self._running.values()]

    @property
    def next_end_s(self) -> float:
        """When its next sample ends; infinite when it holds none."""
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if not self._ends:
            return math.inf
        return self.clock_s + max(0.0, self._ends[0][0] - self.num_steps) * self.step_s

    @property
    def step_s(self) -> float:
        """Time of a decode step now; KV reads are counted at the middle of what is left."""
        num_kv = 0.0
        if self.model.per_kv_token_s:
            for sample in self._running.values():
                done = self.num_steps - sample.begin_step
                num_kv += sample.context_tokens + (done + sample.length) / 2
        return self.model.step_s(self.num_running, num_kv)

    def advance(self, now_s: float) -> list[Grant]:
        """Decode until then, which must not be past `next_end_s`; returns the samples that ended."""
        if self._running:
            self.num_steps += (now_s - self.clock_s) / self.step_s
            self.busy_s += now_s - self.clock_s
        self.clock_s = now_s
        ended: list[Grant] = []
        while self.next_end_s < math.inf and self._ends[0][0] <= self.num_steps + _SAME_STEP:
            sample = self._running.pop(heapq.heappop(self._ends)[1])
            self.kv_reserved -= sample.context_tokens + sample.length
            ended.append(sample.grant)
        if ended:
            self._fill()
        return ended

    def _fill(self) -> None:
        while self._waiting and self.num_running < self.model.max_samples:
            sample = self._waiting[0]
            needed = sample.context_tokens + sample.length
            room = self.model.kv_capacity_tokens
            if room is not None and self._running and self.kv_reserved + needed > room:
                return
            self._waiting.popleft()
            prefix = sample.grant.num_prefix_tokens
            wait_s = sample.delay_s + self.model.prefill_s(sample.context_tokens + prefix)
            sample.begin_step = self.num_steps - prefix + wait_s / self.model.step_s(self.num_running + 1)
            self.kv_reserved += needed
            self._running[sample.grant.lease_id] = sample
            heapq.heappush(self._ends, (sample.begin_step + sample.length, sample.grant.lease_id))

"""Continuous batching: samples that are decoded together, and when each of them ends. Pure.

Every sample in the batch takes part in every decode step and gets one token from it. So a sample's end is a number of a
step, known when it begins; only the next end is an event, and a sample costs two operations on a heap. How long a step
takes depends on how many samples share it and on the KV tokens that they hold together.

Steps are counted in fractions here, which is exact on average and all that a simulation needs. An engine that yields
whole tokens counts whole steps (`services.generator.emulation.continuous_batch`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

SAME_TIME_S = 1e-9
"""Ends no further apart than this are one event."""

Item = TypeVar("Item")
StepTime = Callable[[int, float], float]
"""Seconds of a decode step, from the number of samples and of the KV tokens that they hold together."""


class Running(NamedTuple, Generic[Item]):
    """A sample in the batch. Its order is that of the heap: by end, then by beginning."""

    end_step: float
    number: int
    """Samples that began earlier have smaller numbers."""
    begin_step: float
    """The step at which its first token came, or would have come if it was begun elsewhere."""
    kv_tokens: float
    """KV tokens that it holds apart from those that grow with its steps."""
    item: Item


class BatchedEngine(Generic[Item]):
    """A batch on a clock that its user moves.

    Args:
        step_time: How long steps take.
        kv_growth: KV tokens that each step adds to each sample; 0 where samples state the mean of what they hold.
    """

    def __init__(self, step_time: StepTime, *, kv_growth: float = 0) -> None:
        self._step_time, self._kv_growth = step_time, kv_growth
        self.clock_s = 0.0
        self.busy_s = 0.0
        """Time in which it had samples."""
        self.num_steps: float = 0
        """Since the beginning, as are these:"""
        self.num_begun = 0
        self._heap: list[Running[Item]] = []
        self._kv_offset: float = 0
        self._unspent_s = 0.0
        """Time that no step has used; below 0, time that passes before the next step."""
        self._step_s = 0.0
        self._next_end_s = math.inf
        self._is_changed = False

    @property
    def running(self) -> Sequence[Running[Item]]:
        """The batch, the next one to end first, the others in no order."""
        return self._heap

    @property
    def num_running(self) -> int:
        """Samples in the batch."""
        return len(self._heap)

    @property
    def kv_tokens(self) -> float:
        """KV tokens that the batch holds now."""
        return self._kv_offset + self._kv_growth * len(self._heap) * self.num_steps

    @property
    def step_s(self) -> float:
        """Seconds of a decode step now."""
        if self._is_changed:
            self._foretell()
        return self._step_s

    @property
    def next_end_s(self) -> float:
        """When the next sample ends, on this clock, if nothing changes before; infinite when there is none."""
        if self._is_changed:
            self._foretell()
        return self._next_end_s

    def position(self, running: Running[Item]) -> float:
        """Tokens that a sample in the batch has, those that it brought along included."""
        return max(0, self.num_steps - running.begin_step)

    def begin(
        self, item: Item, *, length: float, position: float = 0, kv_tokens: float = 0, delay_s: float = 0.0
    ) -> Running[Item]:
        """Decode a sample from now on.

        Args:
            item: What is handed back when it ends.
            length: Tokens that it has at its end.
            position: Tokens of these that it brings along.
            kv_tokens: What it holds in the KV cache beside what grows with its steps.
            delay_s: Time before its first step, which does not hold up the others.
        """
        begin_step = self.num_steps - position
        self._kv_offset += kv_tokens - self._kv_growth * begin_step
        if delay_s:
            num_samples = len(self._heap) + 1
            kv_tokens_now = self._kv_offset + self._kv_growth * num_samples * self.num_steps
            delay_steps = delay_s / self._step_time(num_samples, kv_tokens_now)
            begin_step += delay_steps
            self._kv_offset -= self._kv_growth * delay_steps
        self.num_begun += 1
        running = Running(begin_step + length, self.num_begun, begin_step, kv_tokens, item)
        heapq.heappush(self._heap, running)
        self._is_changed = True
        return running

    def remove(self, running: Running[Item]) -> Item:
        """Take a sample out of the batch before its end."""
        self._heap.remove(running)
        heapq.heapify(self._heap)
        return self._let_go(running)

    def clear(self) -> None:
        """Take all samples out, and forget what held the batch up."""
        self._heap.clear()
        self._kv_offset, self._unspent_s = 0, 0.0
        self._is_changed = True

    def stall(self, seconds: float) -> None:
        """Decode nothing for this long, after what holds the batch up already."""
        self._unspent_s -= seconds
        self._is_changed = True

    def advance(self, now_s: float) -> None:
        """Decode until then, which must not be later than `next_end_s`; samples that end stay until `pop_ended`."""
        self.elapse(now_s - self.clock_s)
        self.clock_s = now_s

    def elapse(self, elapsed_s: float) -> None:
        """The same by how much time has passed."""
        self.clock_s += elapsed_s
        self._unspent_s += elapsed_s
        if self._heap:
            self.busy_s += elapsed_s
            if self._unspent_s > 0:
                if self._is_changed:
                    self._foretell()
                self.num_steps += self._unspent_s / self._step_s
                self._is_changed = self._kv_growth != 0
        if self._unspent_s > 0:
            self._unspent_s = 0.0

    def pop_ended(self) -> list[Item]:
        """Take out the samples that end now, in order."""
        ended: list[Item] = []
        last_s = self.clock_s + SAME_TIME_S
        while True:
            if self._is_changed:
                self._foretell()
            if self._next_end_s > last_s:
                return ended
            ended.append(self._pop())

    def _pop(self) -> Item:
        """Take out the sample that ends next, now that it has all of its tokens."""
        running = heapq.heappop(self._heap)
        self.num_steps = max(self.num_steps, running.end_step)
        return self._let_go(running)

    def _let_go(self, running: Running[Item]) -> Item:
        _, _, begin_step, kv_tokens, item = running
        self._kv_offset -= kv_tokens - self._kv_growth * begin_step
        self._is_changed = True
        return item

    def _foretell(self) -> None:
        self._is_changed = False
        heap = self._heap
        if not heap:
            self._next_end_s = math.inf
            return
        num_samples, num_steps = len(heap), self.num_steps
        kv_tokens = self._kv_offset + self._kv_growth * num_samples * num_steps
        self._step_s = step_s = self._step_time(num_samples, kv_tokens)
        decodes_from_s = self.clock_s if self._unspent_s >= 0 else self.clock_s - self._unspent_s
        self._next_end_s = decodes_from_s + max(0.0, heap[0][0] - num_steps) * step_s

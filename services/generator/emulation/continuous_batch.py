"""Continuous batching on an emulated GPU: who decodes, who waits, who is preempted, and how far each one is. Pure.

What `BatchedEngine` leaves out:

- Steps are whole: what is too short for a step is kept for the next piece of time.
- Samples begin in turn while a slot is free and the KV cache holds what they have so far. Their prefill stops the
  decoding of all: it is the same GPU.
- The KV cache grows with every token. When it is full, the sample that began last goes back to the head of the queue
  and its cache is computed again when it begins again, as in vLLM.
- Prompts are not shared between the samples of a group: there is no prefix cache.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from penstock.batching.batched_engine import BatchedEngine, Running
from penstock.batching.step_times import StepTimes

BLOCK_TOKENS = 16
"""Tokens of growth for which a sample needs room before it begins; without this a preempted sample would begin again
at once and be preempted again a step later."""


@dataclass(slots=True, kw_only=True, eq=False)
class BatchSample:
    """A sample in the batch."""

    context_tokens: int
    """Of the prompt."""
    length: int
    """Completion tokens in all, a prefix included."""
    position: int
    """Completion tokens it has, a prefix included; kept up by the batch."""


class ContinuousBatch(BatchedEngine[BatchSample]):
    """See the module.

    Args:
        steps: How long things take.
        max_samples: Most samples decoded at once.
        kv_capacity_tokens: Size of the KV cache; None when nothing bounds it.
    """

    def __init__(self, steps: StepTimes, *, max_samples: int, kv_capacity_tokens: int | None = None) -> None:
        super().__init__(steps.step_s, kv_growth=1)
        self._prefill_s = steps.prefill_s
        self._max_samples = max_samples
        self._kv_capacity = kv_capacity_tokens
        self._waiting: deque[BatchSample] = deque()
        self._ended: list[BatchSample] = []
        self.num_preemptions = 0
        """Since the beginning."""

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot or for KV headroom."""
        return len(self._waiting)

    @property
    def time_to_end_s(self) -> float:
        """Time until a running sample ends if nothing changes before; infinite when none runs."""
        if not self._heap:
            return math.inf
        num_steps = self._steps_to_next_end()
        return max(0.0, num_steps * self._mean_step_s(num_steps) - self._unspent_s)

    @property
    def next_end_s(self) -> float:
        """See `BatchedEngine`."""
        return self.clock_s + self.time_to_end_s

    def add(self, sample: BatchSample) -> None:
        """Take a sample that has tokens to go."""
        self._waiting.append(sample)
        self._admit()

    def discard(self, sample: BatchSample) -> None:
        """Let go of a sample; one that is not here is no error."""
        running = next((each for each in self.running if each.item is sample), None)
        if running is not None:
            self.remove(running)
        elif sample in self._waiting:
            self._waiting.remove(sample)
        self._admit()

    def recompute(self) -> tuple[int, float]:
        """Throw the KV cache away and compute it again before anything else is decoded; its tokens, and the time."""
        prefill_s = sum(self._prefill_s(_held(each.item)) for each in self.running)
        self.stall(prefill_s)
        return int(self.kv_tokens), prefill_s

    def elapse(self, elapsed_s: float) -> None:
        """See `BatchedEngine`, in whole steps."""
        self.clock_s += elapsed_s
        self._unspent_s += elapsed_s
        while self._heap:
            self._preempt()
            num_steps = self._affordable_steps()
            if num_steps == 0:
                break
            self._unspent_s -= num_steps * self._mean_step_s(num_steps)
            self.num_steps += num_steps
            self._is_changed = True
            if self._heap[0].end_step <= self.num_steps:
                while self._heap and self._heap[0].end_step <= self.num_steps:
                    self._ended.append(self._pop())
                self._admit()
        else:
            # Idle time is lost.
            self._unspent_s = 0.0
        num_steps_now = self.num_steps
        for _, _, begin_step, _, sample in self._heap:
            sample.position = int(num_steps_now - begin_step)

    def pop_ended(self) -> list[BatchSample]:
        """The samples that have ended since the last time, in order."""
        ended, self._ended = self._ended, []
        return ended

    def _let_go(self, running: Running[BatchSample]) -> BatchSample:
        running.item.position = int(self.position(running))
        return super()._let_go(running)

    def _mean_step_s(self, num_steps: int) -> float:
        """Of that many steps from now on, in which the KV cache grows."""
        num_samples = len(self._heap)
        return self._step_time(num_samples, self.kv_tokens + num_samples * (num_steps - 1) / 2)

    def _affordable_steps(self) -> int:
        """Whole steps that the time allows until the batch changes."""
        num_steps = min(self._steps_to_change(), int(self._unspent_s / self._mean_step_s(1)))
        if num_steps > 1:
            num_steps = max(1, min(num_steps, int(self._unspent_s / self._mean_step_s(num_steps))))
        return max(0, num_steps)

    def _steps_to_next_end(self) -> int:
        return int(self._heap[0].end_step - self.num_steps)

    def _steps_to_change(self) -> int:
        """Steps until a sample ends or the KV cache is full; a sample that is alone may exceed it."""
        num_steps = self._steps_to_next_end()
        if self._kv_capacity is not None and len(self._heap) > 1:
            num_steps = min(num_steps, int(self._kv_capacity - self.kv_tokens) // len(self._heap))
        return max(1, num_steps)

    def _preempt(self) -> None:
        """Send samples back until every other one has room for one more token."""
        capacity = self._kv_capacity
        while capacity is not None and len(self._heap) > 1 and self.kv_tokens + len(self._heap) > capacity:
            self._waiting.appendleft(self.remove(max(self._heap, key=lambda running: running.number)))
            self.num_preemptions += 1

    def _admit(self) -> None:
        while self._waiting and len(self._heap) < self._max_samples:
            held = _held(self._waiting[0])
            needed = held + BLOCK_TOKENS * (len(self._heap) + 1)
            if self._kv_capacity is not None and self._heap and self.kv_tokens + needed > self._kv_capacity:
                return
            sample = self._waiting.popleft()
            self.begin(sample, length=sample.length, position=sample.position, kv_tokens=sample.context_tokens)
            self.stall(self._prefill_s(held))


def _held(sample: BatchSample) -> int:
    """KV tokens of a running sample."""
    return sample.context_tokens + sample.position

"""Models continuous batching on an emulated GPU: which samples decode, wait or are preempted. Pure.

Beyond `BatchedEngine`:

- Steps are whole: time too short for a step is carried over.
- Samples start in order while a slot is free and their tokens so far fit in the KV cache. A prefill stops all
  decoding, since it uses the same GPU.
- The KV cache grows with every token. When it is full, the sample that started last goes back to the head of the queue
  and its cache is computed again when it restarts, as in vLLM.
- There is no prefix cache: samples of a group do not share their prompt.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from penstock.batching.batched_engine import BatchedEngine, Running
from penstock.batching.step_times import StepTimes

BLOCK_TOKENS = 16
"""KV headroom, in tokens, that a sample needs to start; without it a preempted sample would restart at once and be
preempted again a step later."""


@dataclass(slots=True, kw_only=True, eq=False)
class BatchSample:
    """A sample in the batch."""

    context_tokens: int
    """Length of the prompt."""
    length: int
    """Final length of the completion, a prefix included."""
    position: int
    """Completion tokens so far, a prefix included; updated by the batch."""


class ContinuousBatch(BatchedEngine[BatchSample]):
    """Batches samples as the module describes.

    Args:
        steps: Times of steps and prefills.
        max_samples: Maximum number of samples decoded at once.
        kv_capacity_tokens: Size of the KV cache; None if unbounded.
    """

    def __init__(self, steps: StepTimes, *, max_samples: int, kv_capacity_tokens: int | None = None) -> None:
        super().__init__(steps.step_s, kv_growth=1)
        self._prefill_s = steps.prefill_s
        self._max_samples = max_samples
        self._kv_capacity = kv_capacity_tokens
        self._waiting: deque[BatchSample] = deque()
        self._ended: list[BatchSample] = []
        self.num_preemptions = 0
        """Preemptions since the start."""

    @property
    def num_waiting(self) -> int:
        """Samples waiting for a slot or for KV headroom."""
        return len(self._waiting)

    @property
    def time_to_end_s(self) -> float:
        """Time until a running sample ends if nothing changes before then; infinite if none is running."""
        if not self._heap:
            return math.inf
        num_steps = self._steps_to_next_end()
        return max(0.0, num_steps * self._mean_step_s(num_steps) - self._unspent_s)

    @property
    def next_end_s(self) -> float:
        """See `BatchedEngine`."""
        return self.clock_s + self.time_to_end_s

    def add(self, sample: BatchSample) -> None:
        """Add a sample with tokens left to decode."""
        self._waiting.append(sample)
        self._admit()

    def discard(self, sample: BatchSample) -> None:
        """Remove a sample; an unknown one is ignored."""
        running = next((each for each in self.running if each.item is sample), None)
        if running is not None:
            self.remove(running)
        elif sample in self._waiting:
            self._waiting.remove(sample)
        self._admit()

    def recompute(self) -> tuple[int, float]:
        """Discard the KV cache and recompute it before decoding continues; returns its tokens and the time taken."""
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
        """The samples that have ended since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def _let_go(self, running: Running[BatchSample]) -> BatchSample:
        running.item.position = int(self.position(running))
        return super()._let_go(running)

    def _mean_step_s(self, num_steps: int) -> float:
        """Duration of the next steps, in which the KV cache grows."""
        num_samples = len(self._heap)
        return self._step_time(num_samples, self.kv_tokens + num_samples * (num_steps - 1) / 2)

    def _affordable_steps(self) -> int:
        """Whole steps that fit in the time and before the batch changes."""
        num_steps = min(self._steps_to_change(), int(self._unspent_s / self._mean_step_s(1)))
        if num_steps > 1:
            num_steps = max(1, min(num_steps, int(self._unspent_s / self._mean_step_s(num_steps))))
        return max(0, num_steps)

    def _steps_to_next_end(self) -> int:
        return int(self._heap[0].end_step - self.num_steps)

    def _steps_to_change(self) -> int:
        """Steps until a sample ends or the KV cache is full; a lone sample may exceed it."""
        num_steps = self._steps_to_next_end()
        if self._kv_capacity is not None and len(self._heap) > 1:
            num_steps = min(num_steps, int(self._kv_capacity - self.kv_tokens) // len(self._heap))
        return max(1, num_steps)

    def _preempt(self) -> None:
        """Preempt samples until each of the others has space for one more token."""
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

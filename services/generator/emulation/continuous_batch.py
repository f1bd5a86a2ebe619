"""Continuous batching on a pretend GPU: who decodes, who waits, who is preempted, and how far each one is. Pure.

- Every running sample takes part in every step and gets one token from it.
- Samples begin in turn while a slot is free and the KV cache holds what they have so far. Their prefill stops the
  decoding of all: it is the same GPU.
- The KV cache grows with every token. When it is full, the sample that began last goes back to the head of the line
  and its cache is computed anew when it begins again, as in vLLM.
- Prompts are not shared between the samples of a group: there is no prefix cache.

Time is given in pieces of any size: what is too short for a step is kept for the next piece.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.generator.emulation.step_times import StepTimes

BLOCK_TOKENS = 16
"""A begun sample's cache grows by so much before it is looked at again; without this a preempted sample would begin
again at once and be preempted again a step later."""


@dataclass(slots=True, kw_only=True, eq=False)
class BatchSample:
    """A sample in the batch."""

    context_tokens: int
    """Of the prompt."""
    length: int
    """Completion tokens in all, a prefix included."""
    position: int
    """Completion tokens it has, a prefix included; kept up by the batch."""


class Batch:
    """See the module.

    Args:
        steps: How long things take.
        max_samples: Most samples decoded at once.
        kv_capacity_tokens: KV room; None when nothing bounds it.
    """

    def __init__(self, steps: StepTimes, *, max_samples: int, kv_capacity_tokens: int | None = None) -> None:
        self._steps = steps
        self._max_samples = max_samples
        self._kv_capacity = kv_capacity_tokens
        self._running: list[BatchSample] = []
        self._waiting: deque[BatchSample] = deque()
        self._kv_tokens = 0
        self._unspent_s = 0.0
        self.num_preemptions = 0
        """Since the beginning."""
        self.num_recomputed_tokens = 0
        """Tokens whose KV cache was computed again: after a preemption, or on demand."""

    @property
    def num_running(self) -> int:
        """Samples being decoded."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot or for KV room."""
        return len(self._waiting)

    @property
    def kv_tokens(self) -> int:
        """KV tokens held now."""
        return self._kv_tokens

    @property
    def next_end_s(self) -> float | None:
        """Time until a running sample ends if nothing changes before; None when none runs."""
        if not self._running:
            return None
        num_steps, num_samples = self._steps_to_next_end(), len(self._running)
        step_s = self._steps.step_s(num_samples, self._kv_tokens + num_samples * (num_steps - 1) / 2)
        return max(0.0, num_steps * step_s - self._unspent_s)

    def add(self, sample: BatchSample) -> None:
        """Take a sample that has tokens to go."""
        self._waiting.append(sample)
        self._admit()

    def remove(self, sample: BatchSample) -> None:
        """Let go of a sample; one that is not here is no error."""
        if sample in self._running:
            self._running.remove(sample)
            self._kv_tokens -= _held(sample)
        elif sample in self._waiting:
            self._waiting.remove(sample)
        self._admit()

    def recompute(self) -> tuple[int, float]:
        """Throw the KV cache away and compute it anew, before anything else is decoded; its tokens, and the time."""
        prefill_s = sum(self._steps.prefill_s(_held(sample)) for sample in self._running)
        self._unspent_s -= prefill_s
        self.num_recomputed_tokens += self._kv_tokens
        return self._kv_tokens, prefill_s

    def advance(self, elapsed_s: float) -> list[BatchSample]:
        """Decode for so long; returns the samples that ended, in order."""
        self._unspent_s += elapsed_s
        ended: list[BatchSample] = []
        while self._running:
            self._make_room()
            num_steps = self._affordable_steps(self._steps_to_change())
            if num_steps == 0:
                return ended
            ended += self._decode(num_steps)
        # Nobody was there to use it.
        self._unspent_s = 0.0
        return ended

    def _decode(self, num_steps: int) -> list[BatchSample]:
        num_samples = len(self._running)
        self._unspent_s -= num_steps * self._mean_step_s(num_steps)
        self._kv_tokens += num_steps * num_samples
        for sample in self._running:
            sample.position += num_steps
        ended = [sample for sample in self._running if sample.position >= sample.length]
        for sample in ended:
            self._running.remove(sample)
            self._kv_tokens -= _held(sample)
        if ended:
            self._admit()
        return ended

    def _mean_step_s(self, num_steps: int) -> float:
        num_samples = len(self._running)
        return self._steps.step_s(num_samples, self._kv_tokens + num_samples * (num_steps - 1) / 2)

    def _affordable_steps(self, most: int) -> int:
        """Whole steps that the time allows, up to `most`; steps grow longer with the KV cache."""
        num_steps = min(most, int(self._unspent_s / self._mean_step_s(1)))
        if num_steps > 1:
            num_steps = max(1, min(num_steps, int(self._unspent_s / self._mean_step_s(num_steps))))
        return max(0, num_steps)

    def _steps_to_next_end(self) -> int:
        return min(sample.length - sample.position for sample in self._running)

    def _steps_to_change(self) -> int:
        """Steps until a sample ends or the KV cache is full; one that is alone may fill more than there is."""
        num_steps = self._steps_to_next_end()
        if self._kv_capacity is not None and len(self._running) > 1:
            num_steps = min(num_steps, (self._kv_capacity - self._kv_tokens) // len(self._running))
        return max(1, num_steps)

    def _make_room(self) -> None:
        """Preempt until every running sample has room for one more token."""
        capacity = self._kv_capacity
        while capacity is not None and len(self._running) > 1 and self._kv_tokens + len(self._running) > capacity:
            sample = self._running.pop()
            self._kv_tokens -= _held(sample)
            self._waiting.appendleft(sample)
            self.num_preemptions += 1
            self.num_recomputed_tokens += _held(sample)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_samples:
            sample = self._waiting[0]
            growth = BLOCK_TOKENS * (len(self._running) + 1)
            if (
                self._kv_capacity is not None
                and self._running
                and self._kv_tokens + _held(sample) + growth > self._kv_capacity
            ):
                return
            self._running.append(self._waiting.popleft())
            self._kv_tokens += _held(sample)
            self._unspent_s -= self._steps.prefill_s(_held(sample))


def _held(sample: BatchSample) -> int:
    """KV tokens of a running sample."""
    return sample.context_tokens + sample.position

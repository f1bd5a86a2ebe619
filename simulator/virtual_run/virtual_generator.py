"""A generator on the virtual clock: continuous batching as the scheduler's cost model has it.

All samples that run take part in every decode step, so a sample's end is a step number, only the next end is an event,
and a sample costs the simulator two operations on a heap.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from simulator.virtual_run.ledger import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """One replica: how fast it is and where it stands."""

    name: str
    node: str
    """Its machine: what fails or joins."""
    region: str
    steps_s: tuple[float, ...]
    """Time of a decode step by number of samples, from 0 to the most it decodes at once."""
    prefill_s: float
    """Of one sample; nobody else decodes meanwhile."""
    pause_s: float
    """How long a weight update stops it."""
    prefill_token_s: float = 0.0
    """Of each token of prompt and prefix that nobody shares: what a sample costs that comes from elsewhere."""

    @property
    def max_samples(self) -> int:
        """Most samples it decodes at once."""
        return len(self.steps_s) - 1


@dataclass(slots=True)
class Engine:
    """What a generator holds now."""

    spec: GeneratorSpec
    version: int = 0
    """Of its weights."""
    next_version: int | None = None
    """Where weights are not exchanged under samples: those that wait until it holds none; it takes none meanwhile."""
    is_alive: bool = True
    clock_s: float = 0.0
    busy_s: float = 0.0
    epoch: int = 0
    """Counts changes: an end that was foretold before the last one is void."""
    slowdown: float = 1.0
    _num_steps: float = 0.0
    _stall_s: float = 0.0
    """Time before it decodes again: prefill, or a weight update."""
    _ends: list[tuple[float, int, Sample]] = field(default_factory=list)
    _number: int = 0

    @property
    def num_running(self) -> int:
        """Samples in its hands."""
        return len(self._ends)

    @property
    def num_free(self) -> int:
        """Samples it could take."""
        is_open = self.is_alive and self.next_version is None
        return self.spec.max_samples - len(self._ends) if is_open else 0

    def begin(self, sample: Sample) -> None:
        """Take a sample."""
        self._number += 1
        self._stall_s += self.spec.prefill_s * self.slowdown
        heapq.heappush(self._ends, (self._num_steps + sample.remaining_tokens, self._number, sample))

    def take_over(self, sample: Sample, *, context_tokens: float, delay_s: float) -> None:
        """Take a sample that was begun elsewhere; the delay is its own, the prefill of its context everybody's."""
        self._number += 1
        self._stall_s += self.spec.prefill_token_s * context_tokens * self.slowdown
        delay = delay_s / (self.spec.steps_s[len(self._ends) + 1] * self.slowdown)
        heapq.heappush(self._ends, (self._num_steps + delay + sample.remaining_tokens, self._number, sample))

    def let_go(self, sample: Sample, now_s: float) -> Sample:
        """Hand a sample to another generator, as far as it got."""
        index = next(index for index, (_, _, held) in enumerate(self._ends) if held is sample)
        end = self._ends.pop(index)[0]
        heapq.heapify(self._ends)
        return sample.after(sample.remaining_tokens - (end - self._num_steps), moved_s=now_s)

    def held(self) -> Iterator[tuple[Sample, float]]:
        """Its samples, each with the tokens of its completion that are decoded."""
        for end, _, sample in self._ends:
            yield sample, sample.num_done + max(0.0, sample.remaining_tokens - (end - self._num_steps))

    def stall(self, seconds: float) -> None:
        """Decode nothing for so long, after what holds it up now."""
        self._stall_s += seconds

    def next_end_s(self) -> float:
        """When its next sample ends; infinite when it holds none."""
        if not self._ends:
            return math.inf
        steps = max(0.0, self._ends[0][0] - self._num_steps)
        return self.clock_s + self._stall_s + steps * self.spec.steps_s[len(self._ends)] * self.slowdown

    def advance(self, now_s: float) -> None:
        """Decode until then, which must not be past `next_end_s`."""
        passed_s = now_s - self.clock_s
        self.clock_s = now_s
        stalled_s = min(self._stall_s, passed_s)
        self._stall_s -= stalled_s
        if self._ends:
            self.busy_s += passed_s
            self._num_steps += (passed_s - stalled_s) / (self.spec.steps_s[len(self._ends)] * self.slowdown)

    def pop_ended(self) -> Sample:
        """The sample whose end was foretold, at its end."""
        self._num_steps = max(self._num_steps, self._ends[0][0])
        return heapq.heappop(self._ends)[2]

    def lose_all(self) -> list[Sample]:
        """It is gone: what it held, as far as it got."""
        lost = [sample.after(sample.remaining_tokens - (end - self._num_steps)) for end, _, sample in self._ends]
        self._ends.clear()
        self._stall_s = 0.0
        self.is_alive = False
        return lost

"""Simulates a generator on the virtual clock: continuous batching with the step times of the scheduler's cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.batching.batched_engine import BatchedEngine, Running
from simulator.virtual_run.ledger import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """One replica: its speed and its place."""

    name: str
    node: str
    """Its machine, the unit that fails or joins."""
    region: str
    steps_s: tuple[float, ...]
    """Time of a decode step by number of samples, from 0 to the most it decodes concurrently."""
    prefill_s: float
    """Prefill time of one sample; decoding stops meanwhile."""
    pause_s: float
    """Seconds for which a weight update pauses it."""
    prefill_token_s: float = 0.0
    """Prefill time per token of unshared prompt and prefix: the cost of a sample that moves here."""

    @property
    def max_samples(self) -> int:
        """Most samples it decodes concurrently."""
        return len(self.steps_s) - 1


class Engine(BatchedEngine[Sample]):
    """The state of a generator."""

    def __init__(self, spec: GeneratorSpec) -> None:
        super().__init__(self._time_of_step)
        self.spec, self._steps_s, self._max_samples = spec, spec.steps_s, spec.max_samples
        self.version = 0
        """Version of its weights."""
        self.next_version: int | None = None
        """Weights that wait until it has no samples; it takes none meanwhile. None if they need not wait."""
        self.is_alive = True
        self.epoch = 0
        """Number of changes: an end predicted before the last change is void."""
        self.slowdown = 1.0

    @property
    def num_free(self) -> int:
        """Samples it could take."""
        is_open = self.is_alive and self.next_version is None
        return self._max_samples - len(self._heap) if is_open else 0

    def take(self, sample: Sample) -> None:
        """Start a sample."""
        self.stall(self.spec.prefill_s * self.slowdown)
        self.begin(sample, length=sample.remaining_tokens)

    def take_over(self, sample: Sample, *, context_tokens: float, delay_s: float) -> None:
        """Take a sample that was started elsewhere; its delay is its own, the prefill of its context stalls all."""
        self.stall(self.spec.prefill_token_s * context_tokens * self.slowdown)
        self.begin(sample, length=sample.remaining_tokens, delay_s=delay_s)

    def let_go(self, sample: Sample, now_s: float) -> Sample:
        """Give a sample to another generator, with its progress."""
        running = next(each for each in self.running if each.item is sample)
        self.remove(running)
        return sample.after(self._num_decoded(running), moved_s=now_s)

    def held(self) -> Iterator[tuple[Sample, float]]:
        """Its samples, each with its decoded completion tokens."""
        for running in self.running:
            sample = running.item
            num_decoded = sample.remaining_tokens - (running.end_step - self.num_steps)
            yield sample, sample.num_done + num_decoded if num_decoded > 0 else sample.num_done

    def slow_down(self, factor: float) -> None:
        """Multiply the specified step times by this factor from now on."""
        self.slowdown = factor
        self._steps_s = tuple(step_s * factor for step_s in self.spec.steps_s)
        self._is_changed = True

    def lose_all(self) -> list[Sample]:
        """Fail: return its samples with their progress."""
        lost = [each.item.after(self._num_decoded(each)) for each in self.running]
        self.clear()
        self.is_alive = False
        return lost

    def _num_decoded(self, running: Running[Sample]) -> float:
        """Tokens that it has decoded here; below 0 before a delayed start."""
        return running.item.remaining_tokens - (running.end_step - self.num_steps)

    def _time_of_step(self, num_samples: int, _kv_tokens: float) -> float:
        return self._steps_s[num_samples]

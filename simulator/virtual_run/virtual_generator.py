"""A generator on the virtual clock: continuous batching with the step times of the scheduler's cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.batching.batched_engine import BatchedEngine, Running
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


class Engine(BatchedEngine[Sample]):
    """What a generator holds now."""

    def __init__(self, spec: GeneratorSpec) -> None:
        super().__init__(self._time_of_step)
        self.spec, self._steps_s, self._max_samples = spec, spec.steps_s, spec.max_samples
        self.version = 0
        """Of its weights."""
        self.next_version: int | None = None
        """Weights that wait until it holds no sample; it takes none meanwhile. None where they need not wait."""
        self.is_alive = True
        self.epoch = 0
        """Counts changes: an end that was foretold before the last one is void."""
        self.slowdown = 1.0

    @property
    def num_free(self) -> int:
        """Samples it could take."""
        is_open = self.is_alive and self.next_version is None
        return self._max_samples - len(self._heap) if is_open else 0

    def take(self, sample: Sample) -> None:
        """Begin a sample."""
        self.stall(self.spec.prefill_s * self.slowdown)
        self.begin(sample, length=sample.remaining_tokens)

    def take_over(self, sample: Sample, *, context_tokens: float, delay_s: float) -> None:
        """Take a sample that was begun elsewhere; the delay is its own, the prefill of its context everybody's."""
        self.stall(self.spec.prefill_token_s * context_tokens * self.slowdown)
        self.begin(sample, length=sample.remaining_tokens, delay_s=delay_s)

    def let_go(self, sample: Sample, now_s: float) -> Sample:
        """Hand a sample to another generator, as far as it got."""
        running = next(each for each in self.running if each.item is sample)
        self.remove(running)
        return sample.after(self._num_decoded(running), moved_s=now_s)

    def held(self) -> Iterator[tuple[Sample, float]]:
        """Its samples, each with the tokens of its completion that are decoded."""
        for running in self.running:
            sample = running.item
            num_decoded = sample.remaining_tokens - (running.end_step - self.num_steps)
            yield sample, sample.num_done + num_decoded if num_decoded > 0 else sample.num_done

    def slow_down(self, factor: float) -> None:
        """Let steps take that many times as long as specified from now on."""
        self.slowdown = factor
        self._steps_s = tuple(step_s * factor for step_s in self.spec.steps_s)
        self._is_changed = True

    def lose_all(self) -> list[Sample]:
        """It is gone: what it held, as far as it got."""
        lost = [each.item.after(self._num_decoded(each)) for each in self.running]
        self.clear()
        self.is_alive = False
        return lost

    def _num_decoded(self, running: Running[Sample]) -> float:
        """Tokens that it has decoded here; below 0 before a delayed beginning."""
        return running.item.remaining_tokens - (running.end_step - self.num_steps)

    def _time_of_step(self, num_samples: int, _kv_tokens: float) -> float:
        return self._steps_s[num_samples]

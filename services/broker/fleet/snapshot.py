"""Derives dispatch's view of the fleet and queue from a run's records and its generators' reports. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import pstdev

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.calibration import Calibration, calibrated, normal
from services.broker.dispatch.latency import LatencyModel, Load
from services.broker.dispatch.length_histogram import remaining_tokens
from services.broker.dispatch.situation import NEW_RANK, Prompt, Situation
from services.broker.records_pb2 import GroupRecord
from services.broker.state.run_state import RunState

REFRESH_S = 0.25
"""How old the lengths in a generator's load may be; the number of its samples is always current."""
MAX_LEASES_READ = 1024
"""Leases read at once for the lengths in loads, about 3 ms; of a larger fleet the oldest loads are read first."""
KEPT_S = 60.0
"""A load that was not read for this long belongs to a generator that left."""
SLICE = 1024
"""Leases and groups shown to a review between two pauses, 2 to 3 ms."""
MAX_GROUPS_MEASURED = 128
MAX_GROUPS_SHOWN = 1024
"""Queued samples shown to a policy that is reviewed; a look-ahead goes no further."""
UNSEEN_FORECAST_ERROR = 0.35
"""Assumed error of untested forecasts; StreamRL's ranker is about as good."""
UNSEEN_LENGTH_ERROR = 0.8
"""Assumed spread of lengths without forecasts, before any was seen."""
UNSEEN_CALIBRATION = normal(shared_error=0.25, own_error=0.25)
"""Calibration of untested forecasts: the same error, half of its variance shared by the samples of a prompt."""
UNSEEN_SHARE = 0.25
"""Assumed length of a completion before any was seen, as a fraction of the most tokens allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorStatus:
    """A generator that takes work now."""

    generator_id: str
    model: LatencyModel
    """The profile, corrected by its measured rate."""
    num_free: int
    """Number of leases it could get."""
    max_context_tokens: int
    is_speed_known: bool
    policy_version: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenLengths:
    """Length statistics of finished samples."""

    mean_tokens: float
    error: float
    """Standard deviation of the logarithm of true length over forecast, of the length itself without a forecast."""
    calibration: Calibration
    """From samples with a forecast."""


class Fleet:
    """Keeps the loads between one lease decision and the next; a hint that the records can rebuild at any time.

    Args:
        seen: Length statistics to assume before any sample has ended.
        look_s: See `Situation`.
    """

    def __init__(self, seen: SeenLengths | None = None, *, look_s: float = 1.0) -> None:
        self._look_s = look_s
        self._loads: dict[str, Load] = {}
        self._read_s: dict[str, float] = {}
        """When the lengths in each load were read."""
        self._seen = seen

    def mean_tokens(self, state: RunState) -> float:
        """Expected tokens of a completion without a forecast."""
        return self._seen.mean_tokens if self._seen else UNSEEN_SHARE * state.limits.max_completion_tokens

    def measure(self, state: RunState) -> None:
        """Learn from the newest trained step; before the first from ready groups, which favours short samples."""
        index = state.index
        if trained := [name for name in index.trained.get(max(index.trained, default=0), ()) if not index.is_put(name)]:
            self._seen = seen_lengths(state, trained) or self._seen
        elif self._seen is None:
            ready = (name for _oldest, _sequence, name in index.ready[types_pb2.PURPOSE_TRAIN])
            self._seen = seen_lengths(state, (name for name in ready if not index.is_put(name)))

    def situation_of(
        self, state: RunState, statuses: Mapping[str, GeneratorStatus], loads: Mapping[str, Load], asking: str
    ) -> Situation:
        """The situation for the generator that asks, which must be among `loads`; some statuses are enough."""
        has_forecasts = any(length for length, _ in state.queued_lengths.items())
        unseen_error = UNSEEN_FORECAST_ERROR if has_forecasts else UNSEEN_LENGTH_ERROR
        return Situation(
            asking=asking,
            loads=loads,
            queue=state.queued_lengths,
            under_way=state.leased_lengths,
            mean_tokens=self.mean_tokens(state),
            has_forecasts=has_forecasts,
            has_speeds=any(status.is_speed_known for status in statuses.values()),
            max_tokens=state.limits.max_completion_tokens,
            length_error=self._seen.error if self._seen else unseen_error,
            calibration=self._seen.calibration if self._seen else UNSEEN_CALIBRATION,
            steps_overlap=state.limits.max_staleness > 0,
            look_s=self._look_s,
        )

    def loads(self, state: RunState, statuses: Mapping[str, GeneratorStatus], now_s: float) -> dict[str, Load]:
        """The loads of these generators, kept: leases placed on them until the next call are remembered."""
        num_left = MAX_LEASES_READ
        outdated = [name for name, status in statuses.items() if self._is_outdated(state, status, now_s)]
        for name in sorted(outdated, key=lambda name: self._read_s.get(name, -math.inf)):
            num_held = len(state.generation_leases.get(name, ()))
            if num_held <= num_left:
                num_left -= num_held
                self.read(state, statuses[name], now_s)
        mean_tokens = self.mean_tokens(state)
        return {name: self._counted(state, status, mean_tokens) for name, status in statuses.items()}

    def known(self, name: str) -> Load | None:
        """A generator's load as it was last read."""
        return self._loads.get(name)

    def forget_others(self, names: Collection[str], now_s: float) -> None:
        """Forget the loads of generators that left: they are not among these, and were not read for a while."""
        if len(self._loads) > 2 * len(names):
            for name in [name for name, read_s in self._read_s.items() if now_s - read_s > KEPT_S]:
                if name not in names:
                    del self._loads[name], self._read_s[name]

    def read(self, state: RunState, status: GeneratorStatus, now_s: float) -> Load:
        """A generator's load, read from the records."""
        load = self._loads[status.generator_id] = load_of(state, status, self.mean_tokens(state))
        self._read_s[status.generator_id] = now_s
        return load

    def _is_outdated(self, state: RunState, status: GeneratorStatus, now_s: float) -> bool:
        name = status.generator_id
        load = self._loads.get(name)
        return (
            load is None
            or now_s - self._read_s[name] >= REFRESH_S
            or load.num_samples != len(state.generation_leases.get(name, ()))
            or not (load.model is status.model or load.model == status.model)
        )

    def _counted(self, state: RunState, status: GeneratorStatus, mean_tokens: float) -> Load:
        """A load with the current numbers of samples and leases, though its lengths may be older."""
        name = status.generator_id
        num_held = len(state.generation_leases.get(name, ()))
        load = self._loads.get(name)
        if load is None:
            load = self._loads[name] = empty_load(status, mean_tokens)
            self._read_s[name] = -math.inf
        if load.num_samples != num_held:
            load.resize(num_held, mean_tokens)
        load.model, load.max_leases, load.max_context_tokens = status.model, status.num_free, status.max_context_tokens
        return load


def prompts_in_slices(state: RunState) -> Iterator[list[Prompt]]:
    """The front of the queue and the generators' samples, with the siblings that have ended.

    In parts, each of at most SLICE samples; the run may change between them.
    """
    running: dict[str, list[tuple[str, int]]] = {}
    leases = [(name, sample_id) for name, held in state.generation_leases.items() for sample_id in held.values()]
    for number, (name, (group_id, index)) in enumerate(leases, 1):
        if group_id in state.groups:
            running.setdefault(group_id, []).append((name, state.groups[group_id].samples[index].num_tokens))
        if number % SLICE == 0:
            yield []
    front = [(rank[-1], rank[0] < NEW_RANK) for rank in state.queue[:MAX_GROUPS_SHOWN]]
    queued = {sequence for sequence, _ in front}
    held = [state.groups[group_id].sequence for group_id in running if group_id in state.groups]
    front += [(sequence, True) for sequence in held if sequence not in queued]
    for first in range(0, len(front), SLICE // 8):
        part: list[Prompt] = []
        for sequence, is_begun in front[first : first + SLICE // 8]:
            if group := state.groups.at(sequence):
                part.append(_prompt(state, group, running.get(group.group_id, ()), is_begun=is_begun))
        yield part


def _prompt(state: RunState, group: GroupRecord, running: Sequence[tuple[str, int]], *, is_begun: bool) -> Prompt:
    return Prompt(
        predicted_tokens=group.samples[0].predicted_tokens,
        num_queued=_num_queued(group) if is_begun else len(group.samples),
        step=(group.sequence - 1) // state.limits.groups_per_step,
        is_begun=is_begun,
        ended=_ended(group) if is_begun else (),
        running=running,
    )


def load_of(state: RunState, status: GeneratorStatus, mean_tokens: float) -> Load:
    """A generator's load, by the forecasts."""
    held = state.generation_leases.get(status.generator_id, {})
    lengths = list(_held_lengths(state, held.values(), mean_tokens))
    mean_final = sum(sum(item) for item in lengths) / len(lengths) if lengths else mean_tokens
    load = empty_load(status, mean_final)
    for remaining, context in lengths:
        load.add(remaining, context)
    load.max_leases = status.num_free
    return load


def empty_load(status: GeneratorStatus, mean_tokens: float) -> Load:
    """The load of a generator that holds nothing, with room for samples of this length."""
    return Load(
        model=status.model,
        max_samples=status.model.max_batch(mean_tokens),
        max_leases=status.num_free,
        max_context_tokens=status.max_context_tokens,
    )


def _held_lengths(
    state: RunState, held: Iterable[tuple[str, int]], mean_tokens: float
) -> Iterable[tuple[float, float]]:
    """Remaining tokens and context tokens of each leased sample."""
    for group_id, index in held:
        group = state.groups[group_id]
        sample = group.samples[index]
        expected = sample.predicted_tokens or mean_tokens
        yield remaining_tokens(expected, sample.num_tokens), group.num_prompt_tokens + sample.num_tokens


def seen_lengths(state: RunState, group_ids: Iterable[str]) -> SeenLengths | None:
    """Length statistics of a bounded number of these groups; None if there are none."""
    prompts: list[tuple[float, Sequence[float]]] = []
    for group_id in islice(group_ids, MAX_GROUPS_MEASURED):
        group = state.groups[group_id]
        if ended := _ended(group):
            prompts.append((group.samples[0].predicted_tokens, ended))
    return lengths_seen(prompts) if prompts else None


def _num_queued(group: GroupRecord) -> int:
    return sum(sample.state == broker_pb2.SAMPLE_STATE_QUEUED for sample in group.samples)


def _ended(group: GroupRecord) -> list[int]:
    """Tokens of the samples that have ended."""
    return [sample.num_tokens for sample in group.samples if sample.num_tokens and sample.finish_reason]


def lengths_seen(prompts: Sequence[tuple[float, Sequence[float]]]) -> SeenLengths:
    """Statistics of these lengths by prompt; a forecast of 0 means none. Needs at least one prompt with one length."""
    everything = [length for _, lengths in prompts for length in lengths]
    return SeenLengths(
        mean_tokens=sum(everything) / len(everything),
        error=pstdev(math.log(length / (forecast or 1.0)) for forecast, lengths in prompts for length in lengths),
        calibration=calibrated((forecast, lengths) for forecast, lengths in prompts if forecast),
    )

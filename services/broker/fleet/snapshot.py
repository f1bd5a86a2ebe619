"""Derives dispatch's view of the fleet and queue from a run's records and its generators' reports. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import pstdev

from penstock.v1 import broker_pb2, types_pb2
from services.broker.dispatch.calibration import Calibration, calibrated, normal
from services.broker.dispatch.latency import LatencyModel, Load
from services.broker.dispatch.length_histogram import LengthCounts, remaining_tokens
from services.broker.dispatch.situation import NEW_RANK, Prompt, Situation
from services.broker.records_pb2 import GroupRecord
from services.broker.state.run_state import RunState

REFRESH_S = 0.25
"""How old the lengths in a generator's load may be; the number of its samples is always current."""
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
        self._under_way = LengthCounts()
        self._refreshed_s = -math.inf
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

    def situation(
        self, state: RunState, statuses: Mapping[str, GeneratorStatus], asking: str, now_s: float
    ) -> Situation:
        """The situation for the generator that asks, which must be among `statuses`.

        Its load is kept, and so includes the samples it gets; the others' are copies.
        """
        mean_tokens = self.mean_tokens(state)
        if now_s - self._refreshed_s >= REFRESH_S or self._loads.keys() != statuses.keys():
            self._refreshed_s = now_s
            self._under_way = leased_lengths(state)
            self._loads = {name: load_of(state, status, mean_tokens) for name, status in statuses.items()}
        for name, status in statuses.items():
            if self._loads[name].num_samples != len(state.generation_leases.get(name, ())):
                self._loads[name] = load_of(state, status, mean_tokens)
            self._loads[name].max_leases = status.num_free
        has_forecasts = any(length for length, _ in state.queued_lengths.items())
        unseen_error = UNSEEN_FORECAST_ERROR if has_forecasts else UNSEEN_LENGTH_ERROR
        loads = {name: load if name == asking else load.copy() for name, load in self._loads.items()}
        return Situation(
            asking=asking,
            loads=loads,
            queue=state.queued_lengths,
            under_way=self._under_way,
            mean_tokens=mean_tokens,
            has_forecasts=has_forecasts,
            has_speeds=any(status.is_speed_known for status in statuses.values()),
            max_tokens=state.limits.max_completion_tokens,
            length_error=self._seen.error if self._seen else unseen_error,
            calibration=self._seen.calibration if self._seen else UNSEEN_CALIBRATION,
            steps_overlap=state.limits.max_staleness > 0,
            look_s=self._look_s,
        )

    def look(self, state: RunState, statuses: Mapping[str, GeneratorStatus], now_s: float) -> Situation:
        """The situation for a review, with queued and leased samples prompt by prompt."""
        return replace(self.situation(state, statuses, min(statuses), now_s), prompts=prompts_of(state))


def prompts_of(state: RunState) -> list[Prompt]:
    """The front of the queue and the generators' samples, with the siblings that have ended."""
    running: dict[str, list[tuple[str, int]]] = {}
    for name, held in state.generation_leases.items():
        for group_id, index in held.values():
            running.setdefault(group_id, []).append((name, state.groups[group_id].samples[index].num_tokens))
    found: list[Prompt] = []
    for rank in state.queue[:MAX_GROUPS_SHOWN]:
        if group := state.groups.at(rank[-1]):
            is_begun = rank[0] < NEW_RANK
            found.append(_prompt(state, group, running.pop(group.group_id, ()), is_begun=is_begun))
    found += [_prompt(state, state.groups[group_id], held, is_begun=True) for group_id, held in running.items()]
    return found


def _prompt(state: RunState, group: GroupRecord, running: Sequence[tuple[str, int]], *, is_begun: bool) -> Prompt:
    return Prompt(
        predicted_tokens=group.samples[0].predicted_tokens,
        num_queued=_num_queued(group) if is_begun else len(group.samples),
        step=(group.sequence - 1) // state.limits.groups_per_step,
        is_begun=is_begun,
        ended=_ended(group) if is_begun else (),
        running=running,
    )


def leased_lengths(state: RunState) -> LengthCounts:
    """Forecast lengths of everything that generators hold."""
    lengths = LengthCounts()
    for held in state.generation_leases.values():
        for group_id, index in held.values():
            lengths.add(state.groups[group_id].samples[index].predicted_tokens)
    return lengths


def load_of(state: RunState, status: GeneratorStatus, mean_tokens: float) -> Load:
    """A generator's load, by the forecasts."""
    held = state.generation_leases.get(status.generator_id, {})
    lengths = list(_held_lengths(state, held.values(), mean_tokens))
    mean_final = sum(sum(item) for item in lengths) / len(lengths) if lengths else mean_tokens
    load = Load(
        model=status.model,
        max_samples=status.model.max_batch(mean_final),
        max_leases=status.num_free,
        max_context_tokens=status.max_context_tokens,
    )
    for remaining, context in lengths:
        load.add(remaining, context)
    load.max_leases = status.num_free
    return load


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

"""Simulates one or a few steps of a run under a dispatch policy, on a virtual clock, until every sample is decoded.

The queue is a real `RunState`; leases are dealt by the policies and by the rounds (`services.broker.fleet.dealer`) that
a broker uses; only the generators are emulated. Admission never refuses.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.dispatch.emulated_fleet import EmulatedGenerator, Engine
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.routes import NO_ROUTES
from services.broker.dispatch.latency import LatencyModel
from services.broker.dispatch.policies import make_policy
from services.broker.dispatch.situation import Situation
from services.broker.dispatch.stealing_rule import MOVE_COST_S
from services.broker.fleet import work_stealing
from services.broker.fleet.deal_round import Seat
from services.broker.fleet.dealer import Dealer
from services.broker.fleet.snapshot import Fleet, GeneratorStatus, SeenLengths, lengths_seen, prompts_in_slices
from services.broker.ingest.token_chunk import ChunkFacts
from services.broker.operations import append_tokens, leasing, submission
from services.broker.operations.leasing import GeneratorFacts, Grant
from services.broker.operations.lifecycle import create_run
from services.broker.state.run_state import RunState

GIVE_UP_S = 60.0
_MAX_CONTEXT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fleet and the samples of one or several steps."""

    name: str
    generators: Sequence[EmulatedGenerator]
    lengths: Sequence[Sequence[int]]
    """True completion lengths, by group and sample; all groups have equally many."""
    forecasts: Sequence[float | None]
    """Forecasts, by group."""
    after_ended: Sequence[int] = ()
    """By group, ascending: it is submitted after this many samples have ended. Empty submits all at once."""
    groups_per_step: int | None = None
    """Step of each group; None if all belong to one step."""
    before: Sequence[tuple[float, Sequence[int]]] = ()
    """Forecast (0 for none) and true lengths of the previous step's prompts. If empty, those of this step."""
    num_prompt_tokens: int = 128
    tick_s: float = 1.0
    """How often generators report tokens, policies are reviewed and idle generators look for work to steal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Outcome of a scenario."""

    makespan_s: float
    busy_share: float
    """Share of the makespan that a generator decodes, mean over the fleet."""
    num_moves: int


def simulate(scenario: Scenario, policy_name: str, *, can_move: bool = True) -> Report:
    """Run a scenario to its end, with or without moves of leased work."""
    return _Simulation(scenario, policy_name, can_move=can_move).run()


def lower_bound_s(scenario: Scenario) -> float:
    """Lower bound: the longest sample alone on the fastest generator, or all tokens at each one's best rate.

    KV reads are left out of both, so the bound is loose if they matter.
    """
    models = [generator.model for generator in scenario.generators]
    lengths = [length for group in scenario.lengths for length in group]
    rate = sum(model.max_samples / model.step_s(model.max_samples) for model in models)
    return max(max(lengths) * min(model.step_s(1) for model in models), sum(lengths) / rate)


class _Simulation:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, policy_name: str, *, can_move: bool) -> None:
        self._can_move = can_move
        self._num_moves = 0
        self._scenario = scenario
        self._policy = make_policy(policy_name)
        self._fleet = Fleet(_seen_before(scenario), look_s=scenario.tick_s)
        self._dealer = Dealer(self._fleet)
        self._engines = {item.generator_id: Engine(item.model) for item in scenario.generators}
        self._seats = {name: Seat(_facts(name)) for name in self._engines}
        self._numbers = itertools.count()
        self._last_end_s = 0.0
        self._lengths = {f"g{index}": group for index, group in enumerate(scenario.lengths)}
        self._state = _open(scenario, policy_name)
        self._num_ended = 0
        self._unsubmitted = deque(enumerate(scenario.after_ended or [0] * len(scenario.lengths)))

    def run(self) -> Report:
        """Time to the last token."""
        now_s, next_tick_s = 0.0, 0.0
        while True:
            self._submit(now_s)
            if now_s >= next_tick_s:
                self._flush(now_s)
                self._review(now_s)
                self._move(now_s)
                next_tick_s = now_s + self._scenario.tick_s
            self._lease(now_s)
            end_s = min(engine.batch.next_end_s for engine in self._engines.values())
            if end_s == math.inf and not self._state.queue:
                break
            if end_s == math.inf and now_s > self._last_end_s + GIVE_UP_S:
                raise RuntimeError(f"{self._policy.name} left {len(self._state.queue)} groups in the queue for ever")
            now_s = min(end_s, next_tick_s)
            self._advance(now_s)
        busy_s = sum(engine.batch.busy_s for engine in self._engines.values())
        return Report(
            makespan_s=self._last_end_s,
            busy_share=busy_s / (self._last_end_s * len(self._engines)),
            num_moves=self._num_moves,
        )

    def _submit(self, now_s: float) -> None:
        due: list[int] = []
        while self._unsubmitted and self._unsubmitted[0][1] <= self._num_ended:
            due.append(self._unsubmitted.popleft()[0])
        if due:
            scenario = self._scenario
            prompts = [_prompt(scenario, index, self._state.limits.max_completion_tokens) for index in due]
            forecasts = {f"g{index}": value for index in due if (value := scenario.forecasts[index])}
            errors = submission.submit(self._state, prompts, retired=(), now_s=now_s, forecasts=forecasts)
            if errors:
                raise ValueError(f"scenario {scenario.name}: {errors[0].message}")
            self._state.settle()

    def _advance(self, now_s: float) -> None:
        for name, engine in self._engines.items():
            ended = engine.advance(now_s)
            if ended:
                self._last_end_s = now_s
                self._num_ended += len(ended)
                tokens = [(grant, self._lengths[grant.sample[0]][grant.sample[1]]) for grant in ended]
                self._accept(name, tokens, now_s, finish_reason=types_pb2.FINISH_REASON_STOP)

    def _flush(self, now_s: float) -> None:
        for name, engine in self._engines.items():
            self._accept(name, engine.progress(), now_s, finish_reason=types_pb2.FINISH_REASON_UNSPECIFIED)

    def _accept(
        self,
        name: str,
        tokens: Sequence[tuple[Grant, int]],
        now_s: float,
        *,
        finish_reason: types_pb2.FinishReason.ValueType,
    ) -> None:
        """Send the broker the samples' progress: leases, and total tokens."""
        chunks = []
        for grant, num_tokens in tokens:
            group_id, index = grant.sample
            stored = self._state.groups[group_id].samples[index].num_tokens
            if num_tokens > stored or finish_reason:
                chunks.append(_chunk(grant, stored, num_tokens, finish_reason))
        errors = append_tokens.accept_chunks(self._state, name, chunks, now_s).errors
        if errors:
            raise RuntimeError(f"the broker refused a chunk: {errors[0]}")
        self._state.settle()

    def _review(self, now_s: float) -> None:
        if self._state.queue:
            self._fleet.measure(self._state)
            prompts = list(itertools.chain.from_iterable(prompts_in_slices(self._state)))
            self._policy.review(replace(self._situation(min(self._engines), now_s), prompts=prompts))

    def _lease(self, now_s: float) -> None:
        is_cut = True
        while is_cut and self._state.queue:
            for name, engine in self._engines.items():
                self._seats[name].num_free = engine.model.max_samples - engine.num_held
            dealt = self._dealer.deal(
                self._state,
                self._policy,
                self._seats,
                self._statuses,
                now_s,
                make_suffix=self._suffix,
                longest_context_tokens=_MAX_CONTEXT_TOKENS,
            )
            self._state.settle()
            is_cut = dealt is not None and dealt.is_cut
            for name, grants in self._all_to_each(now_s) if dealt is None else dealt.grants.items():
                for grant in grants:
                    self._begin(self._engines[name], grant)

    def _all_to_each(self, now_s: float) -> Iterator[tuple[str, list[Grant]]]:
        """First come, first served."""
        for name, seat in self._seats.items():
            if seat.num_free and self._state.queue:
                found = leasing.lease(
                    self._state, seat.facts, max_leases=seat.num_free, now_s=now_s, make_suffix=self._suffix
                )
                self._state.settle()
                yield name, found.grants

    def _move(self, now_s: float) -> None:
        """Let idle generators steal work, as a lease stream does once a second when it finds nothing to lease."""
        for name, engine in self._engines.items():
            if not self._can_move or now_s == 0.0 or engine.num_held >= engine.model.max_samples or self._state.queue:
                continue
            moves = work_stealing.take_over(
                self._state,
                _facts(name),
                self._situation(name, now_s),
                num_waiting={other: self._engines[other].num_waiting for other in self._engines},
                now_s=now_s,
                make_suffix=self._suffix,
            )
            self._state.settle()
            for grant in moves.grants:
                self._num_moves += 1
                for other in self._engines.values():
                    other.abort(grant.sample)
                self._begin(engine, grant, delay_s=MOVE_COST_S)

    def _begin(self, engine: Engine, grant: Grant, *, delay_s: float = 0.0) -> None:
        group_id, index = grant.sample
        length = self._lengths[group_id][index]
        engine.begin(grant, context_tokens=self._scenario.num_prompt_tokens, length=length, delay_s=delay_s)

    def _situation(self, asking: str, now_s: float) -> Situation:
        statuses = self._statuses()
        loads = self._fleet.loads(self._state, statuses, now_s)
        return self._fleet.situation_of(self._state, statuses, loads, asking)

    def _statuses(self) -> dict[str, GeneratorStatus]:
        return {
            item.generator_id: GeneratorStatus(
                generator_id=item.generator_id,
                model=item.model if item.is_stated else self._measured(self._engines[item.generator_id]),
                num_free=item.model.max_samples - self._engines[item.generator_id].num_held,
                max_context_tokens=_MAX_CONTEXT_TOKENS,
                is_speed_known=item.is_stated or self._engines[item.generator_id].batch.num_steps > 0,
            )
            for item in self._scenario.generators
        }

    def _measured(self, engine: Engine) -> LatencyModel:
        """A broker's estimate from the rates of a generator without a profile: the default curve, scaled."""
        default = LatencyModel(max_samples=engine.model.max_samples)
        num_running = engine.batch.num_running
        return default.scaled(engine.batch.step_s / default.step_s(num_running)) if num_running else default

    def _suffix(self) -> str:
        return f"{next(self._numbers):06x}"


def _chunk(grant: Grant, stored: int, num_tokens: int, finish_reason: types_pb2.FinishReason.ValueType) -> ChunkFacts:
    return ChunkFacts(
        group_id=grant.sample[0],
        sample_index=grant.sample[1],
        attempt=grant.attempt,
        lease_id=grant.lease_id,
        offset=stored,
        num_tokens=num_tokens - stored,
        finish_reason=finish_reason,
        min_version=0,
        max_version=0,
        fault="",
        payload=b"",
        score=None,
        routes=NO_ROUTES,
    )


def _seen_before(scenario: Scenario) -> SeenLengths:
    """A broker's knowledge of lengths from previous steps: the same distribution."""
    here = [(forecast or 0.0, group) for forecast, group in zip(scenario.forecasts, scenario.lengths, strict=True)]
    return lengths_seen(scenario.before or here)


def _facts(generator_id: str) -> GeneratorFacts:
    return GeneratorFacts(
        generator_id=generator_id,
        policy_version=0,
        max_context_tokens=_MAX_CONTEXT_TOKENS,
        longest_context_tokens=_MAX_CONTEXT_TOKENS,
    )


def _open(scenario: Scenario, policy_name: str) -> RunState:
    """A run that fits the scenario, with nothing held back by admission."""
    state = RunState()
    groups_per_step = scenario.groups_per_step or len(scenario.lengths)
    longest = max(length for group in scenario.lengths for length in group)
    limits = broker_pb2.RunLimits(
        groups_per_step=groups_per_step,
        group_size=len(scenario.lengths[0]),
        max_staleness=math.ceil(len(scenario.lengths) / groups_per_step) - 1,
        max_queued_groups=len(scenario.lengths),
        # A limit that does not hint at the longest sample.
        max_completion_tokens=1 << longest.bit_length(),
    )
    # Leases never expire here: no generator dies.
    limits.generation_lease.FromSeconds(3600)
    policy = broker_pb2.RunPolicy(dispatch=policy_name)
    create_run(state, broker_pb2.OpenRunRequest(run_id="simulated", limits=limits, policy=policy), 0.0)
    return state


def _prompt(scenario: Scenario, index: int, max_new_tokens: int) -> types_pb2.Prompt:
    return types_pb2.Prompt(
        group_id=f"g{index}",
        token_ids=bytes(4 * scenario.num_prompt_tokens),
        group_size=len(scenario.lengths[index]),
        sampling=types_pb2.SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0),
        purpose=types_pb2.PURPOSE_TRAIN,
    )

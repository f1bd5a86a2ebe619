"""Simulates a run, event by event, on a virtual clock.

Events are: a generator's next sample ends, the trainer finishes a microbatch or a step, new weights arrive in a region,
a machine fails or joins, idle generators look for work to steal. Generators take what the ledger allows; the trainer
takes what batching delivers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from services.broker.fleet.snapshot import SeenLengths
from services.scheduler.solvers.interface import TimeLeft
from simulator.virtual_run.build_run import Mode, Setup
from simulator.virtual_run.ledger import Group, Ledger, Sample
from simulator.virtual_run.lpt_queue import ASK_AGAIN_S, Placer
from simulator.virtual_run.stealing import Mover
from simulator.virtual_run.virtual_generator import Engine

LEASE_S = 15.0
"""Time until the samples of a silent machine go to others."""
MICROBATCHES = 16
"""A streaming trainer starts once one of this many parts of a step is ready: enough to fill its GPUs."""


@dataclass(frozen=True, slots=True)
class Change:
    """A machine fails, joins (absent before) or slows down."""

    at_s: float
    node: str
    kind: str
    """fail, join or slow."""
    factor: float = 1.0
    """Factor on the duration of its steps from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a simulation."""

    mode: Mode
    num_steps: int = 10
    skip: int = 2
    """First steps that rates leave out, in which the pipeline is not yet full."""
    seed: int = 0
    longest_first: bool = True
    """Whether a step's prompts start in the order of forecast lengths, as under `lpt`; otherwise in order of
    arrival."""
    growth_per_step: float = 0.0
    """Growth of completions per step, as a share of the first ones' length."""
    changes: Sequence[Change] = ()
    look_s: float | None = None
    """How often to record the samples under way, for plots."""
    can_move: bool = True
    """Whether idle generators steal work from others."""
    drains: bool = False
    """Whether all generators finish their samples before any takes new weights; otherwise samples continue under
    them."""
    places: bool = False
    """Whether the longest samples are kept from slow generators, as under `lpt`; needs `can_move` and forecasts."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step."""

    end_s: float
    busy_s: float
    """Time that the trainer works on it."""
    num_tokens: float
    """Completion tokens trained on."""


@dataclass(slots=True)
class Record:
    """What happened in a run."""

    steps: list[Step] = field(default_factory=list)
    trained: list[tuple[float, float, int]] = field(default_factory=list)
    """When the trainer worked: from and to in seconds, and on which step."""
    held: list[tuple[float, int]] = field(default_factory=list)
    """Samples occupied by generators over time, one entry per look."""
    generating_s: float = 0.0
    """Total over generators."""
    num_generators: int = 0
    num_moves: int = 0
    """Samples that moved because an idle generator finishes them sooner."""
    num_events: int = 0


class Run:
    """A run; call `play` once.

    Args:
        setup: Generators, trainer, links.
        ledger: The broker's rules over the samples.
        options: How it is run.
        seen: What the broker knows of lengths before the first step; None moves no samples.
    """

    def __init__(self, setup: Setup, ledger: Ledger, options: Options, *, seen: SeenLengths | None = None) -> None:
        self.setup, self.ledger, self.options = setup, ledger, options
        self._engines = [Engine(spec) for spec in setup.generators]
        self._mover = Mover(self._engines, ledger, seen, setup.trainer.prompt_tokens) if seen is not None else None
        self._move_due_s, self._is_move_due = 0.0, False
        self._placer = Placer(self._mover) if options.places and self._mover is not None else None
        self._is_ask_due = False
        per_step = ledger.limits.groups_per_step
        self._at_least = max(1, per_step // MICROBATCHES) if options.mode.streams else per_step
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._now_s = 0.0
        self._is_training = False
        self._step_busy_s, self._step_tokens = 0.0, 0.0
        self._sent = dict.fromkeys(setup.transfer_s, 0)
        self._sending: set[str] = set()
        self.record = Record()
        for change in options.changes:
            if change.kind == "join":
                for engine in self._members(change.node):
                    engine.is_alive = False
            self._at(change.at_s, partial(self._change, change))

    @property
    def num_held(self) -> int:
        """Samples occupied by generators."""
        return sum(engine.num_running for engine in self._engines)

    @property
    def counted_s(self) -> float:
        """Duration of the steps that rates count."""
        skip, steps = self.options.skip, self.record.steps
        return steps[-1].end_s - (steps[skip - 1].end_s if skip else 0.0)

    @property
    def samples_per_second(self) -> float:
        """Samples trained per second in steady state."""
        limits = self.ledger.limits
        samples_per_step = limits.groups_per_step * limits.group_size
        return samples_per_step * (len(self.record.steps) - self.options.skip) / self.counted_s

    @property
    def tokens_per_second(self) -> float:
        """Rate of completion tokens over the same steps."""
        return sum(step.num_tokens for step in self.record.steps[self.options.skip :]) / self.counted_s

    def play(self, *, time_left: TimeLeft = lambda: math.inf) -> Record:
        """Run the training steps, fewer if time ends. Raises RuntimeError if the run is stuck."""
        self._deal(self._engines)
        if self.options.look_s is not None:
            self._look(self.options.look_s)
        while self.ledger.version < self.options.num_steps and time_left() > 0:
            if not self._events or self._is_stuck():
                raise RuntimeError(
                    f"after {self._now_s:.0f} s and {self.ledger.version} steps nothing goes on: "
                    f"{self.ledger.num_ready} groups are ready, {self.num_held} samples under way"
                )
            self._now_s, _, event = heapq.heappop(self._events)
            self.record.num_events += 1
            event()
        for engine in self._engines:
            engine.advance(self._now_s)
        self.record.generating_s = sum(engine.busy_s for engine in self._engines)
        self.record.num_generators = len(self._engines)
        return self.record

    def _is_stuck(self) -> bool:
        """Whether only looks are left."""
        is_busy = self._is_training or self.num_held > 0
        return self.options.look_s is not None and len(self._events) == 1 and not is_busy

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def _fill(self, engine: Engine) -> None:
        """Give a generator the work it may take, and predict its next end. Its clock is now."""
        if engine.num_free:
            for sample in self._taken(engine):
                engine.take(sample)
        if self._mover is not None and engine.num_free and not self._is_move_due:
            self._is_move_due = True
            self._at(max(self._now_s, self._move_due_s), self._move)
        engine.epoch += 1
        if (end_s := engine.next_end_s) < math.inf:
            self._at(end_s, partial(self._ended, engine, engine.epoch))

    def _taken(self, engine: Engine) -> list[Sample]:
        """The samples a generator gets now. Its clock is now."""
        ledger = self.ledger
        if self._placer is None:
            return ledger.take(engine.version, engine.num_free)
        if not ledger.has_work(engine.version):
            return []
        choice = self._placer.choose(engine, queued_tokens=ledger.queued_tokens, now_s=self._now_s)
        taken = ledger.choose(engine.version, engine.num_free, choice)
        if len(taken) < engine.num_free and not self._is_ask_due:
            self._is_ask_due = True
            self._at(self._now_s + ASK_AGAIN_S, self._ask_again)
        return taken

    def _ask_again(self) -> None:
        """Idle generators look again: others may have received something meanwhile."""
        self._is_ask_due = False
        for engine in self._engines:
            if engine.num_free:
                engine.advance(self._now_s)
                self._fill(engine)

    def _deal(self, engines: Sequence[Engine]) -> None:
        """Give several generators work in turn, so that none gets all the longest samples."""
        for engine in engines:
            engine.advance(self._now_s)
        free = [engine for engine in engines if engine.num_free and self._placer is None]
        while free:
            again = []
            for engine in free:
                taken = self.ledger.take(engine.version, 1)
                for sample in taken:
                    engine.take(sample)
                if taken and engine.num_free:
                    again.append(engine)
            free = again
        for engine in engines:
            self._fill(engine)

    def _move(self) -> None:
        """Let idle generators steal work from others; again after a while as long as there are any."""
        assert self._mover is not None
        self._move_due_s = self._now_s + self._mover.look_s
        for engine in self._engines:
            engine.advance(self._now_s)
        moves = self._mover.look(self._now_s)
        self.record.num_moves += len(moves)
        for engine in {id(each): each for move in moves for each in move}.values():
            self._fill(engine)
        self._renew_drained()
        self._is_move_due = self.num_held > 0
        if self._is_move_due:
            self._at(self._move_due_s, self._move)

    def _ended(self, engine: Engine, epoch: int) -> None:
        if engine.epoch != epoch:
            return
        engine.advance(self._now_s)
        for sample in engine.pop_ended():
            self.ledger.finish(sample)
        self._fill(engine)
        self._renew_drained()
        self._train()

    def _train(self) -> None:
        """Start a microbatch if the trainer is free and enough is ready."""
        ledger = self.ledger
        if self._is_training or ledger.num_ready < (wanted := min(self._at_least, ledger.num_missing)):
            return
        groups = ledger.deliver(at_least=wanted)
        if groups:
            self._is_training = True
            seconds = self._training_s(groups)
            if ledger.num_missing == 0:
                seconds += self.setup.trainer.end_s
            self._step_busy_s += seconds
            self._step_tokens += sum(group.num_tokens for group in groups)
            self.record.trained.append((self._now_s, self._now_s + seconds, ledger.version))
            self._at(self._now_s + seconds, self._trained)

    def _training_s(self, groups: Sequence[Group]) -> float:
        trainer = self.setup.trainer
        tokens = sum(group.num_tokens + len(group.lengths) * trainer.prompt_tokens for group in groups)
        return tokens / trainer.mean_tokens * trainer.sample_s

    def _trained(self) -> None:
        self._is_training = False
        if self.ledger.num_missing == 0:
            self.ledger.acknowledge()
            self.record.steps.append(Step(self._now_s, self._step_busy_s, self._step_tokens))
            self._step_busy_s, self._step_tokens = 0.0, 0.0
            for region in self.setup.transfer_s:
                self._send(region)
        self._train()

    def _send(self, region: str) -> None:
        """Send the newest weights to a region, one copy at a time."""
        seconds, version = self.setup.transfer_s[region], self.ledger.version
        if region not in self._sending and seconds < math.inf and self._sent[region] < version:
            self._sending.add(region)
            self._sent[region] = version
            self._at(self._now_s + seconds, partial(self._arrived, region, version))

    def _arrived(self, region: str, version: int) -> None:
        self._sending.discard(region)
        there = [engine for engine in self._engines if engine.spec.region == region and engine.is_alive]
        for engine in there:
            engine.advance(self._now_s)
            engine.next_version = version
            if not self.options.drains:
                self._renew(engine)
        self._deal(there)
        self._renew_drained()
        self._send(region)

    def _renew_drained(self) -> None:
        """Update all generators together once no sample is under way, if samples must end under their first weights."""
        if not self.options.drains or any(engine.num_running for engine in self._engines):
            return
        waiting = [engine for engine in self._engines if engine.next_version is not None]
        for engine in waiting:
            engine.advance(self._now_s)
            self._renew(engine)
        self._deal(waiting)

    def _renew(self, engine: Engine) -> None:
        """Exchange the generator's weights."""
        assert engine.next_version is not None
        engine.version, engine.next_version = engine.next_version, None
        engine.stall(engine.spec.pause_s)

    def _change(self, change: Change) -> None:
        for engine in self._members(change.node):
            engine.advance(self._now_s)
            if change.kind == "slow":
                engine.slow_down(change.factor)
            elif change.kind == "join":
                engine.is_alive, engine.version = True, self._sent[engine.spec.region]
            else:
                lost = engine.lose_all()
                self._at(self._now_s + LEASE_S, partial(self._redeliver, lost))
            self._fill(engine)

    def _redeliver(self, lost: Sequence[Sample]) -> None:
        self.ledger.give_back(lost)
        self._deal([engine for engine in self._engines if engine.num_free])

    def _members(self, node: str) -> list[Engine]:
        members = [engine for engine in self._engines if engine.spec.node == node]
        if not members:
            known = ", ".join(sorted({engine.spec.node for engine in self._engines}))
            raise ValueError(f"no generator runs on {node!r}; there are: {known}")
        return members

    def _look(self, every_s: float) -> None:
        self.record.held.append((self._now_s, self.num_held))
        self._at(self._now_s + every_s, partial(self._look, every_s))

"""Moves running samples to idle generators, by the broker's rules (`services.broker.dispatch.stealing_rule`).

A generator with free capacity and nothing to take from the ledger steals the sample likely to finish last, if it
finishes sooner there. Generators that are alike need not ask one by one: if the emptiest gains nothing, none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from services.broker.dispatch.latency import LatencyModel, Load
from services.broker.dispatch.length_histogram import remaining_tokens
from services.broker.dispatch.stealing_rule import MAX_MOVES, MIN_STAY_S, MOVE_COST_S, is_worth_moving, late_generators
from services.broker.fleet.snapshot import MAX_GROUPS_MEASURED, SeenLengths, lengths_seen
from simulator.virtual_run.ledger import Ledger, Sample
from simulator.virtual_run.virtual_generator import Engine, GeneratorSpec

LOOK_S = 1.0
"""How often an idle generator looks for work, as in the broker's lease stream."""
LOOKS_A_LIFE = 16
"""Looks per mean sample's decoding time; limits the simulation's work if one per second would be more."""
MAX_GENERATORS_A_SECOND = 64
"""Larger fleets look less often, for the same reason."""

Move = tuple[Engine, Engine]
"""A move from one generator to another."""


class Mover:
    """Looks for moves worth making.

    Args:
        engines: All generators.
        ledger: Records of the run, with the newest lengths.
        seen: Lengths known before the first step.
        prompt_tokens: Length of each prompt.
    """

    def __init__(self, engines: Sequence[Engine], ledger: Ledger, seen: SeenLengths, prompt_tokens: float) -> None:
        self.engines, self._ledger = engines, ledger
        self.seen = seen
        """Observed lengths, from the newest step."""
        self.prompt_tokens = prompt_tokens
        self._version = ledger.version
        kinds: dict[GeneratorSpec, int] = {}
        anonymous = (replace(engine.spec, name="", node="") for engine in engines)
        self._kinds = [kinds.setdefault(spec, len(kinds)) for spec in anonymous]
        """Kind of each generator; equal numbers are alike."""
        self._loads: list[Load] = []
        life_s = seen.mean_tokens * min((engine.spec.steps_s[-1] for engine in engines), default=0.0)
        self.look_s = max(LOOK_S, life_s / LOOKS_A_LIFE, len(engines) / MAX_GENERATORS_A_SECOND)
        """Seconds between looks."""

    def look(self, now_s: float) -> list[Move]:
        """Make the moves that pay. All clocks are now; predict the ends of the returned generators again."""
        kinds: dict[tuple[int, int, float], list[int]] = {}
        for index, engine in enumerate(self.engines):
            if engine.num_free:
                kinds.setdefault((self._kinds[index], engine.version, engine.slowdown), []).append(index)
        if not kinds:
            return []
        self.learn()
        self._loads = [self.load(engine) for engine in self.engines]
        return [move for alike in kinds.values() for move in self._taken_over(alike, now_s)]

    def learn(self) -> None:
        """Learn from the newest step's lengths."""
        if self._version != self._ledger.version:
            self._version = self._ledger.version
            groups = self._ledger.last_trained[:MAX_GROUPS_MEASURED]
            self.seen = lengths_seen([(group.forecast, group.lengths) for group in groups])

    def _taken_over(self, alike: Sequence[int], now_s: float) -> Iterator[Move]:
        """What similar generators steal, the emptiest first; each donor is considered once."""
        asking = self._emptiest(alike)
        donors = {str(index): load for index, load in enumerate(self._loads) if load.num_samples and index != asking}
        if not donors:
            return
        names = late_generators(self._loads[asking], donors, length_error=self.seen.error)
        for donor in map(int, names):
            for _ in range(MAX_MOVES):
                if asking == donor or not self._loads[asking].room or not self._takes(asking, donor, now_s):
                    break
                yield self.engines[donor], self.engines[asking]
                asking = self._emptiest(alike)

    def _emptiest(self, alike: Sequence[int]) -> int:
        return min(alike, key=lambda index: (self._loads[index].num_samples, self._loads[index].sum_tokens))

    def _takes(self, asking: int, donor: int, now_s: float) -> bool:
        """Move the donor's longest sample, if that pays."""
        taker, giver = self.engines[asking], self.engines[donor]
        there_s = self._loads[donor].finish_s()
        # Not worth it even without the prefill of its context: no need to search.
        longest = self._loads[donor].longest_tokens
        if not is_worth_moving(self._loads[asking], longest, 0.0, there_s=there_s):
            return False
        found = self._longest(giver, taker.version, now_s)
        if found is None or not is_worth_moving(self._loads[asking], *found[1:], there_s=there_s):
            return False
        taker.take_over(giver.let_go(found[0], now_s), context_tokens=found[2], delay_s=MOVE_COST_S)
        self._loads[asking], self._loads[donor] = self.load(taker), self.load(giver)
        return True

    def _longest(self, donor: Engine, version: int, now_s: float) -> tuple[Sample, float, float] | None:
        """The movable sample with the most expected tokens to go, that number, and its tokens of context."""
        best: tuple[Sample, float, float] | None = None
        for sample, num_done in donor.held():
            # Weights older than those it started with would make the group older.
            if now_s - sample.moved_s < MIN_STAY_S or sample.group.min_version > version:
                continue
            remaining = self._to_go(sample, num_done)
            if best is None or remaining > best[1]:
                best = sample, remaining, self.prompt_tokens + num_done
        return best

    def _to_go(self, sample: Sample, num_done: float) -> float:
        return remaining_tokens(sample.group.forecast or self.seen.mean_tokens, num_done)

    def load(self, engine: Engine) -> Load:
        """The generator's load, by the forecasts."""
        to_go = [self._to_go(sample, num_done) for sample, num_done in engine.held()]
        return Load(
            model=_line(engine.spec.steps_s, engine.spec.prefill_token_s, engine.slowdown),
            max_samples=engine.spec.max_samples,
            max_leases=engine.num_free,
            num_samples=len(to_go),
            longest_tokens=max(to_go, default=0.0),
            shortest_tokens=min(to_go, default=0.0),
            sum_tokens=sum(to_go),
        )


def _line(steps_s: tuple[float, ...], prefill_token_s: float, slowdown: float) -> LatencyModel:
    """The straight line with which a broker approximates a generator's steps."""
    most = len(steps_s) - 1
    per_sample_s = (steps_s[-1] - steps_s[1]) / (most - 1) if most > 1 else 0.0
    return LatencyModel(
        base_s=(steps_s[1] - per_sample_s) * slowdown,
        per_sample_s=per_sample_s * slowdown,
        prefill_tokens_per_second=1 / prefill_token_s if prefill_token_s else None,
        max_samples=most,
    )

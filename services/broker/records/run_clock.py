"""Keeps one clock per run, in the store beside its records, the same for every broker process.

All times in a run's records, and all decisions on them, use this clock. Brokers' wall clocks do not matter,
and neither does a step of the store's own clock:

- The store advances it by its own clock, but it never goes back: a store whose clock was set back, or that failed over
  to a machine that is behind, continues from where it was.
- It records since when it was advanced without a gap. If it was not advanced for `max_gap_s` (no broker ran, the store
  was unavailable or refused writes, machines slept) or the store's clock jumped ahead by as much, heartbeats could not
  arrive for an unknown time: ages start again at the end of the gap, and leases get their full duration from there.
- Between two readings a broker continues by its monotonic clock, for MAX_GAP_S at most. Leases expire by readings only.
- Between two advances the event loop of a process makes turns enough to read what had arrived by the first
  (`run_registry`): one whose turns take long advances the clock late, which holds leases back as below.
- It knows the brokers that *serve* the run, those with streams of it, each with the times of its last two advances.
  A process advances the clock only after it has stored the renewals that it had read at its advance before. So what
  reached a broker before its last advance but one counts already, and leases end by the oldest of these times
  (`Reading.heard_s`): a broker that is held, stopped or cut off holds the end of leases back, at every broker.
- One that is short of a core (`rules.saturation`) says by its advances that it lives, but not that it has heard
  anybody: streams may wait in line. The end of leases waits for it, but MOST_BEHIND_S at most.
- If one of them does not advance the clock for `max_gap_s`, that is a gap too: its holders could not be heard. After
  BROKER_LIFE_S it is taken for dead, and waited for no more. One that is started again tells the store at once that its
  predecessor serves nothing (`run_registry`): it may take long until a stream comes to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.clock import Clock
from services.broker.rules.limits import Limits

MAX_GAP_S = 5.0
"""A third of the default lease: holders renew theirs when a quarter of it is over, so a step this small ends none."""
MIN_GAP_S = 1.0
"""Brokers advance the clock four times a second; a busy one may be late."""
BROKER_LIFE_S = 40.0
"""Clients leave a broker that is silent for 30 s (`penstock.clients`); a few seconds later another one hears them."""
MOST_BEHIND_S = 300.0
"""What holders sent longer ago counts as heard by a saturated broker too: the end of leases waits no longer than that.
A lease without a token ends after as long at the earliest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The clock at one moment, in seconds since the Unix epoch."""

    now_s: float
    unbroken_since_s: float
    """End of the last gap."""
    heard_s: float = 0.0
    """What holders sent before this time was read and counts; leases end by it. The present if none serves the run."""


def max_gap_s(limits: Limits) -> float:
    """The longest time between two advances that is not a gap."""
    return min(MAX_GAP_S, max(MIN_GAP_S, min(limits.generation_lease_s, limits.scoring_lease_s) / 3))


class StoredClock:
    """A run's clock as a store keeps it; `lua/clock.lua` does the same."""

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._lead_s = self._since_s = 0.0
        self._brokers: dict[str, tuple[float, float]] = {}
        """The run's time at the last advance of each, and up to which it has heard its holders: at first its advance
        before the last."""

    def read(self, machine_s: float, max_gap_s: float) -> Reading:
        """The clock when the store's machine shows `machine_s`."""
        lead_s, since_s = self._now(machine_s, max_gap_s)
        return self._reading(machine_s + lead_s, since_s)

    def advance(
        self,
        machine_s: float,
        max_gap_s: float,
        *,
        broker: str = "",
        is_leaving: bool = False,
        is_behind: bool = False,
    ) -> Reading:
        """The same, and store it; see `Store.tick`."""
        self._lead_s, self._since_s = self._now(machine_s, max_gap_s)
        self._at_s = machine_s
        now_s = machine_s + self._lead_s
        for name, (last_s, _before_s) in list(self._brokers.items()):
            if now_s - last_s > max_gap_s:
                self._since_s = now_s
            if now_s - last_s > BROKER_LIFE_S:
                del self._brokers[name]
        if is_leaving:
            self._brokers.pop(broker, None)
        elif broker:
            last_s, before_s = self._brokers.get(broker, (now_s, now_s))
            self._brokers[broker] = now_s, max(before_s, now_s - MOST_BEHIND_S) if is_behind else last_s
        return self._reading(now_s, self._since_s)

    def _reading(self, now_s: float, since_s: float) -> Reading:
        heard_s = min((before_s for _last_s, before_s in self._brokers.values()), default=now_s)
        return Reading(now_s=now_s, unbroken_since_s=since_s, heard_s=heard_s)

    def _now(self, machine_s: float, max_gap_s: float) -> tuple[float, float]:
        """How far it is ahead of the machine's clock, and the end of its last gap."""
        if self._at_s is None:
            return 0.0, machine_s
        passed_s = machine_s - self._at_s
        if passed_s < 0:
            return self._lead_s - passed_s, self._since_s
        if passed_s > max_gap_s:
            lead_s = max(0.0, self._lead_s - passed_s)
            return lead_s, machine_s + lead_s
        return self._lead_s, self._since_s


class RunClock:
    """One broker process's view of a run's clock; before its first reading, the process's own clock."""

    def __init__(self, local: Clock) -> None:
        self._local = local
        self._reading: Reading | None = None
        self._read_at_s = 0.0
        self._newest_s = 0.0

    def take(self, reading: Reading) -> None:
        """Record a reading of the store's clock just now."""
        self._reading, self._read_at_s = reading, self._local.monotonic_s()
        # Ahead of the store by more than this process counted itself: the store lost commits.
        is_lost = self._newest_s - reading.now_s > 2 * MAX_GAP_S
        self._newest_s = reading.now_s if is_lost else max(self._newest_s, reading.now_s)

    @property
    def reading(self) -> Reading | None:
        """The last reading; None before the first one."""
        return self._reading

    @property
    def unbroken_since_s(self) -> float:
        """End of the last gap, as of the last reading; 0 before the first one."""
        return 0.0 if self._reading is None else self._reading.unbroken_since_s

    def now_s(self) -> float:
        """Seconds since the Unix epoch; never goes back."""
        if self._reading is None:
            return self._local.now_s()
        passed_s = min(MAX_GAP_S, self._local.monotonic_s() - self._read_at_s)
        self._newest_s = max(self._newest_s, self._reading.now_s + passed_s)
        return self._newest_s

    def monotonic_s(self) -> float:
        """This process's own clock for durations."""
        return self._local.monotonic_s()

    def age_s(self, since_s: float) -> float:
        """How long ago that was, excluding the last gap and the time before it, when heartbeats could not arrive."""
        return self.now_s() - max(since_s, self.unbroken_since_s)

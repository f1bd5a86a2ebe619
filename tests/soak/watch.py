"""What the soak looks at all the while: the audit, the staleness bound, progress, and what grows."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import redis

from tests.soak.fleet import Fleet

LOOK_EVERY_S = 2.0
WEIGH_EVERY_S = 15.0
STALLED_S = 900.0
"""So long without a step, faults and all, is a failure."""
GROWTH_FACTOR = 1.2
GROWTH_FLOOR = {"MiB": 64.0, "descriptors": 24.0}
"""What grew by less than this did not grow."""


@dataclass(slots=True)
class Watch:
    """Everything seen so far."""

    problems: list[str] = field(default_factory=list)
    """What must never be; one line each."""
    num_looks: int = 0
    num_unanswered: int = 0
    policy_version: int = 0
    weights: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By what and unit: time and amount."""
    last_step_s: float = field(default_factory=time.monotonic)

    def note(self, problem: str) -> None:
        """Keep a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)
            print(f"PROBLEM  {problem}", flush=True)


async def look(fleet: Fleet, watch: Watch, *, max_staleness: int) -> None:
    """Look at the run until cancelled."""
    while True:
        run = await fleet.get_run()
        watch.num_looks += 1
        if run is None:
            watch.num_unanswered += 1
        else:
            audit = run.audit
            if not audit.balanced:
                watch.note(f"the audit does not balance at version {run.policy_version}: {audit}".replace("\n", " "))
            if audit.max_staleness_seen > max_staleness:
                watch.note(f"staleness {audit.max_staleness_seen} at version {run.policy_version}")
            if run.policy_version > watch.policy_version:
                watch.policy_version, watch.last_step_s = run.policy_version, time.monotonic()
        if time.monotonic() - watch.last_step_s > STALLED_S:
            watch.note(f"no step for {STALLED_S:.0f} s after version {watch.policy_version}")
        await asyncio.sleep(LOOK_EVERY_S)


async def weigh(fleet: Fleet, watch: Watch) -> None:
    """Weigh processes, Redis and disk until cancelled."""
    while True:
        now_s = time.monotonic()
        for name, member in fleet.members.items():
            role = "trainer" if name.startswith("trainer") else name
            if member.pid is not None:
                resident, descriptors = await asyncio.to_thread(member.weight)
                watch.weights[role, "MiB"].append((now_s, resident / 2**20))
                watch.weights[role, "descriptors"].append((now_s, float(descriptors)))
        used = await asyncio.to_thread(_redis_bytes, fleet.redis.url)
        if used is not None:
            watch.weights["redis memory", "MiB"].append((now_s, used / 2**20))
        for path in (fleet.redis.folder, fleet.run_folder.path, fleet.folder / "cache", fleet.folder / "logs"):
            watch.weights[f"disk: {path.name}", "MiB"].append(
                (now_s, await asyncio.to_thread(_disk_bytes, path) / 2**20)
            )
        await asyncio.sleep(WEIGH_EVERY_S)


def _redis_bytes(url: str) -> int | None:
    try:
        with closing(redis.Redis.from_url(url, socket_timeout=2.0)) as client:
            return int(client.info("memory")["used_memory"])
    except redis.RedisError:
        return None


def _disk_bytes(folder: Path) -> int:
    total = 0
    for parent, _folders, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One thing's weight in the second and in the last quarter of the soak, medians."""

    what: str
    unit: str
    before: float
    after: float

    @property
    def is_growth(self) -> bool:
        """Whether it grew by more than what comes and goes."""
        return self.after > self.before * GROWTH_FACTOR and self.after - self.before > GROWTH_FLOOR[self.unit]


def growths(watch: Watch) -> list[Growth]:
    """What was weighed, by what and unit. The first quarter is left out: caches and retained steps fill up in it."""
    found = []
    for (what, unit), series in sorted(watch.weights.items()):
        begin_s, end_s = series[0][0], series[-1][0]
        quarter_s = (end_s - begin_s) / 4
        before = _amounts(series, begin_s + quarter_s, begin_s + 2 * quarter_s)
        after = _amounts(series, end_s - quarter_s, end_s)
        if before and after:
            found.append(Growth(what=what, unit=unit, before=median(before), after=median(after)))
    return found


def _amounts(series: Sequence[tuple[float, float]], from_s: float, to_s: float) -> list[float]:
    return [amount for at_s, amount in series if from_s <= at_s <= to_s]

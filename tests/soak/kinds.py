"""Faults of the soak: what can be broken, each with its undoing. The failures that docs/operating.md lists, and more.

Not here, because this fleet has none: machines of a plan, a Redis master with replicas, a trainer of several processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import redis

from tests.helpers.processes import children_of
from tests.helpers.proxies.tcp_proxy import TcpProxy
from tests.soak.fleet import NUM_BROKERS, Fleet

Inflict = Callable[[Fleet, random.Random], Awaitable[str]]
"""Breaks something, mends it, and says what it was."""
KILLED = ("broker-0", "broker-1", "generator-0", "generator-1", "reward-0", "reward-1", "judge", "scheduler")
DRAINED = ("broker-0", "broker-1", "generator-0", "generator-1", "reward-0", "reward-1", "scheduler")
LINKS = ("redis-0-link", "redis-1-link", "broker-0-link", "broker-1-link", "trainer-link", "weights-link")
SLOW_BYTES_PER_SECOND = 300_000.0
SLOW_DELAY_S = 0.05
FULL_DISK_S = 10.0
FILL_BYTES = 64 * 1024
ZOMBIE_STEPS_S = 300.0
FENCED_S = 120.0


def _killed(name: str) -> Inflict:
    async def inflict(fleet: Fleet, rng: random.Random) -> str:
        away_s = rng.uniform(0.0, 5.0)
        fleet.members[name].kill(away_s=away_s)
        await asyncio.sleep(away_s)
        return f"kill -9, away {away_s:.1f} s"

    return inflict


def _drained(name: str) -> Inflict:
    async def inflict(fleet: Fleet, _rng: random.Random) -> str:
        fleet.members[name].terminate()
        return "SIGTERM"

    return inflict


def _paused(name: str, most_s: float) -> Inflict:
    async def inflict(fleet: Fleet, rng: random.Random) -> str:
        pause_s = rng.uniform(5.0, most_s)
        fleet.members[name].send(signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        fleet.members[name].send(signal.SIGCONT)
        return f"SIGSTOP for {pause_s:.0f} s"

    return inflict


def _engine(number: signal.Signals, pause_s: float) -> Inflict:
    async def inflict(fleet: Fleet, rng: random.Random) -> str:
        pid = fleet.members[f"generator-{rng.randrange(2)}"].pid
        engines = [] if pid is None else [child for child in children_of(pid) if "EngineCor" in _comm(child)]
        for engine in engines:
            with suppress(ProcessLookupError):
                os.kill(engine, number)
        await asyncio.sleep(pause_s)
        for engine in engines if number == signal.SIGSTOP else ():
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)
        return f"{number.name} of {len(engines)} engine processes"

    return inflict


def _comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


async def _trainer_killed(fleet: Fleet, rng: random.Random) -> str:
    away_s = rng.uniform(0.0, 10.0)
    fleet.trainer.kill(away_s=away_s)
    await asyncio.sleep(away_s)
    return f"kill -9, away {away_s:.1f} s"


async def _trainer_drained(fleet: Fleet, _rng: random.Random) -> str:
    fleet.trainer.terminate()
    return "SIGTERM"


async def _trainer_paused(fleet: Fleet, rng: random.Random) -> str:
    pause_s = rng.uniform(5.0, 40.0)
    trainer = fleet.trainer
    trainer.send(signal.SIGSTOP)
    await asyncio.sleep(pause_s)
    trainer.send(signal.SIGCONT)
    return f"SIGSTOP for {pause_s:.0f} s"


async def _zombie_trainer(fleet: Fleet, _rng: random.Random) -> str:
    """A trainer stops, another takes the run over and takes a step, the old one wakes up: it must end its run."""
    old = fleet.trainer
    old.send(signal.SIGSTOP)
    fleet.add_trainer()
    try:
        await fleet.start_run(resume=True)
        began = await fleet.get_trainer()
        deadline_s = asyncio.get_running_loop().time() + ZOMBIE_STEPS_S
        while began is None or (now := await fleet.get_trainer()) is None or now.policy_version <= began.policy_version:
            if asyncio.get_running_loop().time() > deadline_s:
                raise TimeoutError(f"the successor took no step in {ZOMBIE_STEPS_S:.0f} s")
            began = began or await fleet.get_trainer()
            await asyncio.sleep(1.0)
        seen = _log_size(fleet, old.name)
        old.send(signal.SIGCONT)
        async with asyncio.timeout(FENCED_S):
            while "fenced" not in _log_after(fleet, old.name, seen).lower():  # noqa: ASYNC110 - a file tells no one
                await asyncio.sleep(0.5)
    finally:
        old.send(signal.SIGCONT)
        old.retire()
    return "SIGSTOP, another trainer took over, SIGCONT: fenced"


def _log_size(fleet: Fleet, name: str) -> int:
    return (fleet.folder / "logs" / f"{name}.log").stat().st_size


def _log_after(fleet: Fleet, name: str, offset: int) -> str:
    with (fleet.folder / "logs" / f"{name}.log").open("rb") as log:
        log.seek(offset)
        return log.read().decode(errors="replace")


async def _redis_killed(fleet: Fleet, rng: random.Random) -> str:
    away_s = rng.uniform(1.0, 20.0)
    fleet.redis.kill()
    await asyncio.sleep(away_s)
    fleet.restart_redis()
    return f"kill -9, away {away_s:.0f} s"


async def _redis_lost_tail(fleet: Fleet, rng: random.Random) -> str:
    """What `everysec` may lose: the end of the append-only file."""
    fleet.redis.kill()
    files = [path for path in fleet.redis.folder.rglob("*.aof") if path.stat().st_size]
    newest = max(files, key=lambda path: path.stat().st_mtime)
    lost_bytes = min(newest.stat().st_size // 2, rng.randrange(1_000, 200_000))
    with newest.open("r+b") as file:
        file.truncate(newest.stat().st_size - lost_bytes)
    fleet.restart_redis()
    return f"kill -9, the last {lost_bytes} bytes of its file lost"


async def _redis_paused(fleet: Fleet, rng: random.Random) -> str:
    pause_s = rng.uniform(3.0, 20.0)
    fleet.redis.pause()
    await asyncio.sleep(pause_s)
    fleet.redis.resume()
    return f"SIGSTOP for {pause_s:.0f} s"


def _redis_setting(key: str, value: str, usual: str) -> Inflict:
    async def inflict(fleet: Fleet, rng: random.Random) -> str:
        lasts_s = rng.uniform(5.0, 15.0)
        await _redis_call(fleet, "CONFIG", "SET", key, value)
        await asyncio.sleep(lasts_s)
        await _redis_call(fleet, "CONFIG", "SET", key, usual)
        return f"{key} {value} for {lasts_s:.0f} s"

    return inflict


def _redis_command(*parts: str) -> Inflict:
    async def inflict(fleet: Fleet, _rng: random.Random) -> str:
        await _redis_call(fleet, *parts)
        return " ".join(parts)

    return inflict


async def _redis_call(fleet: Fleet, *parts: str) -> None:
    def call() -> None:
        with closing(redis.Redis.from_url(fleet.redis.url, socket_timeout=10.0)) as client:
            client.execute_command(*parts)  # type: ignore[no-untyped-call]

    for _ in range(60):
        try:
            await asyncio.to_thread(call)
            break
        except redis.RedisError:
            # Another fault may have it: loading, or gone. What was set must be set back.
            await asyncio.sleep(1.0)


async def _redis_disk_full(fleet: Fleet, _rng: random.Random) -> str:
    """Fills the small disk that Redis writes to, where the soak could mount one."""
    filler = fleet.redis.folder / "filler"
    size = await asyncio.to_thread(_fill, filler)
    await asyncio.sleep(FULL_DISK_S)
    filler.unlink()
    return f"disk full for {FULL_DISK_S:.0f} s, of {size / 2**20:.0f} MiB"


def _fill(filler: Path) -> int:
    """Write until nothing more is taken; returns how much that was."""
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(FILL_BYTES))
    return filler.stat().st_size


def _cut(name: str) -> Inflict:
    async def inflict(fleet: Fleet, _rng: random.Random) -> str:
        fleet.links[name].cut()
        return "every connection reset"

    return inflict


def _refused(name: str) -> Inflict:
    async def inflict(fleet: Fleet, rng: random.Random) -> str:
        lasts_s = rng.uniform(1.0, 15.0)
        async with _mended(fleet.links[name]) as link:
            link.is_refusing = True
            link.cut()
            await asyncio.sleep(lasts_s)
        return f"away for {lasts_s:.0f} s"

    return inflict


def _slow(name: str) -> Inflict:
    async def inflict(fleet: Fleet, rng: random.Random) -> str:
        lasts_s = rng.uniform(5.0, 20.0)
        async with _mended(fleet.links[name]) as link:
            link.delay_s, link.bytes_per_second = SLOW_DELAY_S, SLOW_BYTES_PER_SECOND
            await asyncio.sleep(lasts_s)
        return f"slow for {lasts_s:.0f} s"

    return inflict


def _flipped(name: str) -> Inflict:
    async def inflict(fleet: Fleet, rng: random.Random) -> str:
        lasts_s = rng.uniform(5.0, 15.0)
        async with _mended(fleet.links[name]) as link:
            link.flips_bits = True
            await asyncio.sleep(lasts_s)
        return f"bits flipped for {lasts_s:.0f} s"

    return inflict


@asynccontextmanager
async def _mended(link: TcpProxy) -> AsyncIterator[TcpProxy]:
    try:
        yield link
    finally:
        link.heal()


async def _clock_jumped(fleet: Fleet, rng: random.Random) -> str:
    index, by_s = rng.randrange(NUM_BROKERS), rng.choice((60.0, -60.0, 3600.0, -3600.0))
    fleet.jump_clock(index, by_s)
    return f"broker-{index}'s wall clock jumped by {by_s:+.0f} s, to {fleet.clock_offsets_s[index]:+.0f} s"


def every_kind(*, can_fill_disk: bool) -> dict[str, tuple[str, Inflict]]:
    """Every fault by name: what it breaks (one fault at a time each), and how."""
    kinds: dict[str, tuple[str, Inflict]] = {}
    for name in KILLED:
        kinds[f"kill {name}"] = name, _killed(name)
        kinds[f"pause {name}"] = name, _paused(name, 40.0)
    for name in DRAINED:
        kinds[f"drain {name}"] = name, _drained(name)
    for name in LINKS:
        kinds |= {f"cut {name}": (name, _cut(name)), f"refuse {name}": (name, _refused(name))}
        kinds[f"slow {name}"] = name, _slow(name)
    kinds |= {
        "kill engine": ("engine", _engine(signal.SIGKILL, 0.0)),
        "pause engine": ("engine", _engine(signal.SIGSTOP, 20.0)),
        "kill trainer": ("trainer", _trainer_killed),
        "drain trainer": ("trainer", _trainer_drained),
        "pause trainer": ("trainer", _trainer_paused),
        "zombie trainer": ("trainer", _zombie_trainer),
        "kill redis": ("redis", _redis_killed),
        "redis loses its tail": ("redis", _redis_lost_tail),
        "pause redis": ("redis", _redis_paused),
        "redis read-only": ("redis", _redis_setting("min-replicas-to-write", "1", "0")),
        "redis out of memory": ("redis", _redis_setting("maxmemory", "1", "0")),
        "redis drops clients": ("redis", _redis_command("CLIENT", "KILL", "TYPE", "normal")),
        "redis forgets scripts": ("redis", _redis_command("SCRIPT", "FLUSH")),
        "corrupt weights-link": ("weights-link", _flipped("weights-link")),
        "clock jumps": ("clock", _clock_jumped),
    }
    if can_fill_disk:
        kinds["redis disk full"] = "redis", _redis_disk_full
    return kinds

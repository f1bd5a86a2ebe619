"""`make soak`: the quick start's task for a stated time, under random faults of every kind; ends with what held.

    make soak ARGS="--minutes 60 --seed 7"

Exit status 0 when the audit balanced whenever it was looked at, no sample passed the staleness bound or was trained on
twice, every fenced trainer ended, the run went on to the end, nothing was left behind, and nothing grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from console.run.quick import Task, prepare_task
from penstock.clients.broker import BrokerClient
from penstock.errors import PenstockError
from penstock.v1 import trainer_pb2
from tests.soak.fleet import RUN_ID, Fleet, orphans
from tests.soak.kinds import Inflict, every_kind
from tests.soak.watch import Watch, growths, look, weigh

MAX_STALENESS = 1
FIRST_STEP_S = 900.0
STOP_S = 300.0
GONE_S = 15.0
REDIS_DISK_MIB = 1024
MAX_LOST_FRACTION = 0.02
"""Samples whose leases may fail again and again, of those submitted; a clock that counted would lose many more."""
_OVER = (trainer_pb2.TRAINER_STATE_FINISHED, trainer_pb2.TRAINER_STATE_FAILED, trainer_pb2.TRAINER_STATE_IDLE)


def main() -> None:
    """Command line."""
    arguments = _arguments()
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="penstock-soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    disk = _mounted(folder / "redis")
    print(f"soak: seed {arguments.seed}, {arguments.minutes:g} minutes, {arguments.engine}, in {folder}", flush=True)
    try:
        task = prepare_task(Path("runs/quickstart").absolute(), seed=0)
        status = asyncio.run(soak(arguments, folder, task, can_fill_disk=disk is not None))
    except asyncio.CancelledError:
        print("soak: interrupted; everything is stopped", flush=True)
        status = 130
    finally:
        if disk is not None:
            subprocess.run(["umount", "-l", str(disk)], check=False)
    if arguments.folder is None and status == 0:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(status)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make soak ARGS=...", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long faults are made (60)")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) % 1_000_000, help="of the faults; the time's unless given"
    )
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm", help="the generators' (vllm)")
    parser.add_argument("--gap-s", type=float, default=20.0, help="mean time between two faults, seconds (20)")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument("--folder", type=Path, help="where everything is kept; a temporary one unless given")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    return parser.parse_args()


def _mounted(folder: Path) -> Path | None:
    """A small disk at `folder` that can be filled; None where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={REDIS_DISK_MIB}m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        is_mounted = False
    if not is_mounted:
        print("soak: no disk can be mounted here (needs root): Redis's disk is not filled", flush=True)
    return folder if is_mounted else None


async def soak(arguments: argparse.Namespace, folder: Path, task: Task, *, can_fill_disk: bool) -> int:
    """The whole soak; returns the exit status."""
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    kinds = {name: kind for name, kind in every_kind(can_fill_disk=can_fill_disk).items() if arguments.only in name}
    watch, counts = Watch(), Counter[str]()
    async with Fleet(folder, task, engine=arguments.engine, overrides=arguments.set) as fleet:
        await _until_first_step(fleet)
        print("soak: the first step is done; faults begin", flush=True)
        watch.last_step_s = time.monotonic()
        watchers = [asyncio.create_task(look(fleet, watch, max_staleness=MAX_STALENESS))]
        watchers.append(asyncio.create_task(weigh(fleet, watch)))
        await _break_things(fleet, watch, kinds, counts, arguments)
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await _end(fleet, watch)
        exits = {name: member.exits for name, member in fleet.members.items() if member.exits}
    await _until_gone(folder)
    for pid in orphans(folder):
        watch.note(f"process {pid} was left behind")
    _check_recording_of_steps(fleet, watch)
    return _report(watch, counts, kinds, exits, arguments)


async def _until_gone(folder: Path) -> None:
    """Children of what was killed notice it within seconds."""
    deadline_s = time.monotonic() + GONE_S
    while orphans(folder) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - they tell nobody
        await asyncio.sleep(0.5)


async def _until_first_step(fleet: Fleet) -> None:
    async with asyncio.timeout(FIRST_STEP_S):
        while (run := await fleet.get_run()) is None or run.policy_version < 1:  # noqa: ASYNC110 - a server tells it
            await asyncio.sleep(1.0)


async def _break_things(
    fleet: Fleet,
    watch: Watch,
    kinds: dict[str, tuple[str, Inflict]],
    counts: Counter[str],
    arguments: argparse.Namespace,
) -> None:
    """Every kind once in random order, then any, until time is up; one fault at a time on each target."""
    rng = random.Random(arguments.seed)
    names = sorted(kinds)
    first = rng.sample(names, len(names))
    turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
    began_s = time.monotonic()

    async def happen(name: str, seed: int) -> None:
        target, inflict = kinds[name]
        async with turns[target]:
            began = watch.policy_version
            try:
                what = await inflict(fleet, random.Random(seed))
            except (TimeoutError, OSError) as error:
                watch.note(f"{name}: {error or type(error).__name__}")
                return
            counts[name] += 1
            minutes = (time.monotonic() - began_s) / 60
            print(f"{minutes:6.1f} min  version {began:4d} > {watch.policy_version:4d}  {name}: {what}", flush=True)

    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() - began_s < arguments.minutes * 60:
            name = first.pop() if first else rng.choice(names)
            tasks.create_task(happen(name, rng.randrange(2**32)))
            await asyncio.sleep(rng.uniform(0.2, 1.8) * arguments.gap_s)


async def _end(fleet: Fleet, watch: Watch) -> None:
    """With everything mended: a further step, then the run is stopped, and its audit closed."""
    version = watch.policy_version
    deadline_s = time.monotonic() + STOP_S
    while (run := await fleet.get_run()) is None or run.policy_version <= version:
        if time.monotonic() > deadline_s:
            watch.note(f"no step after version {version} in {STOP_S:.0f} s with everything mended")
            break
        await asyncio.sleep(1.0)
    await fleet.stop_run()
    while (trainer := await fleet.get_trainer()) is None or trainer.state not in _OVER:
        if time.monotonic() > deadline_s + STOP_S:
            watch.note("the run did not stop")
            return
        await asyncio.sleep(1.0)
    async with BrokerClient(fleet.broker_addresses[0]) as client:
        try:
            await client.close_run(RUN_ID, drop_reason="soak_over")
            audit = await client.audit(RUN_ID)
        except PenstockError as error:
            watch.note(f"no audit at the end: {error}")
            return
    print(
        f"audit: submitted {audit.submitted}, trained {audit.trained}, dropped {dict(audit.dropped)}, "
        f"in flight {audit.in_flight}, staleness at most {audit.max_staleness_seen}, version {audit.policy_version}"
    )
    if audit.dropped["too_many_leases"] > MAX_LOST_FRACTION * audit.submitted:
        watch.note(f"{audit.dropped['too_many_leases']} samples were given up after too many leases")
    if not audit.balanced or audit.in_flight:
        watch.note("the audit does not balance at the end")
    trained = sum(line["step/samples"] for line in _steps(fleet))
    if trained != audit.trained:
        watch.note(f"metrics count {trained:.0f} trained samples, the audit {audit.trained}")


def _steps(fleet: Fleet) -> list[dict[str, float]]:
    return [json.loads(line) for line in fleet.run_folder.metrics.read_text().splitlines()]


def _check_recording_of_steps(fleet: Fleet, watch: Watch) -> None:
    versions = [int(line["policy_version"]) for line in _steps(fleet)]
    if versions != list(range(1, len(versions) + 1)):
        watch.note("metrics.jsonl does not hold every step once, in order")


def _report(
    watch: Watch,
    counts: Counter[str],
    kinds: dict[str, tuple[str, Inflict]],
    exits: dict[str, list[tuple[float, int]]],
    arguments: argparse.Namespace,
) -> int:
    """Print what was seen; returns the exit status."""
    print(f"faults: {counts.total()} of {len(counts)} kinds; not made: {sorted(set(kinds) - set(counts)) or 'none'}")
    print(f"looks: {watch.num_looks}, unanswered {watch.num_unanswered}; last version {watch.policy_version}")
    for name, ends in exits.items():
        print(f"exits of its own: {name}: {len(ends)}, statuses {sorted({status for _, status in ends})}")
    print(f"{'weight, medians':32} {'2nd quarter':>12} {'last quarter':>12}")
    for growth in growths(watch):
        row = f"{growth.what + ', ' + growth.unit:32} {growth.before:12.1f} {growth.after:12.1f}"
        print(f"{row}{'   GREW' if growth.is_growth else ''}")
        if growth.is_growth:
            watch.problems.append(f"{growth.what} grew from {growth.before:.1f} to {growth.after:.1f} {growth.unit}")
    print(f"seed {arguments.seed}: " + ("held" if not watch.problems else "DID NOT HOLD: " + "; ".join(watch.problems)))
    return 1 if watch.problems else 0


if __name__ == "__main__":
    main()

"""Measures what tracing costs a broker: the same run without it and with it, by turns, on brokers of one Redis.

penstock bench scale.tracing [--ratio 0.01] [--turns N] [--generators N] [--samples N] [--tokens N] [--json]

A turn plays one run on each broker, in changing order: emulated generators lease all samples, stream tokens under them
and end them; a reward worker scores them and a trainer takes them. Counted is the CPU time of the broker's process, its
writing thread included, and the rate at which samples pass where nothing but the broker holds them back: being leased,
and from their ends to the last acknowledgement. Reported are medians over the turns of each side, and of the ratios
within a turn, with their quartiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.broker.processes import Worker
from benchmarks.command import Progress, Result, measure, print_table, short
from benchmarks.scale.emulated_run import (
    EmulatedRun,
    Load,
    Phase,
    Scene,
    Served,
    emulated_run,
    make_scene,
    start_served,
)
from console.launch.embedded_redis import redis_executable
from penstock.tracing.settings import FOLDER_VARIABLE, RATIO_VARIABLE
from penstock.tracing.trace_file import trace_files

OFF, ON = "off", "on"


@contextmanager
def _told(variables: dict[str, str]) -> Iterator[None]:
    """Processes started inside have these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def measure_turns(
    load: Load, *, ratio: float, num_turns: int, num_tokens: int, num_processes: int, progress: Progress
) -> Result:
    """The costs of both sides."""
    async with make_scene(redis_executable()) as scene:
        folder = scene.stage.folder
        with _told({FOLDER_VARIABLE: str(folder), RATIO_VARIABLE: str(ratio)}):
            brokers = {OFF: scene.broker, ON: await start_served(scene.stage)}
        workers = [await scene.stage.start_worker() for _ in range(num_processes)]
        trainer = await scene.stage.start_worker()
        found: dict[str, list[tuple[float, float]]] = {OFF: [], ON: []}
        # The first turn warms both up.
        for turn in range(num_turns + 1):
            for side in (OFF, ON) if turn % 2 else (ON, OFF):
                progress(f"tracing: turn {turn} of {num_turns}, {side}")
                costs = await _play(
                    scene, brokers[side], (workers, trainer), load, run_id=f"{side}-{turn}", num_tokens=num_tokens
                )
                if turn:
                    found[side].append(costs)
        written = [path.read_bytes() for path in trace_files(folder)]
    return _result(found, num_samples=load.num_samples, written=written)


async def _play(
    scene: Scene, broker: Served, workers: tuple[list[Worker], Worker], load: Load, *, run_id: str, num_tokens: int
) -> tuple[float, float]:
    """CPU seconds of the broker and samples a second of one run."""
    async with emulated_run(scene.stage, [broker], workers[0], load, run_id=run_id) as run:
        leased, streamed, finished = await _phases(run, workers[1], num_tokens)
        await run.leave()
    # Tokens come at a set pace, leases and ends as fast as the broker can.
    rate = load.num_samples / (leased.took_s + finished.took_s)
    return leased.brokers_s + streamed.brokers_s + finished.brokers_s, rate


async def _phases(run: EmulatedRun, trainer: Worker, num_tokens: int) -> Sequence[Phase]:
    return [await run.lease(), await run.stream(num_tokens), await run.finish(trainer, over_s=0.0)]


def _result(found: dict[str, list[tuple[float, float]]], *, num_samples: int, written: Sequence[bytes]) -> Result:
    off, on = found[OFF], found[ON]
    cpu = [with_[0] / without[0] - 1 for without, with_ in zip(off, on, strict=True)]
    rate = [1 - with_[1] / without[1] for without, with_ in zip(off, on, strict=True)]
    return {
        "turns": len(off),
        "samples_per_run": num_samples,
        "broker_cpu_ms_per_sample_off": 1e3 * statistics.median(cpu_s for cpu_s, _ in off) / num_samples,
        "broker_cpu_ms_per_sample_on": 1e3 * statistics.median(cpu_s for cpu_s, _ in on) / num_samples,
        "samples_per_s_off": statistics.median(rate for _, rate in off),
        "samples_per_s_on": statistics.median(rate for _, rate in on),
        "more_broker_cpu": _spread(cpu),
        "fewer_samples_per_s": _spread(rate),
        "bytes_written": sum(map(len, written)),
        "lines_written": sum(part.count(b"\n") for part in written),
        "load_average": os.getloadavg()[0],
    }


def _spread(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "quartile_1": low, "quartile_3": high}


def _show(result: Result) -> None:
    rows = [(name, short(value)) for name, value in result.items() if not isinstance(value, dict)]
    shares = [
        (name, f"{value['median']:+.2%} ({value['quartile_1']:+.2%} to {value['quartile_3']:+.2%})")
        for name, value in result.items()
        if isinstance(value, dict)
    ]
    print_table("what tracing costs a broker", ("", "value"), (rows, shares))


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.01, help="share of groups that are sampled")
    parser.add_argument("--turns", type=int, default=11, help="runs of each side")
    parser.add_argument("--generators", type=int, default=32)
    parser.add_argument("--samples", type=int, default=32, help="of each generator")
    parser.add_argument("--tokens", type=int, default=64, help="of each of a sample's chunks, of which it has 4")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    load = Load(num_generators=options.generators, samples_each=options.samples, period_s=0.25, num_periods=4)
    return measure(
        lambda progress: measure_turns(
            load,
            ratio=options.ratio,
            num_turns=options.turns,
            num_tokens=options.tokens,
            num_processes=2,
            progress=progress,
        ),
        _show,
        is_json=options.json,
    )


if __name__ == "__main__":
    raise SystemExit(main())

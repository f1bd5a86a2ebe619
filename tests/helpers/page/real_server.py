"""The page's real server over run folders, in a thread of its own, for as long as a test looks at it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from console.page.run_data import RunData
from console.page.server import serving_page
from penstock.security import NO_SECURITY
from tests.helpers.brokers.recordings import recorded
from tests.helpers.page.answers import HOSTILE
from tests.helpers.page.run_folders import page_folder, trace_line, write_recording

START_S = 30.0


@contextmanager
def real_page(runs: Sequence[RunData], *, is_live: bool = False) -> Iterator[str]:
    """The page's link."""
    loop = asyncio.new_event_loop()
    link: Future[str] = Future()
    end = asyncio.Event()

    async def serve() -> None:
        try:
            async with serving_page(
                runs, "127.0.0.1:0", security=NO_SECURITY, setting="--listen", is_live=is_live
            ) as address:
                link.set_result(address)
                await end.wait()
        except BaseException as error:
            if not link.done():
                link.set_exception(error)
            raise

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield link.result(timeout=START_S)
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()


def told_run(path: Path, *, num_steps: int = 3) -> RunData:
    """A run that has something for each view: metrics, a recording with hostile text, traces, a log with an error."""
    folder = page_folder(path, num_steps=num_steps)
    samples = []
    for version in range(1, num_steps + 1):
        sample = recorded(f"g{version}", version=version)
        sample.trajectory.text = f"{HOSTILE} in step {version}"
        samples.append(sample)
    write_recording(path / "trajectories.jsonl", samples)
    (path / "traces.jsonl").write_text(_traces(num_steps))
    (path / "logs").mkdir(exist_ok=True)
    (path / "logs" / "generator-0.log").write_text(
        f"2023-11-14T22:13:25.000000Z [error    ] engine failed {HOSTILE!r} service=generator-0\n"
    )
    return RunData(folder)


def _traces(num_steps: int) -> str:
    lines = []
    for step in range(num_steps):
        at, key = 10.0 * step, {"rl.sample.key": f"g{step + 1}/0"}
        version = {"rl.policy.version": step + 1}
        lines += [
            trace_line(
                "generator",
                "generator-0",
                {"name": "rl.generator.decode", "start": at, "end": at + 6},
                {"name": "rl.weights.update", "start": at + 6, "end": at + 7, "attributes": version},
                {
                    "name": "rl.sample.generate",
                    "start": at + 1,
                    "end": at + 5,
                    "attributes": key,
                    "events": [(at + 2, "chunk", {"rl.tokens": 3} | version)],
                },
            ),
            trace_line(
                "trainer",
                "trainer",
                {
                    "name": "rl.train.wait",
                    "start": at,
                    "end": at + 6,
                    "parent": f"s{step}",
                    "attributes": {"rl.waits_for": "samples"},
                },
                {"name": "rl.train.compute", "start": at + 6, "end": at + 9, "parent": f"s{step}"},
                {"name": "rl.train.step", "start": at, "end": at + 10, "id": f"s{step}", "attributes": version},
            ),
        ]
    return "".join(lines)

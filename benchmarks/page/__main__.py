"""Measure the live page: `penstock bench page`.

penstock bench page [--gigabytes 2] [--task runs/quickstart/current] [--json] [--quick]

First `penstock view` over a made run of 10,000 steps, with a recording of that size and traces of a quarter of it, in
Debian's Chromium: first paint (less than 1 s is wanted), memory of the page's scripts (less than 60 MB), memory of the
server, and how long it reads. With `--task`, the output of `penstock quickstart`, then a run that nobody looks at, that
ten HTTP viewers and that ten windows of Chromium look at, in turn: the rate of samples, how long answers took, how many
were refused.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.children import child, environment, tail
from benchmarks.command import Progress, Result, measure, print_table, short, suite_parser
from benchmarks.page import viewers
from benchmarks.page.made_run import make_run
from benchmarks.resident import peak_mb, resident_mb
from benchmarks.scratch import scratch_folder
from console.config.run_folder import RunFolder
from penstock.config import ConfigError
from services.trainer.reporting.metrics import JsonLines
from tests.helpers.page.browser import Browser, missing_browser, running_browser

NUM_VIEWERS = 10
START_S, READ_S = 180.0, 900.0
WARM_STEPS = 6
WINDOW_S = 45.0
PHASES = ("alone", "http", "alone", "chromium", "alone")


@asynccontextmanager
async def serving(folder: Path, *command: str) -> AsyncIterator[tuple[str, int]]:
    """A `penstock` command that serves a page: the page's link, and its process."""
    # One for each: the link of the one before would be taken for this one's.
    log = folder / f"{command[0]}.log"
    async with child(
        sys.executable, "-P", "-m", "console", *command, log=log, env=environment(num_threads=1)
    ) as process:
        deadline_s = time.monotonic() + START_S
        while not (links := [line for line in log.read_text().splitlines() if line.startswith("page: ")]):
            if process.returncode is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"no page:\n{tail(log)}")
            await asyncio.sleep(0.1)
        yield links[0].removeprefix("page: "), process.pid


async def recorded(folder: Path, gigabytes: float, progress: Progress) -> Result:
    """The page over a made run."""
    run = RunFolder(folder / "made")
    await asyncio.to_thread(make_run, run, gigabytes * 1e9)
    progress(f"a run with a recording of {gigabytes:g} GB is made")
    async with serving(folder, "view", str(run.path)) as (link, pid):
        at_start_mb = resident_mb(pid)
        with running_browser() as browser:
            seen = await asyncio.to_thread(_look, browser, link, progress)
        return {"server_at_start_mb": at_start_mb, "server_peak_mb": peak_mb(pid), **seen}


def _look(browser: Browser, link: str, progress: Progress) -> Result:
    browser.resize(1280)
    began_s = time.monotonic()
    browser.driver.get(link)
    found: Result = {"first_paint_s": browser.first_paint_s()}
    browser.go("samples")
    browser.until(lambda: browser.all(".sample-list p, .sample-list li"))
    found["says_that_it_reads"] = browser.is_reading()
    for view in ("samples", "time"):
        browser.go(view)
        _await_view(browser, view)
        viewers.seconds_until(lambda: not browser.is_reading(), READ_S)
        found[f"{view}_read_after_s"] = time.monotonic() - began_s
        progress(f"{view} are read after {found[f'{view}_read_after_s']:.1f} s")
    for view in viewers.VIEWS:
        browser.go(view)
        _await_view(browser, view)
        found[f"heap_mb/{view}"] = browser.heap_bytes() / 1e6
    return found


def _await_view(browser: Browser, view: str) -> None:
    browser.until(lambda: browser.js("return document.querySelectorAll(arguments[0]).length > 5", f".view.{view} *"))


async def busy(folder: Path, task: Path, window_s: float, progress: Progress) -> Result:
    """A run that trains the quick start's model, looked at in turn."""
    config = folder / "busy.yaml"
    config.write_text(yaml.safe_dump(_document(folder, task)), encoding="utf-8")
    lines = JsonLines(folder / "busy" / "metrics.jsonl")
    rates: list[float] = []
    found: Result = {}
    async with serving(folder, "run", str(config)) as (link, _):
        await asyncio.to_thread(viewers.seconds_until, lambda: len(lines.read()) >= WARM_STEPS, START_S)
        with running_browser() as browser:
            for phase in PHASES:
                begin = lines.read()[-1]
                if phase == "http":
                    found["http"] = (await viewers.ask_for(link, NUM_VIEWERS, window_s)).told()
                elif phase == "chromium":
                    visible = await asyncio.to_thread(viewers.open_windows, browser, link, NUM_VIEWERS)
                    begin = lines.read()[-1]
                    await asyncio.sleep(window_s)
                    answered = await asyncio.to_thread(viewers.answers_in_windows, browser)
                    found["chromium"] = {"visible": visible, **answered.told()}
                    await asyncio.to_thread(viewers.close_windows, browser)
                else:
                    await asyncio.sleep(window_s)
                rates.append(await asyncio.to_thread(_rate_since, lines, begin["time"]))
                progress(f"{phase}: {rates[-1]:.1f} samples/s")
    for index, phase in enumerate(PHASES):
        if phase != "alone":
            found[phase]["rate_share"] = 2 * rates[index] / (rates[index - 1] + rates[index + 1])
    return {"samples_per_second": rates[0], **found}


def _rate_since(lines: JsonLines, begin_s: float) -> float:
    """Samples a second of the steps since, once there is one: on a busy machine it may outlast the window."""
    viewers.seconds_until(lambda: lines.read()[-1]["time"] > begin_s, START_S)
    trained = [line for line in lines.read() if line["time"] > begin_s]
    return float(sum(line["step/samples"] for line in trained) / (trained[-1]["time"] - begin_s))


def _document(folder: Path, task: Path) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder), "id": "busy", "num_steps": 100_000, "eval_every_steps": 0, "num_eval_prompts": 1},
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {"train": str(task / "train.jsonl"), "eval": str(task / "eval.jsonl"), "max_prompt_tokens": 128},
        "sampling": {"max_new_tokens": 64},
        "algorithm": {"group_size": 8, "prompts_per_step": 8, "max_staleness": 1},
        "generator": {"engine": "transformers", "max_concurrent_samples": 64},
    }


async def run(gigabytes: float, task: Path | None, window_s: float, progress: Progress) -> Result:
    """Both parts. Raises ConfigError without a browser."""
    if (missing := missing_browser()) is not None:
        raise ConfigError(f"bench page: {missing}")
    with scratch_folder() as folder:
        found: Result = {"recorded": await recorded(folder, gigabytes, progress)}
        if task is not None:
            found["busy"] = await busy(folder, task, window_s, progress)
    return found


def show(result: Result) -> None:
    """Print a row for each number."""
    sections = []
    for part, numbers in result.items():
        flat = {
            f"{name}/{key}" if key else name: value
            for name, told in numbers.items()
            for key, value in (told.items() if isinstance(told, dict) else (("", told),))
        }
        sections.append([(part, name, short(value)) for name, value in flat.items()])
    print_table("The page", ("part", "measured", "value"), sections)


def main() -> int:
    """Entry point."""
    parser = suite_parser(__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the made recording (2)")
    parser.add_argument(
        "--task", type=Path, help="output of `penstock quickstart`, to be trained on: runs/quickstart/current"
    )
    options = parser.parse_args()
    gigabytes, window_s = (0.02, 5.0) if options.quick else (options.gigabytes, WINDOW_S)
    task = options.task and options.task.resolve()
    return measure(lambda progress: run(gigabytes, task, window_s, progress), show, is_json=options.json)


if __name__ == "__main__":
    sys.exit(main())

"""Looks at a page: Chromium, and viewers that ask as the page does without drawing anything."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from tests.helpers.page.browser import Browser

ASK_EVERY_S = 3.0
VIEWS = ("learning", "samples", "time", "problems", "cost", "weights")
QUESTIONS = ("runs", "series?run=0&points=600", "samples?run=0", "lanes?run=0", "problems?run=0", "cost?run=0")
_DRAWN = "return document.documentElement.dataset.ready === 'yes'"
_ANSWERS = """
  const entries = performance.getEntriesByType("resource").filter((each) => each.name.includes("/api/"));
  performance.clearResourceTimings();
  return entries.map((each) => [each.duration / 1000, each.responseStatus]);
"""


@dataclass(slots=True)
class Answered:
    """What viewers were answered."""

    times_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    """Not answered with 200."""

    def add(self, took_s: float, status: int) -> None:
        """One more answer."""
        self.times_s.append(took_s)
        self.num_refused += status != 200

    def told(self) -> dict[str, Any]:
        """Their number, times and refusals."""
        ranked = sorted(self.times_s) or [float("nan")]
        return {
            "answers": len(self.times_s),
            "median_s": ranked[len(ranked) // 2],
            "p99_s": ranked[int(0.99 * (len(ranked) - 1))],
            "refused": self.num_refused,
        }


async def ask_for(link: str, num_viewers: int, window_s: float) -> Answered:
    """So many viewers, each of which asks all questions once in ASK_EVERY_S."""
    found = Answered()
    address, _, token = link.partition("/?token=")
    until_s = time.monotonic() + window_s

    async def view(number: int) -> None:
        await asyncio.sleep(ASK_EVERY_S * number / num_viewers)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
            while time.monotonic() < until_s:
                turn_s = time.monotonic()
                for question in QUESTIONS:
                    begin_s = time.monotonic()
                    async with session.get(f"{address}/api/{question}") as answer:
                        await answer.read()
                    found.add(time.monotonic() - begin_s, answer.status)
                await asyncio.sleep(max(0.0, turn_s + ASK_EVERY_S - time.monotonic()))

    await asyncio.gather(*(view(number) for number in range(num_viewers)))
    return found


def open_windows(browser: Browser, link: str, num: int) -> int:
    """Open a view of the page in each of so many windows; returns how many of them are visible."""
    browser.driver.get(link)
    address = "{0.scheme}://{0.netloc}/".format(urlsplit(link))
    for view in itertools.islice(itertools.cycle(VIEWS), num):
        browser.driver.switch_to.new_window("window")
        browser.driver.get(f"{address}#/{view}")
        browser.until(lambda: browser.js(_DRAWN))
    return sum(not each for each in _in_windows(browser, "return document.hidden"))


def answers_in_windows(browser: Browser) -> Answered:
    """What the windows were answered since the last call."""
    found = Answered()
    for took_s, status in itertools.chain.from_iterable(_in_windows(browser, _ANSWERS)):
        found.add(took_s, status)
    return found


def close_windows(browser: Browser) -> None:
    """Close them again."""
    first, *others = browser.driver.window_handles
    for handle in others:
        browser.driver.switch_to.window(handle)
        browser.driver.close()
    browser.driver.switch_to.window(first)
    browser.driver.get("about:blank")


def _in_windows(browser: Browser, script: str) -> list[Any]:
    found = []
    for handle in browser.driver.window_handles[1:]:
        browser.driver.switch_to.window(handle)
        found.append(browser.js(script))
    return found


def seconds_until(holds: Callable[[], bool], timeout_s: float) -> float:
    """How long it takes until it holds. Raises TimeoutError."""
    begin_s = time.monotonic()
    while not holds():
        if time.monotonic() > begin_s + timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.2)
    return time.monotonic() - begin_s

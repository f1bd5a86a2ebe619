"""The page as its real server serves it, in Debian's Chromium: runs that ended, and one that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.page.browser import Browser, missing_browser, running_browser
from tests.helpers.page.real_server import real_page, told_run
from tests.helpers.page.run_folders import metrics_line

pytestmark = pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser()))

VIEWS = {
    "learning": "Reward",
    "samples": "1 to 1 of 1",
    "samples?key=g3%2F0&at=3": "Its life",
    "time": "waiting for samples",
    "time?sample=g3%2F0&at=3": "chunk",
    "problems": "engine failed",
    "cost": "Measured over the newest steps",
    "weights": "Published versions",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of the file."""
    with running_browser() as started:
        started.resize(1280)
        yield started


def test_every_view_of_runs_that_ended_and_go_on(browser: Browser, tmp_path: Path) -> None:
    runs = [told_run(tmp_path / name) for name in ("a", "b")]
    for is_live in (False, True):
        with real_page(runs, is_live=is_live) as link:
            browser.driver.get(link)
            address = link.partition("/?token=")[0]
            assert browser.driver.current_url.startswith(f"{address}/"), "the token does not stay in the address"
            assert "token" not in browser.driver.current_url
            browser.open(f"{address}/#/learning")
            for view, text in VIEWS.items():
                browser.go(view)
                browser.until(lambda text=text: text in browser.text("main"))
            browser.go("samples?key=g3%2F0&at=3")
            browser.until(lambda: "onerror" in browser.text(".row .completion"))
            assert browser.js("return window.hurt") is None
            assert browser.complaints() == []


def test_steps_of_a_run_that_goes_on_appear(browser: Browser, tmp_path: Path) -> None:
    run = told_run(tmp_path / "live")
    with real_page([run], is_live=True) as link:
        browser.driver.get(link)
        browser.until(lambda: "step 3" in browser.text("header"))
        with run.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(metrics_line(4))

        def asked() -> bool:
            # The tab becomes visible: it asks at once.
            browser.js("document.dispatchEvent(new Event('visibilitychange'))")
            return "step 4" in browser.text("header")

        browser.until(asked)
        points = "return Chart.getChart(document.querySelector('.chart canvas')).data.datasets[0].data.length"
        # With the evaluation before the first step.
        browser.until(lambda: browser.js(points) == 5)
        assert browser.complaints() == []

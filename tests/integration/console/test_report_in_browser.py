"""report.html in Debian's Chromium, from the disk, without a server: the page with its data inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.page.report import write_report
from tests.helpers.page.browser import missing_browser, running_browser
from tests.helpers.page.real_server import told_run

pytestmark = pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser()))

VIEWS = {
    "learning": "Reward",
    "samples": "1 to 1 of 1",
    "samples?step=2&key=g2%2F0&at=2": "Its life",
    "samples?key=g1%2F0": "Its life",
    "time": "waiting for samples",
    "problems": "engine failed",
    "cost": "Measured over the newest steps",
    "weights": "Published versions",
}
X_TITLE = "return Chart.getChart(document.querySelector('.chart canvas'))?.options.scales.x.title.text"


def test_every_view_of_a_report_opens_from_the_disk(tmp_path: Path) -> None:
    run = told_run(tmp_path / "run")
    write_report(run.folder)
    with running_browser() as browser:
        for width in (1280, 400):
            browser.resize(width)
            browser.open(run.folder.report.as_uri())
            for view, text in VIEWS.items():
                browser.go(view)
                browser.until(lambda text=text: text in browser.text("main"))
                assert browser.js("return document.documentElement.scrollWidth") <= width, view
            browser.go("learning?x=tokens")
            browser.until(lambda: browser.js(X_TITLE) == "tokens trained")
            browser.go("samples?search=nothing+of+it")
            browser.until(lambda: "No sample of step 3" in browser.text("main"))
            browser.go("samples?key=g9%2F0&at=9")
            browser.until(lambda: "is not in this report" in browser.text(".notice.error"))
            assert browser.js("return window.hurt") is None
            assert browser.complaints() == []

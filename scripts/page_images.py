"""Take the pictures of docs/images: every view of the page, at two widths, in Debian's Chromium.

python -m scripts.page_images RUN_DIR [OTHER_RUN_DIR] [--out FOLDER]

The first run has something for every view if it was traced, recorded and priced: tracing.ratio=1 record=true and
`prices`. A second one stands beside it in the curves.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from urllib.parse import quote

from console.config.run_folder import RunFolder
from console.page.run_data import RunData
from tests.helpers.page.browser import Browser, missing_browser, running_browser
from tests.helpers.page.real_server import real_page

SIZES = {"wide": (1200, 780), "narrow": (400, 800)}
"""The usual window, and the narrowest that the page is made for."""
DRAWN = "return document.querySelectorAll(arguments[0]).length"
MOVING = "return document.getAnimations().length"
VIEWS = ("learning", "samples", "time", "problems", "cost", "weights")
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def _open_longest(browser: Browser) -> None:
    """Show the newest step's longest sample, its tokens coloured by how trainer and engine differ."""
    browser.go("samples?sort=longest")
    browser.until(lambda: _clicks_first(browser))
    browser.until(lambda: browser.all(".tokens"))
    browser.choose("Coloured by", "gap")


def _clicks_first(browser: Browser) -> bool:
    rows = browser.all(".row")
    if rows:
        rows[0].click()
    return bool(rows)


def _open_life(browser: Browser, sample: str) -> None:
    browser.go(f"time?{sample}")
    browser.until(lambda: "Share of the time" in browser.text("main") and not browser.is_reading())
    browser.button("Zoom to its life").click()
    browser.until(lambda: "from=" in browser.driver.current_url and not browser.is_reading())


def _is_drawn(browser: Browser, view: str) -> bool:
    return bool(browser.js(DRAWN, f".view.{view} *") > 5) and not browser.is_reading()


def take(browser: Browser, link: str, folder: Path) -> list[str]:
    """A picture of each view at each width: what the console complained of meanwhile."""
    complaints = []
    browser.open(link)
    # The server reads files when they are asked for: pictures of the other views have what is in them, too.
    browser.go("time")
    browser.until(lambda: "Share of the time" in browser.text("main") and not browser.is_reading())
    for size, (width, height) in SIZES.items():
        browser.resize(width, height)
        for view in VIEWS:
            browser.go(view)
            browser.until(partial(_is_drawn, browser, view))
            if view == "samples":
                _open_longest(browser)
                key, step = browser.until(lambda: browser.text(".sample-detail h2")).split(" step ")
            elif view == "time":
                _open_life(browser, f"sample={quote(key, safe='')}&at={step}")
            browser.until(lambda: not browser.js(MOVING))
            browser.js("scrollTo(0, 0)")
            browser.driver.save_screenshot(str(folder / f"page_{view}_{size}.png"))
            complaints += browser.complaints()
    return complaints


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="FOLDER")
    options = parser.parse_args()
    if (missing := missing_browser()) is not None:
        print(missing, file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    runs = [RunData(RunFolder(path.resolve())) for path in options.runs]
    with real_page(runs) as link, running_browser() as browser:
        complaints = take(browser, link, options.out)
    for line in complaints:
        print(f"console: {line}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())

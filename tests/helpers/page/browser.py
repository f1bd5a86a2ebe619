"""Debian's Chromium without a window, driven by Selenium, and what the tests ask it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import ElementNotInteractableException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

WAIT_S = 20.0
_WATCH_POLICY = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`),
);
"""


def missing_browser() -> str | None:
    """Why there is no browser here; None if there is one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)}: install Debian's chromium and chromium-driver" if missing else None


class Browser:
    """A browser of one size at a time."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load `url` afresh and wait until its view is drawn."""
        self.driver.get("about:blank")
        self._console()
        self.driver.get(url)
        self.until(lambda: self.js("return document.documentElement.dataset.ready === 'yes'"))

    def go(self, view: str) -> None:
        """Follow a link to a view of the loaded page."""
        self.js("location.hash = arguments[0]", f"#/{view}")

    def resize(self, width: int, height: int = 900) -> None:
        """Give the page exactly this many CSS pixels."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def dark(self, is_dark: bool) -> None:
        """What `prefers-color-scheme` says."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def js(self, script: str, *arguments: Any) -> Any:
        """The result of a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        """Elements by CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Visible text of the first element that fits; empty if none does."""
        found = self.all(selector)
        return found[0].text if found else ""

    def is_reading(self) -> bool:
        """Whether the view says that the server has files left to read."""
        shown = self.text("main")
        return "being read" in shown or "read so far" in shown

    def until(self, holds: Callable[[], Any]) -> Any:
        """Wait for a condition, whose elements may be replaced meanwhile."""
        return WebDriverWait(
            self.driver,
            WAIT_S,
            poll_frequency=0.05,
            ignored_exceptions=[StaleElementReferenceException, ElementNotInteractableException],
        ).until(lambda _: holds())

    def field(self, label: str) -> WebElement:
        """The control with this label."""
        script = """
            const wanted = arguments[0];
            const labels = [...document.querySelectorAll("label")];
            const label = labels.find((each) => each.textContent.trim().startsWith(wanted));
            if (!label) return null;
            return label.htmlFor ? document.getElementById(label.htmlFor) : label.querySelector("select, input");
        """
        found: WebElement = self.until(lambda: self.js(script, label))
        return found

    def choose(self, label: str, value: str) -> None:
        """Set a select, as a person who picks an option."""
        Select(self.field(label)).select_by_value(value)

    def type(self, label: str, text: str) -> None:
        """Replace what a field holds, and press Enter."""

        def typed() -> bool:
            self.field(label).send_keys(Keys.CONTROL + "a", Keys.NULL, text, Keys.ENTER)
            return True

        self.until(typed)

    def press(self, *keys: str) -> None:
        """Keys, to whatever has the focus."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def button(self, text: str) -> WebElement:
        """The button with this text."""
        script = "return [...document.querySelectorAll('button')].find((each) => each.textContent === arguments[0])"
        found: WebElement = self.until(lambda: self.js(script, text))
        return found

    def drag(self, element: WebElement, from_px: int, to_px: int) -> None:
        """Drag over an element, from and to so many pixels right of its middle."""
        chain = ActionChains(self.driver).move_to_element_with_offset(element, from_px, 0).click_and_hold()
        chain.move_by_offset((to_px - from_px) // 2, 0).move_by_offset(
            (to_px - from_px + 1) // 2, 0
        ).release().perform()

    @contextmanager
    def script_before_pages(self, source: str) -> Iterator[None]:
        """Run a script in every page before its own."""
        added = self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)

    def _console(self) -> list[dict[str, Any]]:
        """What the console was told since the last call."""
        return self.driver.get_log("browser")  # type: ignore[no-any-return, no-untyped-call]

    def complaints(self) -> list[str]:
        """Errors and warnings of the console since the last call, and violations of the page's policy."""
        lines = [entry["message"] for entry in self._console() if entry["level"] in ("SEVERE", "WARNING")]
        return lines + list(self.js("return window.violations ?? []"))

    def heap_bytes(self) -> int:
        """Memory of the page's scripts after a collection: JavaScript's heap, the DOM's and array buffers."""
        self.driver.execute_cdp_cmd("HeapProfiler.enable", {})
        self.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        usage = self.driver.execute_cdp_cmd("Runtime.getHeapUsage", {})
        return int(usage["usedSize"] + usage.get("embedderHeapUsedSize", 0) + usage.get("backingStorageSize", 0))

    def first_paint_s(self) -> float:
        """From the start of navigation to the first contentful paint."""
        script = "return performance.getEntriesByName('first-contentful-paint').map((entry) => entry.startTime)"
        return float(self.until(lambda: self.js(script))[0]) / 1000


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A started browser; the sandbox is off only where root runs the tests, for whom Chromium has none."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    arguments = [
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--force-color-profile=srgb",
    ]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    for argument in arguments:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
    try:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH_POLICY})
        yield Browser(driver)
    finally:
        driver.quit()

"""The page in Debian's Chromium, against a server that invents runs: views, filters, keys, memory, hostile text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.helpers.page.answers import InventedRun
from tests.helpers.page.browser import Browser, missing_browser, running_browser
from tests.helpers.page.fixture_server import FixtureServer, served

pytestmark = pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser()))

WIDTHS = (1280, 400)
PAGE_WIDTH = "return document.documentElement.scrollWidth"
VIEWS = {
    "learning": "Held-out accuracy",
    "samples": "1 to 50 of 256",
    "samples?key=g100-0%2F2&at=100&against=99%3Ag99-0%2F2": "Struck through: only there",
    "time": "of decoding on generator-1",
    "time?sample=g100-0%2F0&at=100": "Without sample g100-0/0",
    "problems": "generator-0 was restarted",
    "cost": "Tokens a second 15,494.4 18,000 86.1 %",
    "weights": "Version by machine",
}
LONG_VIEWS = {
    "samples?key=g10000-0%2F3&at=10000": "Its life",
    "time": "Short spans are drawn together",
    "problems": "generator-0 was restarted",
    "cost": "One more L4 in waw",
    "weights": "and 101 earlier ones",
}
FIRST_PAINT_S, HEAP_BYTES = 1.0, 60e6
"""What the page promises for a run of 10,000 steps of 1,024 samples."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of the file, as wide as a laptop."""
    with running_browser() as started:
        started.resize(1280)
        yield started


@pytest.fixture(scope="module")
def recorded() -> Iterator[FixtureServer]:
    """Two runs that ended."""
    with served(FixtureServer([InventedRun(0), InventedRun(1)])) as server:
        yield server


@pytest.mark.parametrize(
    ("is_live", "width"),
    [
        (False, WIDTHS[0]),
        (True, WIDTHS[1]),
        pytest.param(False, WIDTHS[1], marks=pytest.mark.grid),
        pytest.param(True, WIDTHS[0], marks=pytest.mark.grid),
    ],
)
def test_every_view_draws_at_both_widths(browser: Browser, is_live: bool, width: int) -> None:
    run = InventedRun(steps=100, num_steps=200, state="running" if is_live else "finished")
    with served(FixtureServer([run], is_live=is_live)) as server:
        browser.resize(width)
        browser.dark(is_live)
        browser.open(f"{server.url}/")
        for view, text in VIEWS.items():
            browser.go(view)
            browser.until(lambda text=text: text in browser.text("main"))
            assert browser.js(PAGE_WIDTH) <= width, f"{view} is wider than {width} px"
        assert browser.js("return window.hurt") is None
        assert browser.complaints() == []
    browser.resize(1280)


def test_hostile_completions_are_text_and_nothing_else(browser: Browser, recorded: FixtureServer) -> None:
    browser.open(f"{recorded.url}/#/samples?key=g100-0%2F1&at=100")
    browser.until(lambda: "onerror" in browser.text(".tokens"))
    shown = browser.text(".sample-detail")
    for text in ("<img src=x onerror=", "<script>window.hurt=1</script>", "right <b>", "[U+001B][31m", "[U+0000]"):
        assert text in shown
    assert browser.all("main img, main script, main b") == []
    assert browser.js("return window.hurt") is None
    assert browser.complaints() == []


def test_charts_follow_axis_smoothing_runs_and_added_metrics(browser: Browser, recorded: FixtureServer) -> None:
    browser.open(f"{recorded.url}/#/learning")
    axis = "return Chart.getChart(document.querySelector('.chart canvas')).options.scales.x.title.text"
    num_lines = "return Chart.getChart(document.querySelector('.chart canvas')).data.datasets.length"
    assert browser.js(axis) == "step"
    assert browser.js(num_lines) == 2
    browser.choose("Against", "tokens")
    browser.until(lambda: browser.js(axis) == "tokens trained")
    assert any("x=tokens" in path for path in recorded.asked)
    browser.choose("Smoothing", "20")
    browser.until(lambda: "smooth=20" in browser.driver.current_url)
    browser.type("Another metric", "publish/bytes")
    captions = "return [...document.querySelectorAll('.chart figcaption span')].map((each) => each.textContent)"
    browser.until(lambda: "publish/bytes" in browser.js(captions))
    browser.all(".boxes input")[1].click()
    browser.until(lambda: browser.js(num_lines) == 1)
    browser.all(".chart .legend button")[0].click()
    browser.until(lambda: browser.js(num_lines) == 0)
    assert browser.complaints() == []


def test_a_drag_over_a_chart_asks_for_that_part_again(browser: Browser, recorded: FixtureServer) -> None:
    browser.open(f"{recorded.url}/#/learning")
    recorded.asked.clear()
    browser.drag(browser.all(".chart canvas")[0], -60, 60)
    browser.until(lambda: any("from=" in path and "to=" in path for path in recorded.asked))
    edges = "const x = Chart.getChart(document.querySelector('.chart canvas')).options.scales.x; return [x.min, x.max]"
    browser.until(lambda: 10 < browser.js(edges)[0] < browser.js(edges)[1] < 90)
    browser.button("Show all of the axis").click()
    browser.until(lambda: browser.js(edges) == [0, 100])


def test_samples_are_sorted_searched_paged_and_read_by_keyboard(browser: Browser, recorded: FixtureServer) -> None:
    browser.open(f"{recorded.url}/#/samples")
    assert browser.text(".row .score") == "2"
    browser.choose("Sort", "worst")
    browser.until(lambda: browser.text(".row .score") not in ("", "2"))
    browser.type("Search", "What is 30 plus")
    browser.until(lambda: "1 to 1 of 1" in browser.text(".sample-list"))
    browser.type("Search", "nowhere to be found")
    browser.until(lambda: 'No sample of step 100 holds "nowhere to be found".' in browser.text(".sample-list"))
    browser.open(f"{recorded.url}/#/samples?sort=order")
    browser.button("Next").click()
    browser.until(lambda: "51 to 100 of 256" in browser.text(".sample-list"))
    browser.type("Step, 1 to 100", "7")
    browser.until(lambda: browser.text(".row .key") == "g7-0/0")
    browser.js("document.querySelector('.row').focus()")
    browser.press("\ue007")
    browser.until(lambda: "What is 0 plus 7?" in browser.text(".sample-detail"))
    browser.js("document.querySelector('.tokens').focus()")
    browser.press("\ue014", "\ue014")
    browser.until(lambda: browser.text(".sample-detail .facts").startswith('"sum " token 2, id 101'))
    browser.choose("Coloured by", "version")
    browser.until(lambda: browser.all(".tokens .turn-0") and browser.all(".tokens .turn-1"))
    assert browser.complaints() == []


def lengths_s(server: FixtureServer) -> list[float]:
    """Of the times that were asked for, in seconds."""
    found = [re.search(r"from=([\d.]+)&to=([\d.]+)", path) for path in server.asked]
    return [float(each[2]) - float(each[1]) for each in found if each]


def test_lanes_are_moved_zoomed_and_read_by_keyboard(browser: Browser, recorded: FixtureServer) -> None:
    browser.open(f"{recorded.url}/#/time")
    recorded.asked.clear()
    browser.js("document.querySelector('.lanes').focus()")
    browser.press("+", "+", "+", "+", "\ue014")
    browser.until(lambda: any(abs(length - 12.5) < 0.01 for length in lengths_s(recorded)))
    browser.press("\ue015", "]")
    browser.until(lambda: "generator-0" in browser.text(".time .facts"))
    browser.type("Lanes", "trainer")
    browser.until(lambda: "1 lanes" in browser.all(".lanes")[0].get_attribute("aria-label"))
    browser.press("0")
    assert browser.complaints() == []


def test_problems_are_filtered(browser: Browser) -> None:
    with served(FixtureServer([InventedRun(state="running")], is_live=True)) as server:
        browser.open(f"{server.url}/#/problems")
        assert len(browser.all(".problem")) == 2
        assert browser.text("nav .count") == "1"
        browser.choose("When", "now")
        browser.until(lambda: [each.text for each in browser.all(".problem .badge")] == ["now"])
        browser.choose("When", "")
        browser.type("Search", "runtimeerror")
        browser.until(lambda: [each.text for each in browser.all(".problem .badge")] == ["past"])
        assert "docs/generator.md" in browser.text(".problem")


FAKE_TIMERS = """
    window.timers = new Map();
    let last = 0;
    window.setTimeout = (work, wait_ms) => (window.timers.set(++last, { work, wait_ms }), last);
    window.clearTimeout = (timer) => window.timers.delete(timer);
    window.fire = () => {
      const due = [...window.timers.values()];
      window.timers.clear();
      due.forEach(({ work }) => work());
    };
    window.hide = (is) => {
      Object.defineProperty(document, "hidden", { configurable: true, value: is });
      document.dispatchEvent(new Event("visibilitychange"));
    };
"""


def test_a_run_that_goes_on_is_followed_at_a_bounded_pace_and_not_in_hidden_tabs(browser: Browser) -> None:
    run = InventedRun(steps=10, num_steps=50, state="running")
    waits = "return [...window.timers.values()].map((timer) => timer.wait_ms)"
    with browser.script_before_pages(FAKE_TIMERS), served(FixtureServer([run], is_live=True)) as server:
        browser.open(f"{server.url}/#/learning")
        browser.until(lambda: browser.js(waits) == [3000])
        run.steps = 11
        browser.js("window.fire()")
        browser.until(lambda: "step 11 of 50" in browser.text("header"))
        slowest = 0
        for _ in range(6):
            browser.until(lambda: len(browser.js(waits)) == 1)
            slowest = browser.js(waits)[0]
            browser.js("window.fire()")
        assert 10_000 < slowest <= 15_000, "what does not change is asked for less often"
        browser.until(lambda: len(browser.js(waits)) == 1)
        browser.js("window.hide(true)")
        assert browser.js(waits) == []
        run.steps = 12
        browser.js("window.hide(false)")
        browser.until(lambda: "step 12 of 50" in browser.text("header"))
        assert browser.complaints() == []


def test_a_server_that_ended_is_said_in_a_sentence(browser: Browser) -> None:
    with served(FixtureServer([InventedRun()])) as server:
        browser.open(f"{server.url}/#/learning")
    browser.go("weights")
    browser.until(lambda: "does not answer" in browser.text(".notice.error"))
    browser.complaints()


def test_first_paint_and_memory_on_ten_thousand_steps_of_1024_samples(browser: Browser) -> None:
    run = InventedRun(steps=10_000, num_steps=10_000, samples=1024)
    paints_s: list[float] = []
    with served(FixtureServer([run])) as server:
        # The best of three: other tests take the machine's cores meanwhile.
        while not paints_s or (min(paints_s) >= FIRST_PAINT_S and len(paints_s) < 3):
            browser.open(f"{server.url}/#/learning")
            paints_s.append(browser.first_paint_s())
        drawn_s = browser.js("return performance.getEntriesByName('drawn')[0].startTime") / 1000
        heaps = {"learning": browser.heap_bytes()}
        for view, text in LONG_VIEWS.items():
            browser.go(view)
            browser.until(lambda text=text: text in browser.text("main"))
            heaps[view.split("?")[0]] = browser.heap_bytes()
    megabytes = {name: round(size / 1e6, 1) for name, size in heaps.items()}
    print(f"first paint {paints_s} s, charts drawn after {drawn_s:.3f} s, heap {megabytes} MB")
    assert min(paints_s) < FIRST_PAINT_S
    assert max(heaps.values()) < HEAP_BYTES / 2, "half of the promise: a page is left open for days"


DIFF = """
    const done = arguments[arguments.length - 1];
    import("/static/diff.js").then(({ diffWords, diffLines }) => {
      let seed = 7;
      const draw = (most) => (seed = (seed * 48271) % 2147483647) % most;
      const text = () => Array.from({ length: draw(40) }, () => ["a", "b ", "c\\n", "d-e"][draw(4)]).join("");
      const sides = (parts, without) => parts.filter((part) => part.kind !== without).map((part) => part.text).join("");
      const wrong = [];
      for (let turn = 0; turn < 400; turn += 1) {
        const [before, after] = [text(), text()];
        for (const diff of [diffWords, diffLines]) {
          const parts = diff(before, after);
          if (sides(parts, "added") !== before || sides(parts, "removed") !== after) wrong.push([before, after]);
        }
      }
      const far = diffWords("x ".repeat(4000), "y ".repeat(4000));
      const near = diffWords("the sum is 7", "the sum was 7").map((part) => part.kind + part.text);
      done({ wrong, near, far: far.length });
    });
"""


def test_a_diff_holds_both_texts_and_is_the_shortest(browser: Browser, recorded: FixtureServer) -> None:
    browser.open(f"{recorded.url}/#/cost")
    found = browser.driver.execute_async_script(DIFF)
    assert found["wrong"] == []
    assert found["near"] == ["samethe sum ", "removedis", "addedwas", "same 7"]
    assert found["far"] > 0

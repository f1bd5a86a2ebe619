import json
import logging
import subprocess
import sys

import pytest
import structlog

from penstock.process import log_limits
from penstock.process.log_limits import EVENT_BYTES_A_PERIOD, MAX_LINE_BYTES, PERIOD_S, PROCESS_BYTES_A_PERIOD
from penstock.process.log_setup import configure_logging
from tests.helpers.console import ROOT, environment


class Unprintable:
    def __repr__(self):
        raise ValueError("no text")

    __str__ = __repr__


@pytest.fixture
def log(monkeypatch):
    """A process's logger, JSON; the clock stands until a test moves it."""
    now_s = [0.0]
    monkeypatch.setattr(log_limits, "monotonic", lambda: now_s[0])
    handlers = list(logging.getLogger().handlers)
    configure_logging("test", log_format="json")
    logger = structlog.get_logger()
    logger.move = lambda seconds: now_s.__setitem__(0, now_s[0] + seconds)
    yield logger
    logging.getLogger().handlers = handlers
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_line_keeps_both_ends_of_what_is_too_long(log, capsys):
    log.error(
        "refused",
        digest="a" * 400_000 + "z",
    )

    (line,) = lines(capsys)
    assert len(line) <= MAX_LINE_BYTES
    assert json.loads(line)["digest"].endswith("z")


def test_a_line_of_many_fields_is_still_one_line_of_json(log, capsys):
    log.error("refused", **{f"field_{i}": "b" * 1000 for i in range(100)})

    (line,) = lines(capsys)
    assert len(line) <= MAX_LINE_BYTES
    assert json.loads(line)["event"] == "refused"


def test_a_traceback_keeps_its_end(log, capsys):
    def fall(depth):
        if not depth:
            raise ValueError("x" * 100_000 + "the end")
        fall(depth - 1)

    try:
        fall(50)
    except ValueError:
        log.exception("call failed")

    (line,) = lines(capsys)
    assert len(line) <= MAX_LINE_BYTES
    assert json.loads(line)["exception"].endswith("the end")


def test_an_event_has_a_budget_and_what_was_left_out_is_reported_once(log, capsys):
    for number in range(5000):
        log.warning("refused", number=number, text="y" * 500)
    log.warning("something else")
    written = lines(capsys)
    num_refused = sum("refused" in line for line in written)
    assert sum(map(len, written)) <= EVENT_BYTES_A_PERIOD + 2 * MAX_LINE_BYTES
    assert "something else" in written[-1]

    log.move(PERIOD_S)
    log.warning("refused", number=-1)
    log.warning("refused", number=-2)
    summary, *rest = map(json.loads, lines(capsys))
    assert (summary["num"], summary["most"]) == (5000 - num_refused, {"refused": 5000 - num_refused})
    assert [line["number"] for line in rest] == [-1, -2]


def test_events_of_changing_names_are_bounded_together(log, capsys):
    for number in range(20_000):
        log.warning(f"refused {number}", text="y" * 500)

    assert sum(map(len, lines(capsys))) <= PROCESS_BYTES_A_PERIOD + MAX_LINE_BYTES


def test_lines_of_libraries_are_bounded_too(log, capsys):
    library = logging.getLogger("aiohttp.server")
    for number in range(2000):
        try:
            raise ValueError("z" * 50_000)
        except ValueError:
            library.exception("bad request %d", number)

    written = lines(capsys)
    assert json.loads(written[0])["library"] == "aiohttp.server"
    assert sum(map(len, written)) <= EVENT_BYTES_A_PERIOD + MAX_LINE_BYTES


def test_what_cannot_be_printed_never_raises(log, capsys):
    log.error("odd", value=Unprintable(), other="\udcff")
    log.error("next")

    assert "next" in lines(capsys)[-1]


_WRITES_TO_A_FULL_DISK = """
import logging, sys
import structlog
from penstock.process.log_setup import configure_logging
configure_logging("full")
for number in range(3000):
    structlog.get_logger().error("refused", number=number)
    logging.getLogger("library").error("refused %d", number)
from penstock.process.log_limits import LOST
print(LOST._value.get())
"""


def test_a_full_disk_under_the_log_costs_lines_and_nothing_else():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", _WRITES_TO_A_FULL_DISK],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=full, timeout=50, check=False,
        )  # fmt: skip

    assert done.returncode == 0
    assert float(done.stdout) > 100

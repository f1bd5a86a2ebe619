"""What every test gets, and the stores that the broker's suites run on."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from services.broker.records.store import Store
from tests.helpers.stores.stores import GROUPED_STORES, STORES, RedisServers, opened_store, redis_servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, so that no worker begins a long one when the others are done."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -num_slow[item.path])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test that passed the second time failed the first, which a rerun would hide."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command run inside a test sets up logging for its process; the next test must not inherit that."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServers]:
    """Real Redis servers of every kind, started on demand."""
    with redis_servers(Path(tmp_path_factory.mktemp("redis"))) as running:
        yield running


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in GROUPED_STORES)) for kind in STORES])
async def store(request: pytest.FixtureRequest, servers: RedisServers) -> AsyncIterator[Store]:
    """An empty store; the test runs once for each kind."""
    async with opened_store(request.param, servers) as opened:
        yield opened

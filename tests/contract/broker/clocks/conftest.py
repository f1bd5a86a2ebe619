"""A Redis for each test of these."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.stores.redis_server import RedisProcess


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    """A real Redis of the test's own."""
    process = RedisProcess(tmp_path)
    process.start()
    yield process
    process.kill()

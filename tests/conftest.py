"""What every test gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command run inside a test sets up logging for its process; the next test must not inherit that."""
    yield
    structlog.reset_defaults()

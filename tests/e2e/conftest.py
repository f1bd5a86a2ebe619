"""What the end-to-end tests share: the quick start's task, made once, and runs as processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from console.quickstart.prepare import Prepared, prepare

# Kept between test runs; on a clean checkout the first test makes it.
TASK_DIR = Path(__file__).resolve().parents[2] / ".penstock" / "tests"


@pytest.fixture(scope="session")
def task() -> Prepared:
    """The warm-started model and its data."""
    return prepare(TASK_DIR, seed=0, on_progress=print)

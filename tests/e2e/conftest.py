"""What the end-to-end tests share: the quick start's task, made once, and runs as processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from quickstart.prepare import Prepared, prepare

# Where `penstock quickstart` keeps its own: kept between test runs, and on a clean checkout made once, not twice.
TASK_DIR = Path(__file__).resolve().parents[2] / ".penstock" / "quickstart"


@pytest.fixture(scope="session")
def task() -> Prepared:
    """The warm-started model and its data."""
    return prepare(TASK_DIR, seed=0, on_progress=print)

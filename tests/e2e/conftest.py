"""What the end-to-end tests share: the quick start's task, made once, and runs as processes."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quickstart.prepare import Prepared, PrepareSettings, prepare
from quickstart.warm_start import WarmStartSettings

# Kept between test runs, and on a clean checkout made once, not twice.
TASK_DIR = Path(__file__).resolve().parents[2] / ".penstock" / "quickstart"
SHORT = PrepareSettings(
    num_eval_problems=16,
    warm_start=WarmStartSettings(num_curriculum_steps=20, num_decay_steps=60, max_steps=60, check_every_steps=60),
)


@contextmanager
def _alone() -> Iterator[None]:
    """Keeps pytest's other processes from making the same meanwhile."""
    TASK_DIR.parent.mkdir(exist_ok=True)
    with (TASK_DIR.parent / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def task() -> Prepared:
    """Data, and a model after a few steps of its warm start: for runs in which nothing has to be learned."""
    with _alone():
        return prepare(TASK_DIR.with_name("short"), seed=0, on_progress=print, settings=SHORT)


@pytest.fixture(scope="session")
def warm_task() -> Prepared:
    """The quick start's own."""
    return prepare(TASK_DIR, seed=0, on_progress=print)

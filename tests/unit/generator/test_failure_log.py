"""Counts of failures: kept over processes, deaths without a word noticed, a damaged file forgotten."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from services.generator.failure_log import Failure, FailureCounts
from services.generator.metrics import GeneratorMetrics


class Process:
    """One that counts in a folder, and what Prometheus would read of it."""

    def __init__(self, folder: Path) -> None:
        self._registry = CollectorRegistry()
        self.failures = FailureCounts(folder, GeneratorMetrics(self._registry).engine_failures)
        self.failures.begin()

    def seen(self) -> dict[str, float | None]:
        name = "penstock_generator_engine_failures_total"
        return {how.value: self._registry.get_sample_value(name, {"how": how.value}) for how in Failure}


def test_every_count_is_there_from_the_start(tmp_path: Path) -> None:
    assert Process(tmp_path / "new").seen() == {"failed": 0, "hung": 0, "killed": 0}


def test_the_next_process_goes_on_counting(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.failures.count(Failure.HUNG)
    first.failures.end()
    second = Process(tmp_path)
    second.failures.count(Failure.HUNG)
    assert second.seen() == {"failed": 0, "hung": 2, "killed": 0}


def test_a_process_that_ended_without_a_word_is_counted_once(tmp_path: Path) -> None:
    Process(tmp_path)
    second = Process(tmp_path)
    assert second.seen() == {"failed": 0, "hung": 0, "killed": 1}
    second.failures.end()
    assert Process(tmp_path).seen()["killed"] == 1


def test_a_damaged_file_is_forgotten(tmp_path: Path) -> None:
    Process(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text('{"counts": {"failed": -1')
    assert Process(tmp_path).seen() == {"failed": 0, "hung": 0, "killed": 0}

"""A run whose weights are broadcast over gloo: real processes, one of which is killed."""

import pytest

from tests.e2e.runs import assert_balanced, running, small_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def broadcasts_in(log):
    """Number of receivers of each broadcast that went well."""
    return [int(line.split("num_receivers=")[1].split()[0]) for line in log.splitlines() if "weights broadcast" in line]


def test_generators_take_versions_from_broadcasts_and_one_that_dies_is_done_without(task, tmp_path):
    document = small_run(task, tmp_path, generator__count=2, run__num_steps=10)
    document["weights"] = {"transport": "gloo"}
    with running(document, tmp_path) as run:
        log = run.folder.logs / "trainer.log"
        run.wait_for("broadcast to both", lambda: 2 in broadcasts_in(log.read_text()))
        run.kill("generator-1")
        run.wait_for("broadcast after the death", lambda: broadcasts_in(log.read_text())[-1:] in ([1], [2]))
        assert run.end() == 0, run.text
        summary = run.summary()
    assert_balanced(summary, num_samples=10 * 8 * 4)
    assert summary["max_staleness_seen"] <= 1
    # The first one that is alone again, or the two after the restart: the group was formed anew by itself.
    broadcasts = broadcasts_in(log.read_text())
    assert len(broadcasts) >= 4

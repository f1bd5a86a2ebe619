"""A real run on a small disk that fills up: one line, exit status 1, nothing left running, and it is resumed."""

from __future__ import annotations

import pytest

from tests.e2e.runs import RUN_ID, assert_balanced, penstock, running, small_run
from tests.helpers.full_disk import fill, small_disk

pytestmark = [pytest.mark.e2e, pytest.mark.grid, pytest.mark.flaky(reruns=0), pytest.mark.timeout(900)]
DISK_BYTES = 256 * 2**20


def test_a_run_on_a_disk_that_fills_up_ends_by_name_and_is_resumed(task):
    with small_disk(DISK_BYTES) as disk:
        document = small_run(task, disk, run__num_steps=8, run__checkpoint_every_steps=2)
        run_dir = disk / "runs" / RUN_ID
        with running(document, disk) as run:
            run.wait_for_step(3)
            filler = fill(disk)
            assert run.end(timeout_s=240) == 1, run.text
            line = run.lines[-1]
            assert line.startswith(f"penstock: {run_dir}: the disk is full: "), run.text
            assert "MiB free, " in line
            assert f"penstock run --resume {run_dir}" in line
            assert "Traceback" not in run.text
            assert not [record.name for record in run.folder.records() if record.is_alive]
            assert not [path.read_text() for path in run.folder.logs.iterdir() if "Traceback" in path.read_text()]

        filler.unlink()
        with penstock("run", "--resume", str(run_dir), cwd=disk, run_dir=run_dir) as run:
            assert run.end() == 0, run.text
            summary, metrics = run.summary(), run.metrics()

    assert [step["policy_version"] for step in metrics] == list(range(1, 9))
    assert_balanced(summary, num_samples=8 * 8 * 4)

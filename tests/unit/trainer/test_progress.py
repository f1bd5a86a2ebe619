"""What a checkpoint remembers of a run's progress."""

from dataclasses import replace

import pytest

from services.trainer.checkpoint import CheckpointFormatError
from services.trainer.overlap import OverlapTotals
from services.trainer.progress import MAX_LEDGER_STEPS, Progress


def test_progress_survives_a_checkpoint():
    progress = Progress(position=9, outstanding=dict.fromkeys(["t7", "t8"]), num_samples=40, num_dropped_groups=1)
    progress.record_step(("t0", "t1"))
    progress.record_step(("t2", "t7"))
    overlap = OverlapTotals(phase_s=3.0, overlap_s=1.0)
    restored = Progress.from_resume_state(progress.to_resume_state(wall_s=12.0, overlap=overlap))
    assert restored == replace(progress, acked_version=2, wall_s=12.0, overlap=overlap)
    assert list(restored.outstanding) == ["t8"]
    assert [list(step.group_ids) for step in restored.step_records()] == [["t0", "t1"], ["t2", "t7"]]


def test_the_ledger_keeps_the_newest_steps():
    progress = Progress()
    for step in range(MAX_LEDGER_STEPS + 5):
        progress.record_step((f"t{step}",))
    records = progress.step_records()
    assert len(records) == MAX_LEDGER_STEPS
    assert records[-1].policy_version == progress.policy_version == MAX_LEDGER_STEPS + 5


def test_a_damaged_record_is_refused():
    state = Progress().to_resume_state(wall_s=0.0, overlap=OverlapTotals())
    with pytest.raises(CheckpointFormatError):
        Progress.from_resume_state(replace(state, extra={"progress": "{}"}))

"""What a checkpoint remembers of a run's progress."""

import json
from dataclasses import replace

import pytest

from penstock.network.rpc import MAX_MESSAGE_BYTES
from penstock.wire.codec import masked_indices
from services.trainer.checkpoints.checkpoint import CheckpointFormatError
from services.trainer.reporting.overlap import OverlapTotals
from services.trainer.reporting.progress import MAX_LOGGED_STEPS, MAX_RECORD_BYTES, Progress


def test_progress_survives_a_checkpoint():
    progress = Progress(position=9, outstanding=dict.fromkeys(["t7", "t8"]), num_samples=40, num_dropped_groups=1)
    progress.record_step({"t0": [0, 1], "t1": [1]})
    progress.record_step({"t2": [0, 9], "t7": [0]})
    overlap = OverlapTotals(phase_s=3.0, overlap_s=1.0)
    restored = Progress.from_resume_state(progress.to_resume_state(wall_s=12.0, overlap=overlap))
    assert restored == replace(progress, acked_version=2, wall_s=12.0, overlap=overlap)
    assert list(restored.outstanding) == ["t8"]
    assert [list(step.group_ids) for step in restored.step_records()] == [["t0", "t1"], ["t2", "t7"]]
    masks = [[sorted(masked_indices(mask)) for mask in step.trained_samples] for step in restored.step_records()]
    assert masks == [[[0, 1], [1]], [[0, 9], [0]]]


def test_a_checkpoint_from_before_samples_were_kept_is_read():
    progress = Progress()
    progress.record_step({"t0": [0, 1]})
    state = progress.to_resume_state(wall_s=0.0, overlap=OverlapTotals())
    document = json.loads(state.extra["progress"])
    del document["ledger"][0]["trained_samples"]
    [step] = Progress.from_resume_state(replace(state, extra={"progress": json.dumps(document)})).step_records()
    assert (list(step.group_ids), list(step.trained_samples)) == (["t0"], [])


def test_a_group_whose_samples_others_numbered_counts_them():
    progress = Progress()
    progress.record_step({"put": [7, 4_000_000_000]})
    assert len(masked_indices(progress.step_records()[0].trained_samples[0])) == 2


def test_the_ledger_keeps_the_newest_steps():
    progress = Progress()
    for step in range(MAX_LOGGED_STEPS + 5):
        progress.record_step({f"t{step}": [0]})
    records = progress.step_records()
    assert len(records) == MAX_LOGGED_STEPS
    assert records[-1].policy_version == progress.policy_version == MAX_LOGGED_STEPS + 5


@pytest.mark.slow
def test_the_ledger_of_large_steps_fits_one_message():
    """20,000 groups a step for 64 steps used to pass what a message holds, and with it every call to open the run."""
    progress = Progress()
    for step in range(MAX_LOGGED_STEPS):
        progress.record_step({f"agent-3f9c2a41-{step * 20_000 + number}-task": (0, 1) for number in range(20_000)})
    records = progress.step_records()
    assert records[-1].policy_version == progress.policy_version
    assert [step.policy_version for step in records] == list(range(65 - len(records), 65))
    assert sum(step.ByteSize() for step in records) <= MAX_RECORD_BYTES < MAX_MESSAGE_BYTES / 2
    assert [step.policy_version for step in progress.step_records(max_bytes=1)] == [progress.policy_version]


@pytest.mark.parametrize("damage", [{"ledger": None}, {"outstanding": 7}, {"num_samples": "many"}, {"overlap": []}])
def test_a_damaged_record_is_refused(damage):
    state = Progress().to_resume_state(wall_s=0.0, overlap=OverlapTotals())
    document = json.loads(state.extra["progress"])
    for text in ("{}", "[]", json.dumps({**document, **damage})):
        with pytest.raises(CheckpointFormatError, match="cannot be read"):
            Progress.from_resume_state(replace(state, extra={"progress": text}))
    del document["wall_s"]
    with pytest.raises(CheckpointFormatError, match="lacks wall_s"):
        Progress.from_resume_state(replace(state, extra={"progress": json.dumps(document)}))


def test_a_checkpoint_from_before_there_were_instances_is_read():
    state = Progress(num_samples=3).to_resume_state(wall_s=0.0, overlap=OverlapTotals())
    document = json.loads(state.extra["progress"])
    del document["instance_id"], document["epoch"]
    restored = Progress.from_resume_state(replace(state, extra={"progress": json.dumps(document)}))
    assert restored == Progress(num_samples=3)

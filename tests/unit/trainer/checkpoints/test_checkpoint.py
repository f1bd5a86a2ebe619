"""Checkpoints: whole or not there, whatever moment the writer dies."""

import json
from pathlib import Path

import pytest

from services.trainer.checkpoints import checkpoint
from services.trainer.checkpoints.checkpoint import (
    COMPLETE_MARKER,
    STATE_FILE,
    CheckpointFormatError,
    ResumeState,
    begin,
    list_complete,
    load_latest,
)
from tests.unit.trainer.builders import RecordingBackend


def state_at(step: int) -> ResumeState:
    return ResumeState(num_steps=step, data_position=32 * step, extra={"history": "0"})


def newest_state(root: Path) -> ResumeState | None:
    return load_latest(root, backend=RecordingBackend())


def save_step(root: Path, step: int, *, keep_last: int = 10) -> Path:
    saving = begin(root, backend=RecordingBackend(), state=state_at(step))
    assert saving is not None
    return saving.finish(keep_last=keep_last)


class DyingError(Exception):
    """Stands for a kill -9 at one moment of a save."""


def kill_at(monkeypatch, moment):
    def die(*_, **__):
        raise DyingError

    if moment == "while the backend writes":
        monkeypatch.setattr(RecordingBackend, "save", die)
    elif moment == "before the rename":
        monkeypatch.setattr(Path, "rename", die)
    elif moment == "before the marker":
        monkeypatch.setattr(checkpoint, "_write_marker", die)
    elif moment == "while the marker is written":
        monkeypatch.setattr(Path, "replace", die)


MOMENTS = ["while the backend writes", "before the rename", "before the marker", "while the marker is written"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_that_dies_leaves_the_checkpoint_before_as_the_newest(tmp_path, monkeypatch, moment):
    save_step(tmp_path, 1)
    with monkeypatch.context() as patch:
        kill_at(patch, moment)
        with pytest.raises(DyingError):
            save_step(tmp_path, 2)
    assert newest_state(tmp_path) == state_at(1)
    save_step(tmp_path, 2)
    assert newest_state(tmp_path) == state_at(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


def test_what_was_saved_is_loaded(tmp_path):
    path = save_step(tmp_path, 7)
    backend = RecordingBackend()
    assert load_latest(tmp_path, backend=backend) == state_at(7)
    assert backend.loaded == b"weights"
    assert path == tmp_path / "step_7"
    assert not (tmp_path / "step_7.tmp").exists()


def test_nothing_to_load_gives_none(tmp_path):
    assert load_latest(tmp_path / "missing", backend=RecordingBackend()) is None
    assert load_latest(tmp_path, backend=RecordingBackend()) is None


def test_the_newest_step_is_the_highest_number_not_the_last_name(tmp_path):
    for step in (9, 10, 2):
        save_step(tmp_path, step)
    assert list_complete(tmp_path)[-1].name == "step_10"


@pytest.mark.parametrize("damage", ["truncated", "missing", "marker"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage):
    save_step(tmp_path, 1)
    newest = save_step(tmp_path, 2)
    if damage == "truncated":
        (newest / "model.safetensors").write_bytes(b"wei")
    elif damage == "missing":
        (newest / STATE_FILE).unlink()
    else:
        (newest / COMPLETE_MARKER).write_bytes(b"\xff{")
    assert newest_state(tmp_path) == state_at(1)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in range(1, 6):
        save_step(tmp_path, step, keep_last=2)
    assert [path.name for path in list_complete(tmp_path)] == ["step_4", "step_5"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_5"]


def test_other_files_beside_the_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_x").mkdir()
    save_step(tmp_path, 1, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_1", "step_x"]


def test_a_step_is_not_saved_over_a_complete_one(tmp_path):
    save_step(tmp_path, 3)
    before = (tmp_path / "step_3" / COMPLETE_MARKER).stat()
    assert begin(tmp_path, backend=RecordingBackend(), state=state_at(3)) is None
    assert (tmp_path / "step_3" / COMPLETE_MARKER).stat() == before


def rewrite_state(directory: Path, change: dict[str, object]) -> None:
    path, marker = directory / STATE_FILE, directory / COMPLETE_MARKER
    document = json.loads(path.read_text(encoding="utf-8")) | change
    path.write_text(json.dumps(document), encoding="utf-8")
    sizes = json.loads(marker.read_text(encoding="utf-8"))
    sizes["files"][STATE_FILE.as_posix()] = path.stat().st_size
    marker.write_text(json.dumps(sizes), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "format 99"),
        ({"unknown": 1}, "cannot be read"),
        ({"format": None}, "format None"),
    ],
)
def test_a_state_of_another_format_is_an_error_not_a_fresh_start(tmp_path, change, message):
    rewrite_state(save_step(tmp_path, 3), change)
    with pytest.raises(CheckpointFormatError, match=message):
        newest_state(tmp_path)


def test_fields_that_earlier_versions_wrote_are_left_out(tmp_path):
    rewrite_state(
        save_step(tmp_path, 3),
        {"policy_version": 3, "data_epoch": 0, "broker_cursor": "", "trained_group_ids": ["t1", "t2"]},
    )
    assert newest_state(tmp_path) == state_at(3)


def test_keeping_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep_last"):
        save_step(tmp_path, 1, keep_last=0)


def test_a_link_in_a_checkpoints_place_is_deleted_and_not_what_it_leads_to(tmp_path):
    root, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    kept = save_step(elsewhere, 1)
    before = sorted(kept.rglob("*"))
    root.mkdir()
    for name in ("step_1", "step_2", "step_3.tmp"):
        (root / name).symlink_to(kept, target_is_directory=True)
    (root / "step_4").symlink_to(tmp_path / "nowhere")

    for step in (3, 4):
        save_step(root, step, keep_last=1)

    assert [path.name for path in root.iterdir()] == ["step_4"]
    assert not (root / "step_4").is_symlink()
    assert sorted(kept.rglob("*")) == before

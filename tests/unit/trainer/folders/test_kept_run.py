"""What a trainer keeps for its next start: durable, bounded, and with growing delays."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.folders.kept_run import MAX_BYTES, MOST_RETRY_S, Kept, KeptRun, kept_path

KEPT = Kept(run_id="r", config_json="{}", num_begins=2, problem="disk full")


def test_what_is_kept_is_read_back_until_it_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "state" / "trainer-7304.json"
    KeptRun(path).write(KEPT)
    assert KeptRun(path).read() == KEPT
    assert path.stat().st_mode & 0o077 == 0
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    KeptRun(path).clear()
    KeptRun(path).clear()
    assert KeptRun(path).read() is None


def test_without_a_path_nothing_is_kept() -> None:
    kept = KeptRun()
    kept.write(KEPT)
    kept.clear()
    assert kept.read() is None
    assert not kept.is_kept


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format_version": 1}', '{"format_version": 2, "run_id": "r"}', "x" * (MAX_BYTES + 1)]
)
def test_a_file_that_cannot_be_read_is_left_aside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trainer-1.json"
    path.write_text(text)
    assert KeptRun(path).read() is None


def test_a_folder_that_takes_nothing_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    KeptRun(tmp_path / "file" / "trainer-1.json").write(KEPT)


def test_delays_grow_to_half_an_hour() -> None:
    delays = [KeptRun().delay_s(num_begins) for num_begins in (0, 1, 2, 3, 9, 1000)]
    assert delays == [0, 10, 20, 40, MOST_RETRY_S, MOST_RETRY_S]


def test_only_a_trainer_that_is_found_again_keeps_its_run(tmp_path: Path) -> None:
    assert kept_path(tmp_path, "0.0.0.0:7304") == tmp_path / "trainer-7304.json"
    assert kept_path(tmp_path, "127.0.0.1:0") is None
    assert kept_path(None, "127.0.0.1:7304") is None

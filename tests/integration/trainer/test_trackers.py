"""TensorBoard and W&B themselves, where they are installed: Penstock does not require them."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.trainer.reporting.trackers import open_trackers


def track(name: str, run_dir: Path) -> None:
    trackers = open_trackers([name], run_dir, run_id="r", policy_version=0, document={"run": {"seed": 1}})
    for version in (1, 2, 3):
        trackers.log({"reward/mean": version / 4}, policy_version=version)
    trackers.close()


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    track("tensorboard", tmp_path)
    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(each.step, each.value) for each in read.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_wandb_keeps_an_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    track("wandb_offline", tmp_path)
    (kept,) = tmp_path.rglob("*.wandb")
    assert b"reward/mean" in kept.read_bytes()

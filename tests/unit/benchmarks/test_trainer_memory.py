"""The memory of a trainer's process is measured in every phase."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trainer.memory import PHASES, QUICK_SHAPE, make_model, run_role


@pytest.mark.slow
def test_a_process_has_a_peak_in_every_phase(tmp_path: Path) -> None:
    make_model(tmp_path / "model", QUICK_SHAPE)
    (rank,) = run_role(tmp_path / "model", 1, '{"name": "dapo"}')["ranks"]
    assert tuple(rank) == PHASES
    assert 0 < rank["idle"] <= rank["start"]

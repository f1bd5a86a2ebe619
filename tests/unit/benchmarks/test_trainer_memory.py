"""The memory of a trainer's process is measured in every phase."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.made_models import SHAPES, make_model
from benchmarks.trainer.memory import FORMULAS, PHASES, run_role


@pytest.mark.slow
def test_a_process_has_a_peak_in_every_phase(tmp_path: Path) -> None:
    make_model(tmp_path / "model", SHAPES["tiny"])
    (rank,) = run_role(tmp_path / "model", 1, '{"name": "dapo"}')["ranks"]
    assert tuple(rank) == PHASES + FORMULAS
    assert 0 < rank["idle"] <= rank["start"]

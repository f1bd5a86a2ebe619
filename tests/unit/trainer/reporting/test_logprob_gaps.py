"""The file of log-prob gaps: which groups of a step it keeps, what stays of it, and that it is read back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from console.page.files.gap_lines import GapLines
from services.broker.streams.export_stream import _names
from services.trainer.reporting.logprob_gaps import NAME, GapFile, evenly


def write(folder: Path, steps: range, *, max_bytes: int = 2**20, num: int = 3) -> None:
    for step in steps:
        file = GapFile(folder, groups_per_step=None, max_bytes=max_bytes)
        gaps = {(f"t{n}", index): np.full(4, step + index, np.float16) / 8 for n in range(num) for index in range(2)}
        file.add(gaps, [f"t{n}" for n in reversed(range(num))], policy_version=step, history=0)
        file.close()


def kept(folder: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    return [(row["policy_version"], row["group_id"]) for row in rows]


def test_gaps_are_read_back_by_sample(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    lines = GapLines(tmp_path)
    assert lines.of(2, "t1", 1) == [3 / 8] * 4
    assert lines.of(2, "t1", 5) == lines.of(2, "t9", 0) == lines.of(9, "t1", 0) == []
    assert GapLines(tmp_path / "absent").of(2, "t1", 1) == []


def test_lines_that_are_torn_or_nonsense_are_borne(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    place = {"policy_version": 3, "history": 0, "group_id": "t1"}
    odd = [{"0": "?"}, {"0": 3}, None, {"0": "AAA="}]
    with (tmp_path / NAME).open("a") as file:
        file.write("".join(json.dumps(place | {"gaps": each}) + "\n" for each in odd) + '{"policy_ver')
    assert GapLines(tmp_path).of(3, "t1", 0) == []
    assert GapLines(tmp_path).of(2, "t1", 0) == [2 / 8] * 4
    GapFile(tmp_path, groups_per_step=None, max_bytes=2**20).cut_after(1)
    assert kept(tmp_path) == [(1, "t2"), (1, "t1"), (1, "t0")][::-1]
    nan = {"0": "AH4AfA=="}
    (tmp_path / NAME).write_text(json.dumps(place | {"gaps": nan}) + "\n")
    assert GapLines(tmp_path).of(3, "t1", 0) == [None, None]


def test_the_file_stays_below_its_size_with_the_first_and_the_newest_step(tmp_path: Path) -> None:
    write(tmp_path, range(1, 60), max_bytes=4000, num=1)
    steps = [step for step, _ in kept(tmp_path)]
    assert (tmp_path / NAME).stat().st_size <= 4000
    assert (steps[0], steps[-1]) == (1, 59)
    write(tmp_path, range(60, 61), max_bytes=4000, num=30)
    assert sum(step == 60 for step, _ in kept(tmp_path)) == 2


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_the_groups_are_those_that_the_broker_exports(most: int) -> None:
    state: Any = SimpleNamespace(
        index=SimpleNamespace(trained={5: [f"t{n}" for n in (30, 4, 11, 100, 12)]}),
        groups=SimpleNamespace(sequence=lambda name: int(name[1:]) + 1),
    )
    chosen = _names(state, 5, most)
    assert evenly(["t100", "t4", "t12", "t30", "t11"], most) == list(chosen)
    assert evenly(["agent", "t4"], 1) == ["agent"]
    assert len(evenly(["t1", "t2"], None)) == 2

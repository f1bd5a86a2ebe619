"""Curves out of metrics files that grow, are cut, hold nonsense or are long."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

from console.page.files.group_index import MAX_GROUPS, GroupHead, GroupIndex, Place
from console.page.files.metrics_table import MetricsTable
from console.page.files.values import BadQuestionError
from console.page.run_data import RunData
from tests.helpers.page.run_folders import metrics_line, page_folder


def test_curves_over_steps_tokens_and_hours_hold_steps_and_evaluations(tmp_path: Path) -> None:
    data = RunData(page_folder(tmp_path / "r", num_steps=3, step_s=3600.0))
    names = {"names": "reward/mean,eval/greedy_accuracy,unknown"}
    found = data.answer("series", names)
    assert found["x"] == [0.0, 1.0, 2.0, 3.0]
    assert found["series"]["reward/mean"] == [None, 0.1, 0.2, 0.3]
    assert found["series"]["eval/greedy_accuracy"] == [0.5, None, None, 0.5]
    assert found["series"]["unknown"] == [None] * 4
    assert found["steps"] == 3
    assert data.answer("series", names | {"x": "tokens"})["x"] == [0.0, 100.0, 200.0, 300.0]
    assert data.answer("series", {"names": "reward/mean", "x": "hours"})["x"] == [0.0, 1.0, 2.0]
    part = data.answer("series", {"names": "reward/mean", "from": "2", "to": "2.5"})
    assert (part["x"], part["series"]["reward/mean"]) == ([2.0], [0.2])
    assert set(data.answer("series", {})["series"]) == set(data.answer("metrics", {})["names"])


def test_long_runs_are_thinned_to_means_with_their_extremes(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r", num_steps=1)
    values = np.random.default_rng(0).normal(size=10_000)
    folder.metrics.write_text("".join(metrics_line(v + 1, **{"a": float(x)}) for v, x in enumerate(values)))
    found = RunData(folder).answer("series", {"names": "a", "points": "500"})
    buckets = values.reshape(500, 20)
    assert found["series"]["a"] == pytest.approx(buckets.mean(axis=1), rel=1e-4, abs=1e-4)
    assert found["min"]["a"] == pytest.approx(buckets.min(axis=1), rel=1e-4)
    assert found["max"]["a"] == pytest.approx(buckets.max(axis=1), rel=1e-4)


def held_bytes() -> int:
    """Memory that this process has in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_steps_of_1024_samples_take_a_server_less_than_60_mb(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    more = {f"loss/{n}": 0.123456789 for n in range(40)}
    with folder.metrics.open("w") as file:
        file.writelines(metrics_line(version, **more) for version in range(1, 10_001))
    data = RunData(folder)
    data.answer("samples", {})
    before = held_bytes()
    assert data.answer("series", {})["steps"] == 10_000
    # 128 groups of 8 a step; the index forgets the older half of them at its limit, and here holds a part of that.
    index, num_groups = GroupIndex(), MAX_GROUPS // 5
    for number in range(num_groups):
        head = GroupHead(policy_version=1 + number // 128, history=0, group_id=b"t%d" % number, prompt=b"p")
        index.add(head, Place(part=1, begin=number, end=number + 1))
    per_group = sum(column.itemsize for column in index._columns)
    print(f"grew by {(held_bytes() - before) / 1e6:.1f} MB")
    assert held_bytes() - before + (MAX_GROUPS - num_groups) * per_group < 60e6


def test_lines_that_are_torn_late_nonsense_or_of_a_rewind_are_borne(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r", num_steps=3)
    data = RunData(folder)
    assert data.facts()["steps"] == 3
    with folder.metrics.open("ab") as file:
        file.write(b'nonsense\n[1]\n{"policy_version": NaN}\n{"policy_version": true}\n\xff\xfe\n')
        file.write(b'{"policy_version": 4, "a": NaN, "b": Infinity, "c": 1e999, "d": "x", "e": 1}\n{"policy_ver')
    found = data.answer("series", {"names": "a,b,c,d,e,reward/mean"})
    assert [found["series"][name][-1] for name in "abcde"] == [None, None, None, None, 1.0]
    assert found["series"]["reward/mean"] == [0.1, 0.2, 0.3, None]
    with folder.metrics.open("ab") as file:
        file.write(b'sion": 5}\n' + metrics_line(2, **{"reward/mean": 0.9}).encode())
    assert data.answer("series", {"names": "reward/mean"})["series"]["reward/mean"] == [0.1, 0.9]
    replaced = folder.path / "new"
    replaced.write_text(metrics_line(7))
    replaced.replace(folder.metrics)
    assert data.answer("series", {"names": "reward/mean"})["x"] == [7.0]
    folder.metrics.write_text("")
    assert data.facts()["steps"] == 0
    folder.metrics.unlink()
    assert data.facts()["steps"] == 0


def test_memory_is_bounded_by_forgetting_every_second_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"policy_version": {v}, "a": {v}, "step/response_tokens": 1}}\n' for v in range(1, 101)))
    table = MetricsTable(path, max_cells=100)
    table.refresh()
    assert len(table.versions) * 5 <= 100
    assert table.versions[-1] > 90
    assert list(table.column("a")) == list(table.versions)
    assert list(table.tokens) == list(table.versions)
    assert all(math.isnan(time) for time in table.times)


@pytest.mark.parametrize(
    "query",
    [{"x": "days"}, {"points": "0"}, {"points": "1e9"}, {"from": "nan"}, {"names": ",".join(map(str, range(65)))}],
)
def test_bad_questions_name_the_parameter(tmp_path: Path, query: dict[str, str]) -> None:
    with pytest.raises(BadQuestionError, match=next(iter(query))):
        RunData(page_folder(tmp_path / "r")).answer("series", query)

"""The commands of suites whose measuring takes too long for a test: what they pass on, and what they print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.broker import __main__ as broker
from benchmarks.e2e import __main__ as e2e
from console.run.quick import Task

SIDE = {"samples_per_second": 114.3, "seconds_to_reward_0_6": None, "spread": {"samples_per_second": [106.6, 115.4]}}
E2E = {"penstock": SIDE, "trl": {**SIDE, "samples_per_second": 24.2}, "ratio_to_trl": 4.73, "spread": {}}
BROKER = {
    "short": {
        "cpu_s_per_1k": 0.197,
        "num_repetitions": 5,
        "spread": {"cpu_s_per_1k": [0.18, 0.24]},
        "bare_stream": {"cpu_s_per_1k": 0.079},
    },
    "long": {"mb_per_second": 12345.6},
    "memory": {"is_bounded": True},
}


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the suite of a whole run was asked to measure."""
    asked: dict[str, Any] = {}

    async def run(plan: object, **settings: Any) -> dict[str, Any]:
        asked.update(settings, plan=plan)
        return E2E

    async def trl_python(python: Path | None, **_: Any) -> Path:
        return python or Path("made")

    task = Task(model_dir=tmp_path / "model", train_path=tmp_path / "train", eval_path=tmp_path / "eval")
    monkeypatch.setattr(e2e, "prepare_task", lambda *_args, **_settings: task)
    monkeypatch.setattr(e2e, "trl_python", trl_python)
    monkeypatch.setattr(e2e.suite, "run", run)
    monkeypatch.setenv("COLUMNS", "200")
    return asked


def test_a_whole_run_is_measured_as_asked_and_printed_as_json(
    passed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock bench e2e", "--json", "--quick", "--trl-python", "/opt/python"])
    assert e2e.main() == 0
    assert json.loads(capsys.readouterr().out) == E2E
    assert passed["plan"] is e2e.suite.QUICK
    assert (passed["trl_python"], passed["model_dir"]) == (Path("/opt/python"), tmp_path / "model")


def test_the_table_of_a_whole_run_shows_sides_spread_and_targets(
    passed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock bench e2e"])
    assert e2e.main() == 0
    assert passed["plan"] is e2e.suite.FULL
    rows = rows_of(capsys.readouterr().out)
    assert ["penstock", "samples_per_second", "114.3", "106.6 to 115.4", ""] in rows
    assert ["trl", "seconds_to_reward_0_6", "not reached", "", ""] in rows
    assert ["", "ratio_to_trl", "4.73", "", e2e.TARGETS["ratio_to_trl"]] in rows


def test_the_brokers_table_shows_each_workload_and_what_stands_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    broker._show(BROKER)
    rows = rows_of(capsys.readouterr().out)
    assert ["short", "cpu_s_per_1k", "0.197", "0.18 to 0.24", broker.TARGETS["short", "cpu_s_per_1k"]] in rows
    assert ["short: bare_stream", "cpu_s_per_1k", "0.079", "", ""] in rows
    assert ["long", "mb_per_second", "12,346", "", ""] in rows
    assert ["memory", "is_bounded", "True", "", ""] in rows
    assert not any("num_repetitions" in row for row in rows)


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]

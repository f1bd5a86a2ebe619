"""report.html: one file with everything inside, that executes its own scripts and nothing that a run says."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from console.config.run_folder import RunFolder
from console.page import report
from console.page.report import joined_modules, page_html, write_report
from console.page.run_data import RunData
from tests.helpers.brokers.recordings import recorded
from tests.helpers.page.run_folders import metrics_line, page_folder, write_recording

HOSTILE = "</script><script>alert(1)</script><!--"


def embedded(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="embedded">(.*?)</script>', text, flags=re.DOTALL)
    assert found is not None
    answers: dict[str, Any] = json.loads(found[1])
    return answers


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = page_folder(tmp_path / "r")
    samples = [recorded(f"g/{version}", index, version=version) for version in (1, 2, 3) for index in (0, 1)]
    for sample in samples:
        sample.trajectory.text = HOSTILE
    write_recording(made.path / "samples.jsonl", samples)
    made.summary.write_text(json.dumps({"message": HOSTILE, "outcome": "completed", "run_id": "r"}))
    return made


def test_it_holds_the_page_with_its_data_and_runs_its_own_scripts_alone(folder: RunFolder) -> None:
    assert write_report(folder)
    text = folder.report.read_text(encoding="utf-8")
    assert len(text.encode()) <= report.MAX_BYTES
    assert "/static/" not in text
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', text) == []
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    scripts = re.findall(r"<script(?: type=\"module\")?>(.*?)</script>", text, flags=re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts]
    assert f"script-src {' '.join(hashes)};" in policy
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy
    assert len(scripts) == 2
    assert "unsafe" not in policy
    # What a completion says is in the data, where it ends no element.
    answers = embedded(text)
    assert answers["/api/samples?run=0"]["samples"][0]["completion"] == HOSTILE
    assert "alert(1)</script>" not in text
    for path in ("/api/runs", "/api/metrics?run=0", "/api/lanes?run=0", "/api/problems?run=0", "/api/cost?run=0"):
        assert path in answers
    assert set(answers["/api/series?run=0&x=hours"]["series"]) == set(answers["/api/metrics?run=0"]["names"])
    assert answers["/api/sample?run=0&step=1&key=g%2F1%2F0"]["completion"] == HOSTILE
    assert answers["/api/samples?run=0&step=2"]["total"] == 2


def test_modules_are_joined_into_one_script_after_those_that_they_import() -> None:
    script = joined_modules()
    assert not re.search(r"^(import|export)\b", script, flags=re.MULTILINE)
    # Every module is there once: its functions are declared once.
    names = re.findall(r"^(?:async )?function (\w+)", script, flags=re.MULTILINE)
    assert len(names) == len(set(names))
    assert "embeddedAnswer" in names


def test_a_long_run_stays_below_five_megabytes(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"component/{index:03}": 0.1234567 * index for index in range(60)}
    folder.metrics.write_text("".join(metrics_line(version, **many) for version in range(1, 401)))
    monkeypatch.setattr(report, "SERIES_BYTES", 200_000)
    text = page_html(RunData(folder), "")
    assert len(text.encode()) <= report.MAX_BYTES
    curves = [embedded(text)[f"/api/series?run=0&x={axis}"] for axis in ("step", "tokens", "hours")]
    assert len(curves[0]["x"]) > 10
    assert sum(len(json.dumps(each)) for each in curves) < 220_000
    fixed = len(text.encode()) - len(json.dumps(embedded(text), separators=(",", ":")).replace("<", "\\u003c"))
    monkeypatch.setattr(report, "MAX_BYTES", fixed + 20_000)
    small = embedded(page_html(RunData(folder), ""))
    assert "/api/runs" in small
    assert "/api/series?run=0&x=step" not in small


def test_a_run_that_was_cut_short_has_a_report_and_one_without_a_step_has_none(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "cut")
    folder.metrics.write_text(folder.metrics.read_text() + '{"policy_ver')
    assert write_report(folder)
    assert "under way or cut short" in folder.report.read_text()
    empty = RunFolder(tmp_path / "empty")
    assert not write_report(empty)
    assert not empty.report.exists()

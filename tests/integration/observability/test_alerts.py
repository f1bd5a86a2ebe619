"""The alert rules in Prometheus' own tools, and the metrics that they name."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helpers.console import ROOT

FOLDER = ROOT / "deploy" / "observability"
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)"
)


def promtool(*arguments: str | Path) -> str:
    assert PROMTOOL is not None
    told = subprocess.run((PROMTOOL, *arguments), capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def rules(name: str) -> list[dict[str, object]]:
    [group] = yaml.safe_load((FOLDER / name).read_text())["groups"]
    found: list[dict[str, object]] = group["rules"]
    return found


@needs_promtool
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", FOLDER / "prometheus.yml")
    promtool("check", "rules", FOLDER / "alerts.yml", FOLDER / "recording.yml")


@needs_promtool
def test_each_alert_fires_on_its_case_alone_and_none_on_a_healthy_run() -> None:
    promtool("test", "rules", FOLDER / "alerts_test.yml")


def test_every_alert_has_a_case() -> None:
    cases = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    expected = [
        sample["labels"] for case in cases for test in case["promql_expr_test"] for sample in test["exp_samples"]
    ]
    fired = {name for labels in expected for name in re.findall(r'alertname="(\w+)"', labels)}
    assert fired == {str(rule["alert"]) for rule in rules("alerts.yml")}


def test_rules_name_metrics_that_services_export() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    exported = set(re.findall(r"^\| `(penstock_\w+)`", page, re.MULTILINE))
    named = {
        re.sub(r"_bucket$", "", name)
        for file in ("alerts.yml", "recording.yml")
        for rule in rules(file)
        for name in re.findall(r"\bpenstock_\w+", str(rule["expr"]))
    }
    assert named
    assert named <= exported

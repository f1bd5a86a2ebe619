"""The alert rules in Prometheus' own tools, and the metrics that they name."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from console.serve.serve import ServiceKind
from penstock.process.grace_periods import LAST_ACT_S
from tests.helpers.console import ROOT
from tests.helpers.headings import anchors_of
from tests.helpers.observability.prometheus import job_names

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


def test_every_kind_of_service_is_scraped() -> None:
    kinds = {*map(str, ServiceKind), *LAST_ACT_S}
    assert job_names() == {*(f"penstock-{kind}" for kind in kinds), "penstock-run"}


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


def alerts_of_rows(page: str, heading: str) -> dict[str, set[str]]:
    """The alerts in the last column of the first table after some words of a page, by the first column."""
    table = (ROOT / "docs" / page).read_text().partition(heading)[2].partition("\n|")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {row[0]: {f"Penstock{name}" for name in re.findall(r"`(\w+)`", row[-1])} for row in rows}


def test_every_invariant_and_every_fault_has_an_alert() -> None:
    invariants = alerts_of_rows("architecture.md", "With `PENSTOCK_HYPOTHESIS=long` all run for hours.")
    faults = alerts_of_rows("operating.md", "## What fails, and what happens")
    assert (len(invariants), len(faults)) == (7, 16)
    there = {str(rule["alert"]) for rule in rules("alerts.yml")}
    for row, named in (invariants | faults).items():
        assert named, f"{row}: no alert"
        assert named <= there, f"{row}: {named - there} are not in alerts.yml"


def test_every_alert_says_what_it_means_what_explains_it_what_to_do_and_where_to_read_on() -> None:
    for rule in rules("alerts.yml"):
        said = rule["annotations"]
        assert isinstance(said, dict)
        assert all(said.get(name) for name in ("summary", "description", "command", "fix", "page")), rule["alert"]
        page, _, anchor = said["page"].partition("#")
        assert anchor in anchors_of(ROOT / page), f"{rule['alert']}: page: {said['page']} has no such heading"


def test_every_alert_is_provoked_on_a_real_prometheus() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    provoked = set(re.findall(r'until_fires\(\s*"(\w+)"', tests))
    assert provoked == {str(rule["alert"]) for rule in rules("alerts.yml")}

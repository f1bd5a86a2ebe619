"""The deployed rules with time compressed, so that a test sees in seconds what an alert waits minutes for. Pure.

Divided by the factor are all durations (`for:`, ranges as `[10m]`, offsets) and the thresholds that are times. Shares,
counts and rates a second stay as they are: a fault of a test is as strong as a real one, and lasts as much shorter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.console import ROOT

FOLDER = ROOT / "deploy" / "observability"
RULE_FILES = ("alerts.yml", "recording.yml")
THRESHOLDS_S = {"PenstockWaitIsLong": "1800"}
"""Thresholds in seconds, by alert."""
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"\b(\d+)(ms|s|m|h|d)\b")


def rules(name: str = "alerts.yml") -> list[dict[str, Any]]:
    """The rules of a file as they are deployed."""
    [group] = yaml.safe_load((FOLDER / name).read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def write_rules(folder: Path, *, factor: int, name: str = "alerts.yml", suffix: str = "") -> Path:
    """The rules of a file, all durations divided by `factor`; `suffix` is added to the names of alerts."""
    document = yaml.safe_load((FOLDER / name).read_text())
    for group in document["groups"]:
        group["name"] += suffix
        for rule in group["rules"]:
            _compress(rule, factor)
            if "alert" in rule:
                rule["alert"] += suffix
    path = folder / f"{suffix}{name}"
    path.write_text(yaml.safe_dump(document))
    return path


def _compress(rule: dict[str, Any], factor: int) -> None:
    rule["expr"] = compressed(rule["expr"], factor)
    if "for" in rule:
        rule["for"] = compressed(rule["for"], factor)
    if (threshold := THRESHOLDS_S.get(rule.get("alert", ""))) is not None:
        before, found, after = rule["expr"].rpartition(threshold)
        assert found, f"{rule['alert']} has no threshold of {threshold} s any more; correct THRESHOLDS_S"
        rule["expr"] = f"{before}{float(threshold) / factor}{after}"


def compressed(text: str, factor: int) -> str:
    """The text with every duration divided, to whole milliseconds."""
    return _DURATION.sub(lambda found: f"{int(found[1]) * _UNIT_MS[found[2]] // factor}ms", text)

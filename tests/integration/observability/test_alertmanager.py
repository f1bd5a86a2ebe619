"""The deployed routes and inhibitions in a real Alertmanager: of a storm of alerts the cause is told."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from tests.helpers.observability.alertmanager import AMTOOL, CONFIGURATION, alertmanager, needs_alertmanager
from tests.helpers.observability.compressed_rules import rules


def firing(name: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, **labels}


def test_inhibitions_name_alerts_that_exist() -> None:
    settings = yaml.safe_load(CONFIGURATION.read_text())
    named = set(re.findall(r"Penstock\w+", str(settings["inhibit_rules"])))
    assert named
    assert named <= {rule["alert"] for rule in rules()}


@needs_alertmanager
def test_amtool_takes_the_configuration_and_routes_every_alert() -> None:
    assert AMTOOL is not None
    for arguments in (
        ["check-config", str(CONFIGURATION)],
        *(
            [
                "config",
                "routes",
                "test",
                f"--config.file={CONFIGURATION}",
                "--verify.receivers=page",
                f"severity={each}",
            ]
            for each in ("critical", "warning", "info")
        ),
    ):
        told = subprocess.run((AMTOOL, *arguments), capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode == 0, told.stdout + told.stderr


@needs_alertmanager
async def test_consequences_are_not_alerted_beside_their_cause(tmp_path: Path) -> None:
    consequences = [
        firing("PenstockNoProgress", run="r", severity="critical"),
        firing("PenstockWaitIsLong", run="r", severity="warning"),
        firing("PenstockLeasesExpire", kind="generation", severity="warning"),
        firing("PenstockTrainerStarves", instance="t", severity="info"),
    ]
    other = firing("PenstockConservationBroken", run="r", severity="critical")
    names = {labels["alertname"] for labels in consequences}
    async with alertmanager(tmp_path / "alertmanager") as seen:
        await seen.post([*consequences, other])
        # A run that stands still is why something waits; nothing else explains the others.
        await seen.until(told=names - {"PenstockWaitIsLong"} | {other["alertname"]}, inhibited={"PenstockWaitIsLong"})
        await seen.post([firing("PenstockServiceDown", job="penstock-broker", instance="b")])
        told = {"PenstockServiceDown", "PenstockNoProgress", other["alertname"]}
        await seen.until(told=told, inhibited=names - told)
        await seen.post([firing("PenstockRedisFaults", instance="b", kind="unreachable")])
        await seen.until(told=told - {"PenstockNoProgress"} | {"PenstockRedisFaults"}, inhibited=names)

"""The dashboards ask for metrics that services export, in queries that Prometheus understands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from tests.helpers.console import ROOT
from tests.helpers.observability.dashboards import DASHBOARDS, panels
from tests.integration.observability.test_alerts import needs_promtool, promtool


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def test_they_ask_for_metrics_that_services_export() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    exported = set(re.findall(r"^\| `(penstock_\w+)`", page, re.MULTILINE))
    asked = {re.sub(r"_bucket$", "", name) for query in queries() for name in re.findall(r"penstock_\w+", query)}
    assert len(DASHBOARDS) >= 6
    assert asked - exported == set()


@needs_promtool
def test_prometheus_understands_their_queries(tmp_path: Path) -> None:
    rules = [{"record": f"query:{index}", "expr": query.replace("$run", ".*")} for index, query in enumerate(queries())]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    promtool("check", "rules", path)


def test_panels_lie_beside_each_other() -> None:
    for path in DASHBOARDS:
        places = [panel["gridPos"] for panel in json.loads(path.read_text())["panels"]]
        assert len({(place["x"], place["y"]) for place in places}) == len(places)
        assert all(place["x"] + place["w"] <= 24 for place in places)

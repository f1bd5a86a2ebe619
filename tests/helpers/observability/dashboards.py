"""The panels of the deployed dashboards, and which of them have something to show."""

from __future__ import annotations

import json
from typing import Any

from tests.helpers.observability.compressed_rules import FOLDER
from tests.helpers.observability.prometheus import Prometheus

DASHBOARDS = sorted((FOLDER / "grafana" / "dashboards").glob("*.json"))


def panels() -> list[dict[str, Any]]:
    """Those of all dashboards."""
    return [panel for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]]


async def empty_panels(seen: Prometheus) -> set[str]:
    """The titles of those to none of whose queries Prometheus has a series."""
    found = set()
    for panel in panels():
        answers = [await seen.query("query", query=each["expr"].replace("$run", ".*")) for each in panel["targets"]]
        assert None not in answers, f"{panel['title']}: Prometheus does not answer, or refuses the query"
        if not any(answer["result"] for answer in answers):
            found.add(panel["title"])
    return found
